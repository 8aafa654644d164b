# SPDX-License-Identifier: Apache-2.0
"""Requests that end or stop whatever engine they run on, among others that do not, in both lanes.

One bad item never harms its neighbours: they all finish, the bad one is found out after its bound, and who had nothing
to do with it hardly waits.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ifabric.engine.v1 import node_pb2
from services.broker.core.loss import QUARANTINE_AT, Loss
from services.broker.core.settings import CoreSettings
from services.broker.work import Lane, WorkEnd
from services.common import reasons
from services.common.errors import FailedPreconditionError, InternalError, UnavailableError
from tests.broker_core.checks import check_workers
from tests.broker_core.made import Bench, RecordingSink, ids_of, work

if TYPE_CHECKING:
    from services.broker.core.attempts import Attempt
    from services.broker.core.workers import Worker
    from services.broker.work import Work

ENDED_MOST = 3 + QUARANTINE_AT
"""Workers that one request may cost: with all, in two hundreds, in sixteens; then alone."""


class Harm(enum.Enum):
    """What a bad request does to its engine."""

    KILLS = enum.auto()
    """The process ends."""
    FAILS = enum.auto()
    """The step fails, and with it every request that is active: they are told of one by one."""


@dataclass
class Ward:
    """Workers that come back after they have ended, and what runs on them.

    A round is a second: whatever a worker has had for a whole one, without anything bad beside it, has finished.
    """

    harm: Harm = Harm.KILLS
    workers: int = 1
    sequences: int = 64
    back_after: int = 1
    """Rounds until a worker that has ended is back."""
    bench: Bench = field(default_factory=Bench)
    bad: set[str] = field(default_factory=set)
    sinks: dict[str, RecordingSink] = field(default_factory=dict)
    harmed: int = 0
    """How often something bad met an engine."""

    def __post_init__(self) -> None:
        self._names = 0
        self._away: list[int] = []
        for _ in range(self.workers):
            self._join()

    def _join(self) -> None:
        self._names += 1
        self.bench.worker(f"w{self._names}", sequences=self.sequences, tokens=100_000)

    def make(self, name: str, lane: Lane, *, bad: bool = False, takes_back: bool = True) -> Work:
        """Work under a name."""
        sink = self.sinks[name] = RecordingSink(takes_back=takes_back)
        if bad:
            self.bad.add(name)
        job = "" if lane is Lane.INTERACTIVE else "j"
        prompt = [10 + len(self.sinks)] * 6
        return work(prompt, request_id=name, sink=sink, lane=lane, job=job, stream=lane is Lane.INTERACTIVE)

    def round(self) -> None:
        """One second."""
        bench = self.bench
        bench.now += 1.0
        for worker in list(bench.decision.scheduler.workers.values()):
            attempts = list(worker.outstanding.values())
            inside = set(ids_of(attempts))
            assert not any(attempt.apart for attempt in attempts) or all(attempt.apart for attempt in attempts)
            if inside & self.bad:
                self.harmed += 1
                self._harm(worker, attempts)
            else:
                for attempt in attempts:
                    bench.finish(attempt)
        while self._away and self._away[0] <= bench.now:
            self._away.pop(0)
            self._join()
        bench.give()
        check_workers(bench.decision)

    def _harm(self, worker: Worker, attempts: list[Attempt]) -> None:
        if self.harm is Harm.KILLS:
            self.bench.lose(worker)
            self._away.append(int(self.bench.now) + self.back_after)
        else:
            for attempt in attempts:
                self.bench.fail(attempt, InternalError("a kernel failed"))

    def settle(self, rounds: int) -> int:
        """Rounds until everything has ended."""
        for at in range(rounds):
            if not len(self.bench.decision.requests):
                return at
            self.round()
        left = [entry.work.key[1] for entry in self.bench.decision.requests.all()]
        raise AssertionError(f"{left[:5]} and others do not end: {len(left)} in all")

    def check_ends(self) -> None:
        """The good have finished, the bad were found out."""
        for name, sink in self.sinks.items():
            if name not in self.bad:
                assert isinstance(sink.end, WorkEnd), f"{name}: {sink.end}"
            elif self.harm is Harm.KILLS:
                assert isinstance(sink.end, FailedPreconditionError), sink.end
                assert sink.end.reason == reasons.QUARANTINED
            else:
                assert isinstance(sink.end, InternalError), sink.end


@pytest.mark.parametrize("harm", Harm)
@pytest.mark.parametrize("place", [0, 20, 40])
@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("others", Lane)
def test_neighbours_of_either_lane_outlive_a_bad_request_of_either(
    harm: Harm, place: int, lane: Lane, others: Lane
) -> None:
    ward = Ward(harm)
    works = [ward.make(f"r{at}", others) for at in range(40)]
    works.insert(place, ward.make("bad", lane, bad=True))
    ward.bench.submit(*works)
    ward.settle(80)
    ward.check_ends()
    assert ward.harmed <= ENDED_MOST
    assert ward.bench.decision.requests.counters.quarantined == (harm is Harm.KILLS)


def test_what_one_fault_took_along_is_looked_into_together() -> None:
    """Each alone would take a worker's whole time, one after the other."""
    ward = Ward(Harm.FAILS, sequences=200)
    ward.bench.submit(
        *(ward.make(f"r{at}", Lane.BULK) for at in range(150)),
        ward.make("bad", Lane.BULK, bad=True),
        *(ward.make(f"s{at}", Lane.BULK) for at in range(49)),
    )
    assert ward.settle(60) < 40
    ward.check_ends()


@settings(max_examples=60, deadline=None)
@given(
    harm=st.sampled_from(Harm),
    workers=st.integers(1, 4),
    sequences=st.sampled_from([4, 24, 300]),
    back_after=st.integers(0, 30),
    lanes=st.lists(st.tuples(st.sampled_from(Lane), st.integers(0, 11)), min_size=1, max_size=80),
)
def test_whoever_is_good_finishes_and_whoever_is_not_is_found_out(
    harm: Harm, workers: int, sequences: int, back_after: int, lanes: list[tuple[Lane, int]]
) -> None:
    ward = Ward(harm, workers, sequences, back_after)
    for number, (lane, dice) in enumerate(lanes):
        assert ward.bench.submit(ward.make(f"r{number}", lane, bad=dice == 0)) == [None]
        if dice % 4 == 0:
            ward.round()
    # Whatever is bad costs its workers, and everybody may have to run alone, in turn with innocent work.
    ward.settle(4 * len(lanes) + len(ward.bad) * ENDED_MOST * (back_after + 12) + 40)
    ward.check_ends()
    assert ward.harmed <= len(ward.bad) * ENDED_MOST


def test_a_live_suspect_goes_before_bulk_ones_and_not_beside_them() -> None:
    bench = Bench()
    worker = bench.worker("w1", sequences=400, tokens=100_000)
    bulk = [work([10 + at] * 6, request_id=f"b{at}") for at in range(300)]
    live = [work([500 + at] * 6, request_id=f"l{at}", lane=Lane.INTERACTIVE, job="") for at in range(3)]
    bench.submit(*bulk)
    bench.give()
    bench.submit(*live)
    bench.give()
    assert len(worker.outstanding) == 303
    bench.lose(worker)
    bench.worker("w2", sequences=400, tokens=100_000)
    bench.now += 1.0
    assert sorted(ids_of(bench.give())) == ["l0", "l1", "l2"]


def test_live_work_that_was_not_there_keeps_half_of_the_workers() -> None:
    """Suspects run apart, one after the other, and whoever calls meanwhile is answered in the next second."""
    ward = Ward(workers=4)
    ward.bench.submit(*(ward.make(f"r{at}", Lane.INTERACTIVE, bad=at == 7) for at in range(100)))
    for second in range(40):
        later = ward.make(f"later{second}", Lane.INTERACTIVE)
        ward.bench.submit(later)
        ward.round()
        ward.round()
        assert later.sink.ends, "it waits"  # type: ignore[attr-defined]
    assert ward.settle(20) == 0
    ward.check_ends()


def test_innocent_work_has_half_of_the_time_of_an_only_worker() -> None:
    """Sixteen suspects would have it for sixteen seconds; nobody who calls waits longer than for a few of them."""
    ward = Ward()
    bench = ward.bench
    bench.submit(*(ward.make(f"r{at}", Lane.INTERACTIVE, bad=at == 7) for at in range(16)))
    while bench.decision.requests.counters.lost_attempts < 32:
        ward.round()
    waits: list[int] = []
    while len(bench.decision.requests):
        later = ward.make(f"later{len(waits)}", Lane.INTERACTIVE)
        bench.submit(later)
        for waited in range(20):
            ward.round()
            if later.sink.ends:  # type: ignore[attr-defined]
                waits.append(waited)
                break
    ward.check_ends()
    assert max(waits) <= 3


def test_bulk_work_that_waits_does_not_keep_a_live_suspect_waiting() -> None:
    bench = Bench()
    worker = bench.worker("w1")
    suspects = [work([at] * 6, request_id=f"s{at}", lane=Lane.INTERACTIVE, job="") for at in range(2)]
    bench.submit(*suspects)
    bench.give()
    for loss in range(3):  # found to be alone in the end
        bench.lose(worker, Loss.SILENT)
        worker = bench.worker(f"again{loss}", sequences=1 if loss == 2 else 64)
        bench.now += 10.0
        given = bench.give()
    bench.submit(*(work([100 + at] * 6, request_id=f"b{at}") for at in range(20)))
    order = []
    while len(bench.decision.requests):
        (attempt,) = given
        order.append(attempt.entry.work.key[1])
        bench.now += 5.0  # longer than suspects may have an only worker while others wait
        bench.finish(attempt)
        given = bench.give()
    assert sorted(order[:2]) == ["s0", "s1"]


def test_a_suspect_whose_next_worker_drains_is_still_apart() -> None:
    bench = Bench()
    first = bench.worker("w1")
    bench.submit(work([1, 2, 3], request_id="r"))
    bench.give()
    bench.lose(first)
    second = bench.worker("w2")
    bench.now += 1.0
    bench.give()
    bench.lose(second, Loss.LEFT)
    bench.worker("w3")
    bench.now += 10.0
    (again,) = bench.give()
    assert again.apart


def test_suspects_that_wait_at_a_worker_that_goes_away_go_elsewhere() -> None:
    bench = Bench()
    lost = bench.worker("w1")
    bench.submit(*(work([10 + at] * 6, request_id=f"r{at}") for at in range(4)))
    bench.give()
    bench.lose(lost)
    leaving = bench.worker("w2", sequences=1)
    bench.now += 1.0
    (running,) = bench.give()
    bench.decision.worker_retired(leaving, bench.now)
    bench.worker("w3")
    bench.now += 1.0
    assert len(bench.give()) == 3, "they do not wait for what still runs there"
    bench.finish(running)
    assert leaving.apart is None


def test_a_stream_that_was_read_is_not_begun_again_and_the_others_are() -> None:
    ward = Ward()
    read = ward.make("read", Lane.INTERACTIVE, takes_back=False)
    ward.bench.submit(ward.make("bad", Lane.INTERACTIVE, bad=True), read, ward.make("unread", Lane.INTERACTIVE))
    for attempt in ward.bench.give():
        if attempt.entry.work is read:
            ward.bench.decision.tokens(attempt.worker, attempt.handle, 0, np.array([5], np.int32), None)
    ward.settle(40)
    end = ward.sinks.pop("read").end
    assert isinstance(end, UnavailableError)
    assert end.reason == reasons.WORKER_LOST
    ward.check_ends()


@pytest.mark.parametrize("lane", Lane)
def test_nothing_is_tried_for_ever(lane: Lane) -> None:
    """Workers that fall silent say nothing of anybody; in the end it is given up all the same."""
    bench = Bench(CoreSettings(bulk_linger_s=0.0, interactive_linger_s=0.0, attempts_max=8))
    sink = RecordingSink()
    bench.submit(work([1, 2, 3], sink=sink, lane=lane, job=""))
    for at in range(8):
        worker = bench.worker(f"w{at}")
        bench.now += 30.0
        assert len(bench.give()) == 1
        bench.lose(worker, (Loss.SILENT, Loss.LEFT)[at % 2])
    assert isinstance(sink.end, UnavailableError)
    assert sink.end.reason == reasons.WORKER_LOST
    assert sink.end.retry_after_s is not None


def test_a_worker_whose_engine_stands_still_gets_nothing_and_serves_nobody() -> None:
    bench = Bench()
    worker = bench.worker("w1")
    worker.progress_tick, worker.standing = 7, True  # as it was when it was given up
    lone = work([1, 2, 3], lane=Lane.INTERACTIVE, job="")
    bench.submit(lone)
    bench.decision.stats(worker, node_pb2.EngineStats(progress_tick=7, active=1), bench.now)
    assert bench.give() == []
    bench.decision.stats(worker, node_pb2.EngineStats(progress_tick=8, active=1), bench.now)
    assert len(bench.give()) == 1
    bench.lose(worker, Loss.LEFT)
    again = bench.worker("w1")
    again.progress_tick, again.standing = 8, True
    bench.now += 1.0
    assert bench.give() == []
    bench.decision.check_waiting(bench.now)
    bench.now += bench.settings.nobody_limit_s + 1
    bench.decision.check_waiting(bench.now)
    bench.decision.deliver()
    assert isinstance(lone.sink.end, UnavailableError)  # type: ignore[attr-defined]


def test_the_first_cohort_goes_where_something_has_ended_since_a_stall() -> None:
    bench = Bench()
    lost = bench.worker("lost")
    bench.submit(work([1, 2, 3]))
    bench.give()
    bench.worker("doubtful").doubtful = True
    sound = bench.worker("sound")
    bench.lose(lost)
    bench.now += 1.0
    (again,) = bench.give()
    assert again.worker is sound
