# SPDX-License-Identifier: Apache-2.0
"""What has ended is let go of: order, timers and queues keep no request in memory that nobody waits for."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from tests.broker_core.made import Bench, RecordingSink, work

if TYPE_CHECKING:
    from services.broker.work import Work

HEAD = list(range(8))
KEPT_MAX = 150
"""Requests that have ended and may be kept until more come: sweeps share their cost among those."""


class _Sinks:
    """Sinks by which to tell whether the core has let go of their requests."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[RecordingSink]] = []

    def work(self, prompt: list[int], *, max_tokens: int = 1) -> Work:
        sink = RecordingSink()
        self._refs.append(weakref.ref(sink))
        return work(prompt, sink=sink, max_tokens=max_tokens)

    def kept(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self._refs)


def _cancel(bench: Bench, *works: Work) -> None:
    bench.decision.cancel([each.key for each in works])
    bench.decision.deliver()


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_cancelled_is_let_go_of_while_better_work_waits(shared: bool) -> None:
    bench, sinks = Bench(), _Sinks()
    bench.worker("w", sequences=1)
    bench.submit(work([1, 2, 3], max_tokens=40), work([4, 5, 6], max_tokens=40))
    bench.give()  # one runs, the other waits before all that follows: the order never gets to those
    for number in range(1_000):
        prompt = [*(HEAD if shared else []), 1000 + number, *range(20)]
        pair = [sinks.work([*prompt, 7]), sinks.work([*prompt, 8])]
        bench.submit(*pair)
        _cancel(bench, *pair)
        del pair
    assert sinks.kept() <= KEPT_MAX


def test_nothing_is_kept_where_nothing_waits() -> None:
    bench, sinks = Bench(), _Sinks()
    bench.worker("w1", sequences=1)
    bench.worker("w2", sequences=1)
    works = [sinks.work([*HEAD, number % 5, *range(8), number]) for number in range(50)]
    bench.submit(*works)
    for attempt in bench.give():
        bench.finish(attempt)
    _cancel(bench, *works)
    works.clear()
    for attempt in bench.sent:
        if attempt.closed is None and attempt.handle in attempt.worker.outstanding:
            bench.finish(attempt, reason=3)
    bench.sent.clear()
    del attempt
    assert not len(bench.decision.requests)
    assert sinks.kept() == 0


def test_a_leader_that_has_ended_does_not_wait_for_its_time_limit() -> None:
    bench, sinks = Bench(), _Sinks()
    bench.worker("w")
    bench.submit(sinks.work([*HEAD, 1, 2, 3, 4]), sinks.work([*HEAD, 5, 6, 7, 8]))
    (leader,) = bench.give()
    assert leader.leads
    bench.computed(leader)
    bench.finish(leader)
    for follower in bench.give():
        bench.finish(follower)
    bench.sent.clear()
    del leader, follower
    assert bench.decision.timers.next_at is not None, "the time limit is yet to come"
    assert sinks.kept() == 0
