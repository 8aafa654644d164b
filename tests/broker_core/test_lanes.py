# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: lanes, priorities, tenants, jobs; and what nobody may starve."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from services.broker.core.settings import CoreSettings
from services.broker.work import Lane
from tests.broker_core.made import Bench, ids_of, work

_QUICK = CoreSettings(bulk_linger_s=0.0, interactive_linger_s=0.0)


def _one_at_a_time(bench: Bench, count: int) -> list[str]:
    """Serves so many, one after the other, and returns their ids."""
    order = []
    for _ in range(count):
        (attempt,) = bench.give()
        order.append(attempt.entry.work.key[1])
        bench.finish(attempt)
    return order


def test_interactive_work_overtakes_bulk_and_breaks_no_group() -> None:
    bench = Bench()
    bench.worker("w", sequences=4)
    head = list(range(8))
    bench.submit(*(work([*head, 100 + at], request_id=f"bulk{at}") for at in range(12)))
    (leader,) = bench.give()
    bench.computed(leader)
    bench.finish(leader)
    assert len(bench.give()) == 4
    bench.submit(work([9] * 6, lane=Lane.INTERACTIVE, job="", request_id="somebody waits"))
    running = next(iter(bench.decision.scheduler.workers.values())).outstanding
    bench.finish(next(iter(running.values())))
    assert ids_of(bench.give()) == ["somebody waits"]
    rest = []
    while bench.decision.requests:
        for attempt in list(running.values()):
            bench.finish(attempt)
        rest += bench.give()
    # The group went on where it was: nobody led its head a second time.
    assert not any(attempt.leads for attempt in rest)
    assert all(attempt.head_tokens == 8 for attempt in rest)


def test_bulk_leaves_room_while_interactive_work_has_come_lately() -> None:
    bench = Bench(replace(_QUICK, interactive_reserve=0.25, interactive_lately_s=10.0))
    bench.worker("w", sequences=8, tokens=8 * 12)
    bench.submit(work([1, 2, 3], lane=Lane.INTERACTIVE, job=""))
    (first,) = bench.give()
    bench.finish(first)
    bench.submit(*(work([10 + at] * 6) for at in range(20)))
    assert len(bench.give()) == 6
    bench.submit(*(work([50 + at] * 6, lane=Lane.INTERACTIVE, job="") for at in range(4)))
    assert len(bench.give()) == 2
    bench.now += 20.0
    for worker in bench.decision.scheduler.workers.values():
        for attempt in list(worker.outstanding.values()):
            bench.finish(attempt)
    lanes = Counter(attempt.entry.work.lane for attempt in bench.give())
    assert lanes == {Lane.INTERACTIVE: 2, Lane.BULK: 6}


@pytest.mark.parametrize(("max_tokens", "taken"), [(4, 7), (1, 11)])
def test_bulk_leaves_slots_and_not_only_credit(max_tokens: int, taken: int) -> None:
    bench = Bench(replace(_QUICK, interactive_reserve=0.05, interactive_lately_s=10.0))
    bench.worker("w", sequences=12)  # eight slots, and four to look ahead
    bench.submit(work([1, 2, 3], lane=Lane.INTERACTIVE, job=""))
    (first,) = bench.give()
    bench.finish(first)
    bench.submit(*(work([10 + at] * 6, max_tokens=max_tokens) for at in range(20)))
    # What generates holds its slot; what does not is gone with the next step.
    assert len(bench.give()) == taken
    bench.now += 20.0
    bench.finish(next(iter(next(iter(bench.decision.scheduler.workers.values())).outstanding.values())))
    assert len(bench.give()) == 12 - taken + 1


@pytest.mark.parametrize(("before", "waits"), [(None, False), (0.0005, True)])
def test_interactive_work_lingers_only_in_company(before: float | None, waits: bool) -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, interactive_linger_s=0.002))
    bench.worker("w")
    if before is not None:
        bench.submit(work([1, 2, 3], lane=Lane.INTERACTIVE, job=""))
        assert len(bench.give()) == 1
        bench.now += before
    bench.submit(work([5, 6, 7], lane=Lane.INTERACTIVE, job=""))
    assert len(bench.give()) == (0 if waits else 1)
    bench.now += 0.0025
    assert len(bench.give()) == (1 if waits else 0)


def test_bulk_work_waits_a_moment_for_siblings() -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.02))
    bench.worker("w")
    bench.submit(work([1] * 9))
    assert bench.give() == []
    assert bench.decision.timers.next_at == pytest.approx(bench.now + 0.02)
    bench.now += 0.021
    assert len(bench.give()) == 1


def test_higher_priorities_go_first() -> None:
    bench = Bench()
    bench.worker("w", sequences=1)
    bench.submit(
        work([1] * 6, priority=0, request_id="low"),
        work([2] * 6, priority=5, request_id="high"),
        work([3] * 6, priority=-3, request_id="lowest"),
    )
    assert _one_at_a_time(bench, 3) == ["high", "low", "lowest"]


def test_waiting_raises_a_priority() -> None:
    bench = Bench(replace(_QUICK, ageing_s=10.0))
    bench.worker("w", sequences=1)
    bench.submit(work([1] * 6, priority=0, request_id="old", tenant="a"))
    bench.now += 35.0
    bench.submit(work([2] * 6, priority=3, request_id="new", tenant="b"))
    assert _one_at_a_time(bench, 2) == ["old", "new"]


def test_tenants_share_by_weight_and_their_jobs_evenly() -> None:
    bench = Bench(replace(_QUICK, tenant_weights={"gold": 3.0}, quantum=1))
    bench.worker("w", sequences=1)
    for tenant, job in (("gold", "g"), ("plain", "p1"), ("plain", "p2")):
        bench.submit(*(work([at + 1] * 8, tenant=tenant, job=job, request_id=f"{job}-{at}") for at in range(60)))
    served = Counter(name.split("-")[0] for name in _one_at_a_time(bench, 64))
    assert served == {"g": 48, "p1": 8, "p2": 8}


def test_a_job_that_comes_late_has_saved_nothing_up() -> None:
    bench = Bench(replace(_QUICK, quantum=1))
    bench.worker("w", sequences=1)
    bench.submit(*(work([at + 1] * 8, job="early", request_id=f"early-{at}") for at in range(60)))
    _one_at_a_time(bench, 30)
    bench.submit(*(work([at + 1] * 8, job="late", request_id=f"late-{at}") for at in range(60)))
    served = Counter(name.split("-")[0] for name in _one_at_a_time(bench, 20))
    assert served == {"early": 10, "late": 10}


def test_two_jobs_in_great_groups_take_turns_on_one_worker() -> None:
    bench = Bench(replace(_QUICK, quantum=4))
    bench.worker("w", sequences=8, tokens=100_000)
    for job in ("a", "b"):
        bench.submit(*(work([ord(job)] * 8 + [at + 200], job=job, request_id=f"{job}-{at}") for at in range(200)))
    served: Counter[str] = Counter()
    while sum(served.values()) < 200:
        for attempt in bench.give():
            served[attempt.entry.work.job] += 1
        for worker in bench.decision.scheduler.workers.values():
            for attempt in list(worker.outstanding.values()):
                bench.finish(attempt)
    assert abs(served["a"] - served["b"]) <= 24


def test_a_group_that_never_ends_does_not_starve_the_others() -> None:
    bench = Bench(replace(_QUICK, overdue_s=30.0))
    bench.worker("w", sequences=2, tokens=100_000)
    head = [1] * 8
    bench.submit(*(work([*head, 100 + at]) for at in range(50)))
    bench.submit(work([7] * 40, max_tokens=1, request_id="other"))
    fed = 150
    for _ in range(200):
        bench.now += 1.0
        given = bench.give()
        if "other" in ids_of(given):
            break
        for attempt in given:
            bench.finish(attempt)
            bench.submit(work([*head, 100 + fed]))
            fed += 1
    else:
        raise AssertionError("it starved")
    assert bench.now < 100.0 + 60.0


def test_a_paused_job_stands_still_and_goes_on() -> None:
    bench = Bench()
    bench.worker("w")
    bench.decision.pause_job("j", True, bench.now)
    bench.submit(*(work([at + 1] * 6) for at in range(3)))
    assert bench.give() == []
    bench.submit(work([9] * 6, job="another", request_id="x"))
    assert ids_of(bench.give()) == ["x"]
    bench.decision.pause_job("j", False, bench.now)
    assert len(bench.give()) == 3
