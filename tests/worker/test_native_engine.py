# SPDX-License-Identifier: Apache-2.0
"""The Python side of the C interface against the real library and a simulated engine."""

from __future__ import annotations

import threading
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engines.simulated import ABSENT, Simulation, write_simulated_engine
from services.common import contract
from services.common.errors import (
    AlreadyExistsError,
    FabricError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
)
from services.worker.native import (
    Engine,
    EventKind,
    Options,
    PollBuffers,
    Request,
    check_contract,
    forward_logs,
    inspect,
    library_version,
)
from tests.support.waiting import block_until
from tests.worker.made import packed
from tests.worker.running import GENERATING, LONG, LONG_TOKENS, MINING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def buffers_of(engine: Engine) -> PollBuffers:
    least = engine.describe().poll
    return PollBuffers(
        events=256, tokens=max(4096, least.tokens), payload_bytes=16 * least.payload_bytes, text_bytes=4096
    )


class Reader:
    """Polls an engine and keeps copies of what came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.buffers = buffers_of(engine)
        self.events: list[dict[str, Any]] = []

    def until(self, count: int, kind: EventKind) -> list[dict[str, Any]]:
        """Polls until `count` events of a kind have come; returns them."""

        def came() -> list[dict[str, Any]]:
            for row in self.engine.poll(self.buffers, 50):
                event = dict(zip(row.dtype.names or (), row.tolist(), strict=True))
                start, end = event["token_offset"], event["token_offset"] + event["token_count"]
                event["tokens"] = self.buffers.tokens[start:end].tolist()
                event["logprobs"] = self.buffers.logprobs[start:end].tolist()
                start, end = event["payload_offset"], event["payload_offset"] + event["payload_size"]
                event["payload"] = self.buffers.payload[start:end].tobytes()
                event["text"] = self.buffers.message(event["text_offset"], event["text_size"])
                self.events.append(event)
            found = [event for event in self.events if event["kind"] == kind]
            return found if len(found) >= count else []

        found: list[dict[str, Any]] = block_until(came, what=f"{count} events {kind.name}")
        return found

    def tokens(self, request_id: int, sample: int = 0) -> list[int]:
        """Tokens of a sample so far."""
        of_sample = [
            event["tokens"]
            for event in self.events
            if (event["kind"], event["request_id"], event["sample"]) == (EventKind.TOKENS, request_id, sample)
        ]
        return [token for tokens in of_sample for token in tokens]


@pytest.fixture
def generating(tmp_path: Path) -> Iterator[tuple[Engine, Simulation]]:
    made = write_simulated_engine(tmp_path, **GENERATING)
    with Engine.create(tmp_path) as engine:
        yield engine, Simulation(made)


def test_what_goes_in_comes_out(generating: tuple[Engine, Simulation]) -> None:
    engine, simulation = generating
    prompts = {1: range(5), 2: range(5, 100), 2**64 - 1: [999]}
    options = Options(max_tokens=6, temperature=1.0, seed=5, samples=2)
    requests = [Request(name, packed(ids), options) for name, ids in prompts.items()]
    assert engine.submit(requests) == [None] * 3
    reader = Reader(engine)
    ends = reader.until(6, EventKind.FINISHED)
    for name, ids in prompts.items():
        for sample in range(2):
            assert reader.tokens(name, sample) == simulation.tokens(ids, 6, seed=5, sample=sample)
    assert {end["generated_tokens"] for end in ends} == {6}


def test_options_of_every_kind_arrive(generating: tuple[Engine, Simulation]) -> None:
    engine, simulation = generating
    stop = simulation.tokens(range(9), 8)[3]
    requests = [
        Request(1, packed(range(9)), Options(max_tokens=8, stop_ids=(stop,))),
        Request(2, packed(range(9)), Options(max_tokens=8, logprobs=True, prompt_logprobs=True)),
        Request(3, packed(range(64)), Options(max_tokens=1, salt=7), head_ends=(16, 48)),
        Request(4, packed(range(64)), Options(max_tokens=1, salt=8), head_ends=(16,)),
    ]
    assert engine.submit(requests) == [None] * 4
    reader = Reader(engine)
    ends = {end["request_id"]: end for end in reader.until(4, EventKind.FINISHED)}
    assert (ends[1]["stop_id"], ends[1]["generated_tokens"]) == (stop, 4)
    assert reader.tokens(1) == simulation.tokens(range(9), 8)[:3]
    contexts = {event["request_id"]: event for event in reader.until(4, EventKind.CONTEXT_DONE)}
    assert contexts[2]["logprobs"] == simulation.prompt_logprobs(range(9))
    scored = [
        event["logprobs"] for event in reader.events if event["has_logprobs"] and event["kind"] == EventKind.TOKENS
    ]
    assert [score for scores in scored for score in scores] == simulation.logprobs(range(9), 8)
    assert ends[4]["cached_tokens"] == 0, "another salt shares nothing"


def test_refusals_are_typed_one_by_one_and_the_rest_runs(generating: tuple[Engine, Simulation]) -> None:
    engine, _ = generating
    plain = Options(max_tokens=2)
    outcomes = engine.submit(
        [
            Request(1, packed([1]), plain),
            Request(2, b"", plain),
            Request(3, packed([1, 1000]), plain),
            Request(1, packed([1]), plain),
            Request(4, packed([1]), Options(max_tokens=2, guide_kind=2, guide=b"a+")),
            Request(5, packed([1]), Options(max_tokens=2, top_p=0.0)),
            Request(6, packed([2]), plain),
        ]
    )
    kinds = [None if outcome is None else type(outcome) for outcome in outcomes]
    assert kinds == [
        None, InvalidArgumentError, InvalidArgumentError, AlreadyExistsError, UnimplementedError,
        InvalidArgumentError, None,
    ]  # fmt: skip
    fields = [outcome.violations[0].field for outcome in outcomes if isinstance(outcome, InvalidArgumentError)]
    assert fields == ["token_ids", "token_ids[1]", "sampling.top_p"]
    Reader(engine).until(2, EventKind.FINISHED)


def test_many_refusals_at_once_keep_their_own_messages(generating: tuple[Engine, Simulation]) -> None:
    engine, _ = generating
    outcomes = engine.submit([Request(i, packed([1000 + i]), Options(max_tokens=1)) for i in range(200)])
    for index, outcome in enumerate(outcomes):
        assert outcome is not None
        assert str(1000 + index) in outcome.message or not outcome.message.startswith("token_ids")


def test_nothing_to_submit_is_nothing(generating: tuple[Engine, Simulation]) -> None:
    assert generating[0].submit([]) == []


def test_payloads_are_views_of_aligned_memory(tmp_path: Path) -> None:
    made = write_simulated_engine(tmp_path, **MINING)
    with Engine.create(tmp_path) as engine:
        reader = Reader(engine)
        assert reader.buffers.payload.ctypes.data % 64 == 0
        prompts = {name: range(name, name + 20) for name in range(1, 30)}
        engine.submit([Request(name, packed(ids), Options(max_tokens=0)) for name, ids in prompts.items()])
        for end in reader.until(29, EventKind.FINISHED):
            assert end["payload"] == Simulation(made).payload(prompts[end["request_id"]]).tobytes()


def test_cancel_counts_what_was_in_flight_and_is_safe_for_anything(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **{**GENERATING, **LONG, "step_us": 5000})
    with Engine.create(tmp_path) as engine:
        engine.submit([Request(1, packed([1]), Options(max_tokens=LONG_TOKENS))])
        assert engine.cancel([1, 77]) == 1
        Reader(engine).until(1, EventKind.FINISHED)
        assert engine.cancel([1, 77]) == 0
        assert engine.cancel([]) == 0


def test_a_poll_that_waits_lets_other_threads_run_and_is_woken(generating: tuple[Engine, Simulation]) -> None:
    engine, _ = generating
    buffers = buffers_of(engine)
    came: list[int] = []
    waiter = threading.Thread(target=lambda: came.append(len(engine.poll(buffers, 30_000))))
    waiter.start()
    counted, deadline = 0, time.monotonic() + 0.05
    while counted < 100 or time.monotonic() < deadline:
        counted += 1
    assert waiter.is_alive(), "the interpreter was not held"
    engine.wake()
    waiter.join(20)  # less than the poll waits by itself
    assert came == [0]


def test_of_two_polls_at_once_one_is_refused(generating: tuple[Engine, Simulation]) -> None:
    engine, _ = generating
    refused: list[FabricError] = []

    def poll() -> None:
        try:
            engine.poll(buffers_of(engine), 30_000)
        except FabricError as error:
            refused.append(error)

    pollers = [threading.Thread(target=poll) for _ in range(2)]
    for poller in pollers:
        poller.start()
    block_until(lambda: refused and [poller.is_alive() for poller in pollers].count(True) == 1)
    engine.wake()
    for poller in pollers:
        poller.join(20)
    (error,) = refused
    assert isinstance(error, FailedPreconditionError)


def test_buffers_that_can_never_hold_an_event_are_refused_by_name(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **MINING)
    with Engine.create(tmp_path) as engine:
        small = PollBuffers(events=1, tokens=4096, payload_bytes=0, text_bytes=4096)
        with pytest.raises(InvalidArgumentError, match="payload"):
            engine.poll(small, 0)


def test_a_closed_engine_says_so_and_may_be_closed_again(generating: tuple[Engine, Simulation]) -> None:
    engine, _ = generating
    buffers = buffers_of(engine)
    engine.close()
    engine.close()
    calls = (engine.describe, engine.stats, engine.wake, lambda: engine.poll(buffers, 0), lambda: engine.cancel([1]))
    for call in calls:
        with pytest.raises(FailedPreconditionError, match="closed"):
            call()


def test_statistics_count(generating: tuple[Engine, Simulation]) -> None:
    engine, _ = generating
    engine.submit([Request(1, packed(range(10)), Options(max_tokens=5)), Request(2, b"", Options(max_tokens=5))])
    Reader(engine).until(1, EventKind.FINISHED)
    stats = engine.stats()
    assert (stats.requests_submitted, stats.requests_refused, stats.requests_finished) == (1, 1, 1)
    assert (stats.prompt_tokens_computed, stats.generated_tokens) == (10, 5)
    assert stats.kv_blocks_total == 128
    assert sum(stats.step_us) == sum(stats.step_fill) == stats.steps
    assert (stats.held_back, stats.engine_failed) == (False, False)


def test_inspection_finds_what_create_refuses(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    good = inspect(tmp_path)
    assert (good.findings, good.configuration_file) == ((), "simulated.json")
    assert good.contract_sha256 == contract.engine_digest(tmp_path)
    write_simulated_engine(tmp_path, **GENERATING, contract_changes={"limits.slots": ABSENT, "model.layers": 0})
    assert {finding.path for finding in inspect(tmp_path).findings} >= {"limits.slots", "model.layers"}
    with pytest.raises(FailedPreconditionError) as caught:
        Engine.create(tmp_path)
    assert "limits.slots" in caught.value.message
    assert "model.layers" in caught.value.message


def test_a_long_list_of_findings_is_whole(tmp_path: Path) -> None:
    files = [{"path": f"missing-{index}", "size_bytes": 1, "sha256": "0" * 64} for index in range(900)]
    write_simulated_engine(tmp_path, **GENERATING, contract_changes={"files": files})
    found = [finding.path for finding in inspect(tmp_path).findings if finding.path.startswith("files[")]
    assert found == [f"files[{index}].path" for index in range(len(found))]
    assert len(found) > 100


def test_a_directory_that_is_none_is_not_found(tmp_path: Path) -> None:
    for call in (inspect, Engine.create):
        with pytest.raises(NotFoundError):
            call(tmp_path / "nowhere")


def test_a_contract_may_be_checked_by_itself(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    assert check_contract((tmp_path / "contract.json").read_bytes()) == ()
    (finding, *_rest) = check_contract(b'{"contract_version": 2}')
    assert (finding.path, finding.found, finding.expected) == ("contract_version", "2", "integer 1")


def test_log_lines_of_the_library_arrive_and_stop(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    lines: list[tuple[int, str, str]] = []
    forward_logs(lambda *line: lines.append(line), 20)
    try:
        Engine.create(tmp_path).close()
        assert any("loaded" in message for _, _, message in lines)
        assert all(level >= 20 and component for level, component, _ in lines)
    finally:
        forward_logs(None)
    seen = len(lines)
    Engine.create(tmp_path).close()
    assert len(lines) == seen


def test_the_library_is_of_this_interface() -> None:
    assert library_version().startswith("1.")


def test_numbers_that_the_interface_cannot_carry_never_wrap_round() -> None:
    for max_tokens, priority in ((-1, 0), (2**32, 0), (1, 2**31)):
        with pytest.raises(OverflowError):
            Options(max_tokens=max_tokens, priority=priority)


def test_views_are_of_the_buffers_and_not_copies(generating: tuple[Engine, Simulation]) -> None:
    engine, _ = generating
    buffers = buffers_of(engine)
    engine.submit([Request(1, packed([1]), Options(max_tokens=1))])

    def some() -> list[Any]:
        rows = engine.poll(buffers, 100)
        return [rows] if len(rows) else []

    (rows,) = block_until(some)
    assert np.shares_memory(rows, buffers.events)
    assert array("i").itemsize == buffers.tokens.itemsize
