# SPDX-License-Identifier: Apache-2.0
"""What becomes of work whose worker is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ifabric.engine.v1 import generation_pb2
from services.broker.core.loss import Loss, RetryBudget
from services.broker.core.settings import CoreSettings
from services.broker.work import Lane, WorkEnd
from services.common import reasons
from services.common.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from tests.broker_core.made import Bench, RecordingSink, ids_of, work


def _distinct(count: int, **wanted: object) -> list[work]:  # type: ignore[valid-type]
    return [work([10 + at] * 6, request_id=f"r{at}", **wanted) for at in range(count)]  # type: ignore[arg-type]


def _settle(bench: Bench, *, rounds: int = 200) -> None:
    for _ in range(rounds):
        if not len(bench.decision.requests):
            return
        bench.now += 0.2
        bench.give()
        for worker in list(bench.decision.scheduler.workers.values()):
            for attempt in list(worker.outstanding.values()):
                bench.finish(attempt)
    raise AssertionError("it does not come to an end")


def test_lost_work_runs_elsewhere_apart_from_innocent_work() -> None:
    bench = Bench()
    first, second = bench.worker("w1", sequences=4), bench.worker("w2", sequences=4)
    bench.submit(*_distinct(8))
    given = bench.give()
    mine = [attempt for attempt in given if attempt.worker is first]
    assert len(mine) == 4
    bench.lose(first)
    assert bench.decision.requests.counters.lost_attempts == 4
    bench.now += 1.0
    assert bench.give() == [], "w2 ends its innocent work first"
    for attempt in list(second.outstanding.values()):
        bench.finish(attempt)
    again = bench.give()
    assert sorted(ids_of(again)) == sorted(ids_of(mine))
    assert all(attempt.apart and attempt.number == 2 for attempt in again)
    _settle(bench)


def test_a_late_result_of_a_lost_attempt_is_dropped_and_counted() -> None:
    bench = Bench()
    first = bench.worker("w1")
    bench.submit(*_distinct(1))
    (attempt,) = bench.give()
    bench.lose(first)
    bench.finish(attempt)
    assert bench.decision.requests.counters.late_results == 1
    assert len(bench.decision.requests) == 1
    bench.worker("w2")
    _settle(bench)
    (end,) = attempt.entry.work.sink.ends  # type: ignore[attr-defined]
    assert isinstance(end, WorkEnd)
    assert end.attempts == 2


def test_what_a_lost_attempt_computed_was_computed() -> None:
    bench = Bench()
    first = bench.worker("w1")
    bench.submit(*_distinct(1))
    (attempt,) = bench.give()
    bench.computed(attempt)
    bench.lose(first)
    bench.worker("w2")
    _settle(bench)
    account = bench.decision.end_job("j")
    assert account is not None
    assert account.computed_tokens == 2 * 6
    assert account.reattempts == 1


@pytest.mark.parametrize("lane", list(Lane))
def test_streams_that_were_read_end_unavailable(lane: Lane) -> None:
    bench = Bench()
    worker = bench.worker("w1")
    sink = RecordingSink(takes_back=False)
    bench.submit(work([1, 2, 3], sink=sink, lane=lane, stream=True))
    (attempt,) = bench.give()
    bench.decision.tokens(worker, attempt.handle, 0, np.array([5], np.int32), None)
    bench.lose(worker)
    assert isinstance(sink.end, UnavailableError)
    assert sink.end.reason == reasons.WORKER_LOST
    assert len(bench.decision.requests) == 0


def test_tokens_that_nobody_read_are_taken_back() -> None:
    bench = Bench()
    worker = bench.worker("w1")
    sink = RecordingSink(takes_back=True)
    bench.submit(work([1, 2, 3], sink=sink, stream=True))
    (attempt,) = bench.give()
    bench.decision.tokens(worker, attempt.handle, 0, np.array([5], np.int32), None)
    bench.lose(worker)
    assert sink.heard == []
    bench.worker("w2")
    _settle(bench)
    assert isinstance(sink.end, WorkEnd)


def test_a_drained_worker_makes_nobody_suspect() -> None:
    bench = Bench()
    first, second = bench.worker("w1", sequences=2), bench.worker("w2", sequences=4)
    bench.submit(*_distinct(4))
    bench.give()
    bench.lose(first, Loss.LEFT)
    bench.now += 1.0
    again = bench.give()
    assert again
    assert not any(attempt.apart for attempt in again)
    assert second.apart is None
    _settle(bench)


def test_a_row_that_kills_its_worker_is_quarantined_after_two_kills_alone() -> None:
    bench = Bench()
    sinks = {f"r{at}": RecordingSink() for at in range(12)}
    bench.worker("w0", sequences=16)
    bench.submit(*(work([10 + at] * 6, request_id=name, sink=sink) for at, (name, sink) in enumerate(sinks.items())))
    kills, alone, names = 0, 0, 0
    while len(bench.decision.requests):
        bench.now += 10.0
        bench.give()
        for worker in list(bench.decision.scheduler.workers.values()):
            inside = [attempt.entry.work.key[1] for attempt in worker.outstanding.values()]
            if "r7" in inside:
                kills += 1
                alone += len(inside) == 1
                names += 1
                bench.lose(worker)
                bench.worker(f"w{names}", sequences=16)
            else:
                for attempt in list(worker.outstanding.values()):
                    bench.finish(attempt)
    assert alone == 2
    assert kills <= 5
    for name, sink in sinks.items():
        if name == "r7":
            assert isinstance(sink.end, FailedPreconditionError)
            assert sink.end.reason == reasons.QUARANTINED
            assert bench.decision.requests.counters.quarantined == 1
        else:
            assert isinstance(sink.end, WorkEnd)


@pytest.mark.parametrize("seed", range(3))
def test_fifty_kills_through_ten_thousand_rows_quarantine_nobody(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench()
    rows = 10_000
    sinks = [RecordingSink() for _ in range(rows)]
    heads = [[group] * 8 for group in range(40)]
    bench.submit(
        *(work([*heads[at % 40], 100 + at, 7, 7], request_id=f"r{at}", sink=sink) for at, sink in enumerate(sinks))
    )
    for name in range(3):
        bench.worker(f"w{name}", sequences=64, tokens=100_000)
    kills, names, dead_dispatches = 0, 3, 0
    while len(bench.decision.requests):
        bench.now += 0.5
        bench.give()
        workers = list(bench.decision.scheduler.workers.values())
        if kills < 50 and chance.random() < 0.3:
            kills += 1
            names += 1
            victim = chance.choice(workers)
            dead_dispatches += len(victim.outstanding)
            bench.lose(victim)
            bench.worker(f"w{names}", sequences=64, tokens=100_000)
        for worker in workers:
            for attempt in list(worker.outstanding.values()):
                if chance.random() < 0.5:
                    bench.computed(attempt)
                    bench.finish(attempt)
    assert kills == 50
    assert all(isinstance(sink.end, WorkEnd) for sink in sinks)
    assert bench.decision.requests.counters.quarantined == 0
    assert len(bench.sent) == rows + dead_dispatches


@pytest.mark.parametrize("error", [UnavailableError("draining"), ResourceExhaustedError("beyond the credit")])
def test_what_a_worker_would_not_take_goes_elsewhere(error: UnavailableError) -> None:
    bench = Bench()
    bench.worker("w1")
    bench.submit(*_distinct(1))
    (attempt,) = bench.give()
    bench.fail(attempt, error)
    assert bench.give() == [], "not at once"
    bench.now += 5.0
    (again,) = bench.give()
    assert again.number == 2
    assert not again.apart
    _settle(bench)


def test_an_engine_fault_is_looked_into_and_told_in_the_end() -> None:
    bench = Bench()
    bench.worker("w1", sequences=8)
    sinks = {f"r{at}": RecordingSink() for at in range(3)}
    bench.submit(*(work([10 + at] * 6, request_id=name, sink=sink) for at, (name, sink) in enumerate(sinks.items())))
    while len(bench.decision.requests):
        bench.now += 10.0
        for attempt in bench.give():
            if attempt.entry.work.key[1] == "r1":
                bench.fail(attempt, InternalError("a kernel failed"))
            else:
                bench.finish(attempt)
    assert isinstance(sinks["r1"].end, InternalError)
    assert isinstance(sinks["r0"].end, WorkEnd)
    assert isinstance(sinks["r2"].end, WorkEnd)
    assert bench.decision.requests.counters.quarantined == 0, "nothing died"


def test_an_invalid_request_is_not_tried_again() -> None:
    bench = Bench()
    bench.worker("w1")
    bench.submit(*_distinct(1))
    (attempt,) = bench.give()
    bench.fail(attempt, InvalidArgumentError("no"))
    assert isinstance(attempt.entry.work.sink.ends[0], InvalidArgumentError)  # type: ignore[attr-defined]
    assert len(bench.decision.requests) == 0


def test_workers_that_stand_still_quarantine_nobody_however_often() -> None:
    bench = Bench()
    sink = RecordingSink()
    bench.submit(work([1, 2, 3], sink=sink))
    for at in range(8):
        worker = bench.worker(f"w{at}")
        bench.now += 30.0
        (attempt,) = bench.give()
        assert len(worker.outstanding) == 1
        assert attempt.apart == (at > 0), "it is suspect all the same"
        bench.lose(worker, Loss.SILENT)
    bench.worker("last")
    _settle(bench)
    assert isinstance(sink.end, WorkEnd)
    assert bench.decision.requests.counters.quarantined == 0


def test_a_worker_that_cancels_by_itself_is_not_believed() -> None:
    bench = Bench()
    bench.worker("w1")
    bench.submit(*_distinct(1))
    (attempt,) = bench.give()
    bench.finish(attempt, reason=generation_pb2.FINISH_REASON_CANCELLED)
    assert len(bench.decision.requests) == 1
    _settle(bench)


def test_a_started_stream_that_its_worker_cuts_short_ends_unavailable() -> None:
    bench = Bench()
    worker = bench.worker("w1")
    sink = RecordingSink(takes_back=False)
    bench.submit(work([1, 2, 3], sink=sink, lane=Lane.INTERACTIVE, stream=True))
    (attempt,) = bench.give()
    bench.decision.tokens(worker, attempt.handle, 0, np.array([5], np.int32), None)
    bench.finish(attempt, reason=generation_pb2.FINISH_REASON_CANCELLED)
    assert isinstance(sink.end, UnavailableError)
    assert sink.end.reason == reasons.WORKER_LOST
    assert sink.heard == [5], "nobody was told another beginning"


def test_what_a_worker_cuts_short_and_nobody_read_runs_again_and_is_paid_once() -> None:
    bench = Bench()
    worker = bench.worker("w1")
    sink = RecordingSink(takes_back=True)
    bench.submit(work([1, 2, 3], sink=sink, stream=True))
    (attempt,) = bench.give()
    bench.computed(attempt)
    bench.decision.tokens(worker, attempt.handle, 0, np.array([5], np.int32), None)
    bench.finish(attempt, reason=generation_pb2.FINISH_REASON_CANCELLED)
    assert sink.heard == []
    _settle(bench)
    account = bench.decision.end_job("j")
    assert account is not None
    assert account.computed_tokens == 2 * 3


def test_three_workers_one_dead_and_favoured() -> None:
    """A retry storm: fifty requests whose head a dead worker holds cost one failed attempt each, and no more."""
    bench = Bench()
    dead = bench.worker("dead", sequences=64, tokens=100_000)
    head = [1] * 8
    bench.submit(work([*head, 5]))
    (warm,) = bench.give()
    bench.computed(warm)
    bench.finish(warm)
    bench.worker("w1", sequences=64, tokens=100_000)
    bench.worker("w2", sequences=64, tokens=100_000)
    bench.submit(*(work([*head, 100 + at], request_id=f"r{at}") for at in range(50)))
    first = bench.give()
    assert all(attempt.worker is dead for attempt in first)
    bench.lose(dead)
    _settle(bench)
    per_request: dict[str, int] = {}
    for attempt in bench.sent[1:]:
        per_request[attempt.entry.work.key[1]] = per_request.get(attempt.entry.work.key[1], 0) + 1
    assert max(per_request.values()) == 2
    assert sum(per_request.values()) <= 2 * 50


def test_the_retry_budget_is_a_share_a_burst_and_a_trickle() -> None:
    budget = RetryBudget(0.5, 2)
    assert [budget.spend(100.0) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.earn()
    assert [budget.spend(100.0) for _ in range(3)] == [True, True, False]
    assert budget.spend(100.2)


def test_retries_wait_for_their_budget() -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, retry_burst=4, retry_share=0.0))
    first = bench.worker("w1", sequences=16)
    bench.submit(*_distinct(12))
    assert len(bench.give()) == 12
    bench.lose(first)
    bench.worker("w2", sequences=16)
    bench.now += 0.06
    assert len(bench.give()) == 4
    _settle(bench)
