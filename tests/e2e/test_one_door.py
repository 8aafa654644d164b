# SPDX-License-Identifier: Apache-2.0
"""One door: the same tests over every backend of the library. Only the engine directories differ."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import zlib
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from engines.build import build_cpu_engine
from engines.simulated import write_simulated_engine
from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.common.errors import InvalidArgumentError, from_status
from tests.support import native
from tests.support.door import Door, Engines, contract
from tests.support.suite import ENGINE, all_gone, run, up
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)

STANDIN = "tests/executor_standin"
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def simulated(folder: Path) -> Engines:
    """Engines that compute nothing, and take their time for it: the longest answer takes 12 s to be cancelled in."""
    write_simulated_engine(
        folder / "texts", engine_id="texts", time_mode="real", step_us=3000, max_input_tokens=512,
        max_output_tokens=4000, max_sequence_tokens=4512,
    )  # fmt: skip
    write_simulated_engine(
        folder / "states", engine_id="states", time_mode="real", max_output_tokens=0, max_input_tokens=128,
        payload_dtype="float16",
    )  # fmt: skip
    return Engines(folder / "texts", folder / "states", {})


def llama(_folder: Path) -> Engines:
    """The small CPU model."""
    hidden = ENGINE.with_name(f"{ENGINE.name}-hidden")
    build_cpu_engine(hidden, tier="cpu-hidden", tool=native.build("ifab_llama_tool"))
    return Engines(ENGINE, hidden, {})


def executor(folder: Path) -> Engines:
    """The backend for TensorRT-LLM's Executor, on our stand-in for its runtime."""
    library = native.build("libifab_engine_standin.so", folder=STANDIN)
    convert = native.build("ifab_executor_directory", folder=STANDIN)
    made = simulated(folder / "simulated")
    for name in ("texts", "states"):
        subprocess.run([convert, folder / "simulated" / name, folder / name], check=True, timeout=60)
    return Engines(folder / "texts", folder / "states", {**made.env, "IFAB_ENGINE_LIBRARY": str(library)})


def vendor(_folder: Path) -> Engines:
    """Engines for the card of this machine: directories named by the environment, as their builders wrote them."""
    places = {name: os.environ.get(f"DOOR_{name}") for name in ("TEXTS", "STATES")}
    missing = [f"DOOR_{name}" for name, place in places.items() if not place]
    if missing:
        pytest.fail(f"set {' and '.join(missing)} to engine directories for this card")
    return Engines(native.ROOT / str(places["TEXTS"]), native.ROOT / str(places["STATES"]), {})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(simulated, id="simulated"),
        pytest.param(llama, id="llama", marks=pytest.mark.slow),
        pytest.param(executor, id="executor"),
        pytest.param(vendor, id="card", marks=pytest.mark.gpu),
    ],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    make: Callable[[Path], Engines] = request.param
    return make(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def door(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    logs = tmp_path_factory.mktemp("logs")
    with up(logs, [engines.texts, engines.states], env=engines.env) as running:
        yield Door(running, contract(engines.texts), contract(engines.states))


async def test_a_request_gets_the_same_tokens_alone_and_in_a_batch_where_that_is_promised(door: Door) -> None:
    requests = [door.request(f"r{number}", f"Question {number}:", most=10) for number in range(10)]
    for request in requests[::2]:
        request.sampling.temperature = 0.9
        request.sampling.seed = 11
    outcomes, report, _ = await door.exchange(requests)
    assert report.generated_tokens == sum(each.finished.usage.generated_tokens for each in outcomes.values()) > 0
    async with door.broker() as broker:
        for request in requests[:4]:
            alone = await broker.Generate(broker_service_pb2.GenerateRequest(request=request), timeout=PATIENCE_S)
            batched = outcomes[request.request_id].finished.samples[0]
            assert 1 <= len(batched.token_ids) <= 10
            if door.texts["capabilities"]["reproducible"]:
                assert alone.result.samples[0].token_ids == batched.token_ids
                assert alone.result.samples[0].text == batched.text


async def test_a_shared_head_is_computed_once_and_counted_so(door: Door) -> None:
    block = door.texts["limits"]["kv_block_tokens"]
    head = [(7 * position) % 200 + 20 for position in range(4 * block)]
    requests = [
        door.request(f"r{number}", [*head, *((3 * number + step) % 200 + 20 for step in range(10))], most=2)
        for number in range(12)
    ]
    [before, _] = await door.stats()
    outcomes, report, _ = await door.exchange(requests)
    [after, _] = await door.stats()
    least = len(head) + 12 * 10
    assert report.prompt_tokens_logical == 12 * (len(head) + 10)
    assert report.prompt_tokens_computed == report.prompt_tokens_bound == least
    assert after.prompt_tokens_computed - before.prompt_tokens_computed == least, "the engine's own counter"
    cached = sorted(each.finished.usage.cached_tokens for each in outcomes.values())
    assert cached == [0, *[len(head)] * 11]


async def test_a_stream_starts_counts_and_ends_and_adds_up(door: Door) -> None:
    request = door.request("s", "Once upon a time", most=12)
    whole, _, _ = await door.exchange([request])
    rest, _, streamed = await door.exchange([request], deltas=True)
    text = whole["s"].finished.samples[0].text
    # What was sent as deltas is not repeated: the end has what had to be held back, such as half a character.
    assert streamed.get("s", "") + rest["s"].finished.samples[0].text == text
    async with door.broker() as broker:
        call = broker.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=request), timeout=PATIENCE_S)
        messages = [message async for message in call]
    assert [message.sequence_number for message in messages] == list(range(len(messages)))
    kinds = [message.WhichOneof("event") for message in messages]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert set(kinds[1:-1]) <= {"delta"}
    sent = "".join(message.delta.text for message in messages)
    assert sent + messages[-1].finished.samples[0].text == text


@pytest.mark.parametrize("after", [0, 3])
async def test_a_client_that_goes_away_leaves_nothing_in_the_engine(door: Door, after: int) -> None:
    request = door.request("", "Count as far as you can: 1, 2, 3,", most=door.texts["limits"]["max_output_tokens"])
    request.ignore_end = True
    async with door.broker() as broker:
        call = broker.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=request), timeout=40)
        for _ in range(after + 1):
            assert await call.read() is not grpc.aio.EOF
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()

    async def idle() -> bool:
        return all(stats.active == 0 and stats.queued == 0 for stats in await door.stats())

    await wait_until(idle, what="an idle engine")


async def test_cancel_by_id_ends_a_request_with_its_reason(door: Door) -> None:
    request = door.request("to-cancel", "Count:", most=door.texts["limits"]["max_output_tokens"])
    request.ignore_end = True
    async with door.broker() as broker:
        call = broker.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=request), timeout=40)
        async for message in call:
            if message.HasField("delta"):
                break
        cancel = broker_service_pb2.CancelRequestsRequest(request_ids=["to-cancel"])
        assert (await broker.CancelRequests(cancel, timeout=30)).cancelled_count == 1
        last = [message async for message in call][-1]
    assert last.finished.samples[0].finish_reason == generation_pb2.FINISH_REASON_CANCELLED


async def test_a_bad_item_fails_alone_and_by_name(door: Door) -> None:
    requests = [door.request(f"good-{number}", f"Neighbour {number} says", most=2) for number in range(15)]
    bad = door.request("bad", [1, 2, door.texts["model"]["vocab_size"]], most=2)
    requests.insert(7, bad)
    outcomes, _, _ = await door.exchange(requests)
    error = from_status(outcomes.pop("bad").failed)
    assert isinstance(error, InvalidArgumentError)
    assert [violation.field for violation in error.violations] == ["prompt.tokens.ids[2]"]
    assert all(outcome.HasField("finished") for outcome in outcomes.values())


def test_a_bulk_job_writes_a_result_or_an_error_for_each_row(door: Door, tmp_path: Path) -> None:
    rows = [json.dumps({"id": f"r{n}", "prompt": f"Head {n % 4} of row {n}", "max_tokens": 3}) for n in range(30)]
    rows[9] = json.dumps({"id": "long", "token_ids": [1] * 5000, "max_tokens": 3})
    rows[23] = "no row"
    source, output = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    source.write_text("\n".join(rows))
    engine_id = door.texts["engine_id"]
    words = ("bulk", "run", str(source), "-o", str(output), "--broker", door.suite.broker, "--engine-id", engine_id)
    done = run(*words, "--json", within_s=100)
    assert done.returncode == 1
    assert "2 of 30 rows failed; see " in done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"]) == (30, 2)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["id"] for row in written} == {f"r{n}" for n in range(30) if n not in {9, 23}}
    assert all(row["finish_reason"] in {"stop", "length"} for row in written)
    errors = [json.loads(line) for line in (tmp_path / "results.errors.jsonl").read_text().splitlines()]
    assert {error["id"] for error in errors} == {"long", "line-24"}


def test_hidden_states_come_back_whole_and_reproducibly(door: Door, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps({"id": f"r{n}", "prompt": f"Row {n}"}) for n in range(12)))
    form = door.states["capabilities"]["payload"]
    found = []
    for turn in range(2):
        output = tmp_path / f"results-{turn}.jsonl"
        words = ("bulk", "run", str(source), "-o", str(output), "--broker", door.suite.broker)
        done = run(*words, "--engine-id", door.states["engine_id"], "--json", within_s=100)
        assert done.returncode == 0, done.stderr
        payloads = {}
        for row in map(json.loads, output.read_text().splitlines()):
            values = base64.b64decode(row["payload"]["base64"])
            assert len(values) == BYTES[form["dtype"]] * int(np.prod(form["shape"]))
            assert zlib.crc32(values) == row["payload"]["crc32"]
            assert any(values)
            payloads[row["id"]] = values
        assert len(payloads) == 12
        found.append(payloads)
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 12


async def test_a_payload_that_is_left_out_is_not_extracted(door: Door) -> None:
    requests = [door.request(f"r{number}", f"Row {number}", most=0, states=True) for number in range(8)]
    for request in requests[::2]:
        request.omit_payload = True
    [_, before] = await door.stats()
    outcomes, _, _ = await door.exchange(requests)
    [_, after] = await door.stats()
    with_payload = {name for name, outcome in outcomes.items() if outcome.finished.HasField("payload")}
    assert with_payload == {"r1", "r3", "r5", "r7"}
    assert after.payload_bytes - before.payload_bytes == sum(
        len(outcomes[name].finished.payload.data) for name in with_payload
    )


async def test_an_end_lets_work_in_flight_finish(engines: Engines, tmp_path: Path) -> None:
    with up(tmp_path, [engines.texts], env=engines.env) as running:
        ending = Door(running, contract(engines.texts), {})
        request = ending.request("last", "The last words:", most=40)
        request.ignore_end = True
        async with ending.broker() as broker:
            messages: list[broker_service_pb2.GenerateStreamResponse] = []
            async for message in broker.GenerateStream(
                broker_service_pb2.GenerateStreamRequest(request=request), timeout=40
            ):
                if not messages:
                    stopped = asyncio.get_running_loop().run_in_executor(None, running.stop)
                messages.append(message)
        assert messages[0].HasField("started")
        assert messages[-1].finished.usage.generated_tokens == 40
        assert await stopped == 0
        all_gone(running.pids, within_s=1)
