# SPDX-License-Identifier: Apache-2.0
"""Thirteen kinds of fault that public reports describe of servers like ours, each done to the whole suite.

Real processes all through: provisioner, workers with a simulated engine, broker. Each test says what went wrong
elsewhere, and shows what happens here instead.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from engines.simulated import BYTE_TOKENS, THROW, RequestFault, SimulatedEngine, Simulation
from ifabric.broker.v1 import broker_service_pb2
from services.common.errors import AlreadyExistsError, FabricError, InvalidArgumentError
from services.common.rpc import channel
from tests.chaos.client import client_of, request
from tests.chaos.metrics import scraped, text_of
from tests.jobs.running import ENGINE, Fabric
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.client import Client, Outcome
    from tests.support.processes import ServiceProcess

pytestmark = pytest.mark.e2e

LIMITS: dict[str, Any] = {"max_input_tokens": 256, "max_sequence_tokens": 320, "max_output_tokens": 128}
SPECIAL = 500
FATAL = 501
"""Token ids that faults wait for; the probe of a worker has neither."""


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """A suite that the tests which share it do not harm."""
    with Fabric(tmp_path_factory.mktemp("faults"), engine=LIMITS) as made:
        yield made.start()


def finished(outcomes: dict[str, list[Outcome]]) -> set[str]:
    return {name for name, (only,) in outcomes.items() if isinstance(only, broker_service_pb2.GenerationResult)}


def failed(outcomes: dict[str, list[Outcome]]) -> dict[str, FabricError]:
    return {name: only for name, (only,) in outcomes.items() if isinstance(only, FabricError)}


def in_flight(fabric: Fabric) -> dict[str, int]:
    """Requests that each node has, as the broker says; only nodes that have some."""
    found = re.findall(r'ifabric_broker_in_flight{node="([^"]+)"} (\S+)', text_of(fabric.brokers[0]))
    return {node: int(float(count)) for node, count in found if float(count)}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_fault_01_work_that_a_worker_took_and_did_not_start_runs_elsewhere(
    tmp_path: Path, how: signal.Signals
) -> None:
    """Elsewhere a request hangs until its client's limit when its worker leaves after the dispatch."""
    slots = 2
    slow = {"step_us": 30_000, "slots": slots}
    broker = {"silence_limit_s": 3, "bulk_linger_s": 0}
    with Fabric(tmp_path, workers=2, engine=slow, broker=broker) as fabric:
        fabric.start()
        async with client_of(fabric, nodes=2) as client:
            running = asyncio.create_task(client.exchange([request(f"r{i}", [1, 2, 3, i], 70) for i in range(8)]))

            async def overfull() -> str:
                """A node that has more than it can have started."""
                assert not running.done(), running.exception() or "all have ended already"
                known = await asyncio.to_thread(in_flight, fabric)
                return next((node for node, count in known.items() if count > slots), "")

            node = await wait_until(overfull, what="a worker has work that it has not started")
            worker = fabric.workers[int(node.rpartition("-")[2])]
            assert worker.process is not None
            os.kill(worker.process.pid, how)
            assert finished(await running) == {f"r{i}" for i in range(8)}
            assert scraped(fabric.brokers[0], "ifabric_broker_reattempts_total") >= 1


async def test_fault_02_a_client_that_is_gone_frees_its_slot(tmp_path: Path) -> None:
    """Elsewhere the slot of a client that went away computes on for nobody."""
    one = {"slots": 1, "step_us": 5_000, "max_output_tokens": 10_000, "max_sequence_tokens": 10_100}
    with Fabric(tmp_path, engine=one) as fabric:
        fabric.start()
        async with client_of(fabric) as client:

            def stream(name: str, max_tokens: int) -> Any:
                made = broker_service_pb2.GenerateStreamRequest(request=request(name, [1, 2, 3], max_tokens))
                return client.stub.GenerateStream(made, timeout=100)

            def both_there() -> bool:
                known = ("ifabric_broker_in_flight", "ifabric_broker_queue_depth")
                return sum(scraped(fabric.brokers[0], name) for name in known) >= 2

            running = stream("running", 10_000)
            async for event in running:
                if event.HasField("delta"):
                    break  # it has the slot, and a token
            waiting = stream("waiting", 10_000)
            await wait_until(both_there, what="the other one waits for the slot")
            for call in (waiting, running):
                call.cancel()
            result = await client.one(request("short", [4, 5, 6], 1), within_s=25)  # a long one would take 50 s
            assert result.samples
            await wait_until(
                lambda: scraped(fabric.workers[0], "ifabric_worker_engine_requests_total") >= 2, what="both have ended"
            )
            await wait_until(
                lambda: scraped(fabric.workers[0], "ifabric_worker_engine_active") == 0, within_s=20, what="no work"
            )
            done = stream("done", 1)
            assert [event async for event in done][-1].HasField("finished")
            done.cancel()  # after its end: there is nothing left that it could harm
            assert (await client.one(request("short", [4, 5, 6], 1), within_s=25)).samples


async def test_fault_03_streamed_text_is_the_text(fabric: Fabric) -> None:
    """Elsewhere characters that take several tokens are streamed as replacement characters."""
    simulation = Simulation(SimulatedEngine(**{**ENGINE, **LIMITS}))
    characters: set[str] = set()
    async with client_of(fabric) as client:
        for seed in range(20):
            made = request(f"utf-{seed}", [seed, 1, 2], 64)
            made.sampling.seed = seed
            whole = (await client.one(made)).samples[0].text
            tokens = simulation.tokens([seed, 1, 2], 64, seed=seed)
            written = b"".join(bytes([token]) if token < BYTE_TOKENS else b" w%d" % token for token in tokens)
            assert whole == written.decode(errors="replace")
            characters.update(whole)
            pieces = []
            call = client.stub.GenerateStream(
                broker_service_pb2.GenerateStreamRequest(request=made), timeout=PATIENCE_S
            )
            async for event in call:
                if event.HasField("delta"):
                    pieces.append(event.delta.text)
                elif event.HasField("finished"):
                    pieces.append("".join(sample.text for sample in event.finished.samples))
            assert "".join(pieces) == whole
    assert any("\x7f" < character != "\ufffd" for character in characters), "no character took two tokens"


async def test_fault_04_a_prompt_that_is_too_long_is_refused_and_harms_nobody(fabric: Fabric) -> None:
    """Elsewhere one such prompt ends the engine, and all its neighbours with it."""
    limit, sequence = LIMITS["max_input_tokens"], LIMITS["max_sequence_tokens"]
    async with client_of(fabric) as client:
        outcomes = await client.exchange(
            [
                request("below", [7] * (limit - 1), 1),
                request("at", [7] * limit, 1),
                request("above", [7] * (limit + 1), 1),
                request("with output", [7] * limit, sequence - limit + 1),
                request("good", [7] * 10, 4),
            ]
        )
    assert finished(outcomes) == {"below", "at", "good"}
    errors = failed(outcomes)
    assert all(isinstance(error, InvalidArgumentError) for error in errors.values())
    assert f"{limit + 1}" in errors["above"].message
    assert f"{limit}" in errors["above"].message
    assert f"{sequence}" in errors["with output"].message


async def test_fault_05_more_tokens_than_a_step_takes_are_held_back_and_none_is_lost(tmp_path: Path) -> None:
    """Elsewhere the sum of what waits crashes or hangs the batcher once it is over the step's budget."""
    whole = {
        "step_token_budget": 1024, "splits_prompts": False, "max_input_tokens": 1024,
        "max_sequence_tokens": 1100, "max_output_tokens": 64,
    }  # fmt: skip
    with Fabric(tmp_path, engine=whole) as fabric:
        fabric.start()
        async with client_of(fabric) as client:
            prompts = [request(f"p{i}", [i] * 400, 2) for i in range(5)]
            outcomes = await client.exchange([*prompts, request("full", [9] * 1024, 2), request("over", [9] * 1025, 2)])
    assert finished(outcomes) == {*(f"p{i}" for i in range(5)), "full"}
    assert "1025" in failed(outcomes)["over"].message


async def test_fault_06_a_prompt_of_nothing_is_one_requests_fault(fabric: Fabric) -> None:
    """Elsewhere an empty list of tokens ends the engine."""
    async with client_of(fabric) as client:
        error = await client.refusal(request("alone", []))
        assert isinstance(error, InvalidArgumentError)
        batch = [request(f"r{i}", [1, 2, i]) for i in range(15)]
        outcomes = await client.exchange([*batch[:7], request("empty", []), *batch[7:]])
    assert finished(outcomes) == {f"r{i}" for i in range(15)}
    assert isinstance(failed(outcomes)["empty"], InvalidArgumentError)


@pytest.mark.parametrize("wrong", [0, -1, 2**31 - 1, None])
async def test_fault_07_a_number_of_tokens_that_makes_no_sense_is_refused(fabric: Fabric, wrong: int | None) -> None:
    """Elsewhere `max_tokens` of 0 crashes, and negative ones are taken."""
    async with client_of(fabric) as client:
        outcomes = await client.exchange([request("wrong", [1, 2], wrong), request("good", [1, 2, 3])])
    assert finished(outcomes) == {"good"}
    assert "max_tokens" in [violation.field for violation in failed(outcomes)["wrong"].violations]


async def test_fault_08_an_id_that_is_used_twice_crosses_nothing(fabric: Fabric) -> None:
    """Elsewhere the second request of an id hangs, or the abort of the first ends the second."""
    long, short = request("same", [1, 2, 3], 100), request("same", [4, 5, 6], 4)
    async with client_of(fabric) as client:
        outcomes = await client.exchange([long, short])
        assert sorted(type(each).__name__ for each in outcomes["same"]) == ["AlreadyExistsError", "GenerationResult"]
        both = await asyncio.gather(client.exchange([long]), client.exchange([short]))
        results = [only for (only,) in (outcomes["same"] for outcomes in both)]
        served = [each for each in results if isinstance(each, broker_service_pb2.GenerationResult)]
        assert served
        assert all(isinstance(each, AlreadyExistsError) for each in results if each not in served)
        # The id again, right after it was cancelled: what the first left behind never touches the second.
        expected = (await client.one(short)).samples[0].text
        for _ in range(20):
            await client.exchange([long], cancel=["same"])
            assert (await client.one(short)).samples[0].text == expected


@pytest.mark.parametrize("wrong", [-1, SimulatedEngine().vocab_size, 2**31 - 1])
async def test_fault_09_ids_outside_the_vocabulary_never_reach_the_engine(fabric: Fabric, wrong: int) -> None:
    """Elsewhere they write into a neighbour's memory, or end every process of the engine."""
    prompt, stop = request("prompt", [1, 2, wrong, 3]), request("stop", [1, 2])
    stop.stop_token_ids.append(wrong)
    async with client_of(fabric) as client:
        outcomes = await client.exchange([prompt, stop, request("good", [1, 2, 3])])
    assert finished(outcomes) == {"good"}
    errors = failed(outcomes)
    assert [violation.field for violation in errors["prompt"].violations] == ["prompt.tokens.ids[2]"]
    assert [violation.field for violation in errors["stop"].violations] == ["stop_token_ids[0]"]
    assert all(str(wrong) in error.message for error in errors.values())


def test_fault_10_reflection_and_the_protoset_describe_every_service(fabric: Fabric) -> None:
    """Elsewhere servers answer `list` and nothing else; methods no Python server describes, so the protoset does."""
    described = descriptor_pb2.FileDescriptorSet.FromString(
        (ROOT / "build" / "proto" / "ifabric.protoset").read_bytes()
    )
    methods = {
        f"{file.package}.{service.name}": {method.name for method in service.method}
        for file in described.file
        for service in file.service
    }
    for process in (fabric.brokers[0], fabric.provisioner, fabric.workers[0]):
        with grpc.insecure_channel(process.address) as made:
            database = ProtoReflectionDescriptorDatabase(made)
            listed = list(database.get_services())
            assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= set(listed)
            for name in listed:
                file = database.FindFileContainingSymbol(name)
                (service,) = [each for each in file.service if f"{file.package}.{each.name}" == name]
                for method in service.method:
                    for message in (method.input_type, method.output_type):
                        database.FindFileContainingSymbol(message.lstrip("."))
                if name.startswith("ifabric."):
                    assert methods[name] == {method.name for method in service.method}


async def test_fault_11_health_follows_the_engine_and_not_the_process(tmp_path: Path) -> None:
    """Elsewhere a server says that it serves while its engine is dead, and that it does not while it is only busy."""
    slow = (
        RequestFault("slow_step", "prompt_token", SPECIAL, 9_000),
        RequestFault(THROW, "prompt_token", FATAL),
    )
    (tmp_path / "patient").mkdir()
    (tmp_path / "impatient").mkdir()
    with (
        Fabric(tmp_path / "patient", engine={"request_faults": slow, "longest_step_ms": 30_000}) as patient,
        Fabric(tmp_path / "impatient", engine={"request_faults": slow, "longest_step_ms": 100}) as impatient,
    ):
        patient.start()
        impatient.start()

        async def serving(fabric: Fabric) -> bool:
            async with channel(fabric.workers[0].address) as made:
                stub: Any = health_pb2_grpc.HealthStub(made)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_S)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async with client_of(patient) as calm, client_of(impatient) as anxious:
            assert await serving(patient)  # idle
            calls = [
                asyncio.create_task(client.one(request("busy", [SPECIAL, 1], 2), within_s=40))
                for client in (calm, anxious)
            ]
            # Work that stands still for longer than a step may take, and the slack of 5 s, is a stall.
            await wait_until(lambda: _not(serving(impatient)), what="the stall shows")
            assert await serving(patient)  # one long step, within its bound
            await asyncio.gather(*calls)
            await wait_until(lambda: serving(impatient), what="it serves again by itself")
            lost = asyncio.create_task(anxious.exchange([request("fatal", [FATAL, 1], 2)]))
            await wait_until(lambda: _gone(impatient), what="an engine that died serves nothing")
            await wait_until(lambda: _none_serves(anxious), what="the broker knows")
            lost.cancel()


async def _not(answer: Any) -> bool:
    return not await answer


async def _gone(fabric: Fabric) -> bool:
    """Whether the worker's process has ended, or says that it does not serve."""
    async with channel(fabric.workers[0].address) as made:
        stub: Any = health_pb2_grpc.HealthStub(made)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code() == grpc.StatusCode.UNAVAILABLE
        return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


async def _none_serves(client: Client) -> bool:
    return await client.engines() == 0


async def test_fault_12_a_dead_node_that_affinity_favours_costs_one_attempt_each(tmp_path: Path) -> None:
    """Elsewhere requests are sent to the dead node again and again, because it has their prefix."""
    head = list(range(1, 65))
    slow, broker = {"step_us": 5_000, "slots": 8}, {"silence_limit_s": 2}
    with Fabric(tmp_path, workers=3, engine=slow, broker=broker) as fabric:
        fabric.start()
        async with client_of(fabric, nodes=3) as client:
            for i in range(8):  # one after the other, so that all go where the first one left their prefix
                await client.exchange([request(f"warm{i}", [*head, i], 4)])
            done = [scraped(worker, "ifabric_worker_engine_requests_total") for worker in fabric.workers]
            favoured = done.index(max(done))
            victim = fabric.workers[favoured].process
            assert victim is not None
            sent = asyncio.create_task(client.exchange([request(f"r{i}", [*head, 100 + i], 64) for i in range(50)]))

            async def begun() -> bool:
                return f"node-{favoured}" in await asyncio.to_thread(in_flight, fabric)

            await wait_until(begun, what="the favoured node has work")
            # Its connection stays, so that the broker learns of it from what it has sent there alone.
            os.kill(victim.pid, signal.SIGSTOP)
            outcomes = await sent
            assert finished(outcomes) == {f"r{i}" for i in range(50)}
            repeated = scraped(fabric.brokers[0], "ifabric_broker_reattempts_total")
            assert 1 <= repeated <= 50  # attempts in all are at most two a request


async def test_fault_13_hidden_states_travel_as_bytes(tmp_path: Path) -> None:
    """Elsewhere they become lists of Python floats and cost seventeen times the computation.

    Processor time shows it: what each process spends on them, beside the same rows without them, is less than what the
    way through lists of floats and back would take. That the rate stays within a tenth is `make bench-mine`'s to show.
    """
    mining = {
        "max_output_tokens": 0, "payload_dtype": "float16", "hidden_size": 4096, "kv_block_tokens": None,
        "kv_pool_blocks": None, "max_input_tokens": 128, "max_sequence_tokens": 128, "samples_max": 1, "scoring": False,
    }  # fmt: skip
    engine, count, rounds = SimulatedEngine(**{**ENGINE, **mining}), 500, 4
    prompts = {f"p{i}": [i % 250, 1, 2, i // 250] for i in range(count)}
    with Fabric(tmp_path, engine=mining) as fabric:
        fabric.start()
        carriers = {"worker": fabric.workers[0].process, "broker": fabric.brokers[0].process}
        extra_s, as_floats_s = dict.fromkeys(carriers, 0.0), 0.0
        async with client_of(fabric) as client:
            for _ in range(rounds):
                for sign, omits in ((-1, True), (1, False)):
                    before = {name: _spent_s(process) for name, process in carriers.items()}
                    outcomes = await client.exchange(
                        [request(name, ids, None, omit_payload=omits) for name, ids in prompts.items()]
                    )
                    assert finished(outcomes) == set(prompts)
                    for name, process in carriers.items():
                        extra_s[name] += sign * (_spent_s(process) - before[name])
                as_floats_s += _as_floats_s(outcomes)  # each time, on a machine as busy as it is then
    simulation = Simulation(engine)
    for number, (name, ids) in enumerate(prompts.items()):
        (only,) = outcomes[name]
        assert isinstance(only, broker_service_pb2.GenerationResult)
        sample = np.frombuffer(only.payload.data, np.float16)
        assert sample.shape == (4096,)
        if number % 5 == 0:
            assert np.array_equal(sample.astype(np.float32), simulation.payload(ids))
    assert max(extra_s.values()) < 0.6 * as_floats_s, (extra_s, as_floats_s)


def _as_floats_s(outcomes: dict[str, list[Outcome]]) -> float:
    """Processor time of the way through lists of floats and back for all of these, told from one in ten."""
    some = list(outcomes.values())[::10]
    began = time.process_time()
    for (only,) in some:
        assert isinstance(only, broker_service_pb2.GenerationResult)
        np.array([float(value) for value in np.frombuffer(only.payload.data, np.float16)], np.float16)
    return (time.process_time() - began) * len(outcomes) / len(some)


def _spent_s(process: ServiceProcess | None) -> float:
    """Processor time of a service up to now, in seconds."""
    assert process is not None
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)
