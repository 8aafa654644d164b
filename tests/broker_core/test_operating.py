# SPDX-License-Identifier: Apache-2.0
"""Cordoned workers, and why requests wait, without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifabric.engine.v1 import node_pb2
from services.broker.core.explain import whereabouts
from services.broker.operating import Place, Whereabouts
from services.broker.work import Lane, WorkEnd
from services.common.errors import UnavailableError
from tests.broker_core.made import DIGEST, Bench, RecordingSink, work

if TYPE_CHECKING:
    from services.broker.core.workers import Worker
    from services.broker.work import Work


def told(bench: Bench, asked: Work) -> Whereabouts:
    entry = bench.decision.requests.get(asked.key)
    assert entry is not None
    return whereabouts(entry, bench.decision.scheduler, bench.now, nobody_limit_s=bench.settings.nobody_limit_s)


def first(bench: Bench, asked: Work) -> str:
    return told(bench, asked).sentences[0]


def cordon(bench: Bench, worker: Worker, cordoned: bool = True) -> None:
    bench.decision.worker_cordoned(worker, cordoned, bench.now)


def test_a_cordoned_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    bench = Bench()
    one, two = bench.worker("one"), bench.worker("two")
    works = [work([at, *range(7)]) for at in range(8)]
    bench.submit(*works)
    given = bench.give()
    assert {attempt.worker for attempt in given} == {one, two}
    cordon(bench, one)
    later = [work([at, *range(7)]) for at in range(100, 108)]
    bench.submit(*later)
    assert {attempt.worker for attempt in bench.give()} == {two}
    for attempt in list(bench.sent):
        bench.finish(attempt)
    assert all(isinstance(made.sink.end, WorkEnd) for made in (*works, *later))  # type: ignore[attr-defined]
    cordon(bench, one, cordoned=False)
    bench.submit(*[work([at, *range(7)]) for at in range(200, 208)])
    assert {attempt.worker for attempt in bench.give()} == {one, two}


def test_bulk_work_waits_for_a_cordoned_worker_and_live_work_does_not() -> None:
    bench = Bench()
    worker = bench.worker("only")
    cordon(bench, worker)
    bulk, live = work([1, 2, 3]), work([4, 5, 6], lane=Lane.INTERACTIVE, job="")
    bench.submit(bulk, live)
    assert bench.give() == []
    assert first(bench, bulk) == "Of the nodes that serve an engine of this request, only is cordoned."
    bench.decision.check_waiting(bench.now)
    bench.now += bench.settings.nobody_limit_s + 1
    bench.decision.check_waiting(bench.now)
    bench.decision.deliver()
    assert isinstance(live.sink.end, UnavailableError)  # type: ignore[attr-defined]
    assert bulk.sink.ends == []  # type: ignore[attr-defined]
    cordon(bench, worker, cordoned=False)
    (attempt,) = bench.give()
    assert attempt.entry.work is bulk


def test_suspects_of_a_cordoned_worker_go_to_another() -> None:
    bench = Bench()
    lost, one = bench.worker("lost"), bench.worker("one", sequences=1)
    works = [work([at, *range(7)]) for at in range(3)]
    bench.submit(*works)
    bench.give()
    cordon(bench, one)
    bench.lose(lost)
    running = [attempt for attempt in bench.sent if attempt.worker is one]
    for attempt in running:
        bench.finish(attempt)
    cordon(bench, one, cordoned=False)
    bench.now += 10
    assert [attempt.apart for attempt in bench.give()] == [True]
    two = bench.worker("two")
    cordon(bench, one)
    bench.now += 10
    given = bench.give()
    assert {attempt.worker for attempt in given} == {two}
    assert all(attempt.apart for attempt in given)
    assert len(given) == len(works) - len(running) - 1, "none is stuck at the cordoned worker"


def test_why_a_request_waits() -> None:
    bench = Bench()
    leader, follower, other = work(range(9)), work([*range(8), 99]), work([50, 51, 52, 53, 54])
    bench.submit(leader, follower)
    assert first(bench, leader) == "No node that serves an engine of this request is connected."
    worker = bench.worker("w", sequences=2)
    (leading,) = bench.give()
    assert leading.entry.work is leader
    assert told(bench, leader).place is Place.RUNNING
    assert told(bench, leader).node_id == "w"
    assert "It computes a head that 1 other request below it will share." in told(bench, leader).sentences
    assert first(bench, follower) == (
        f"It shares its first 8 tokens with {leader.key[1]!r}, which computes them on w now; it follows once they are "
        "there."
    )
    bench.computed(leading)
    bench.submit(other)
    (following,) = bench.give()
    assert following.entry.work is follower
    assert told(bench, follower).held_tokens == 8
    assert first(bench, other).startswith("Every node that may take it has as much as it takes: w has 2 of 2 sequences")
    bench.decision.pause_job("j", True, bench.now)
    assert "paused" in first(bench, other)
    bench.decision.pause_job("j", False, bench.now)
    worker.quiet = True
    assert first(bench, other) == "Of the nodes that serve an engine of this request, w is silent."


def test_a_request_of_a_lost_worker_says_so() -> None:
    bench = Bench()
    doomed = bench.worker("doomed")
    made = work([1, 2, 3], sink=RecordingSink())
    bench.submit(made)
    bench.give()
    bench.lose(doomed)
    found = told(bench, made)
    assert (found.place, found.attempt) == (Place.APART, 1)
    assert found.sentences[0] == "No node that serves an engine of this request is connected."
    assert "It was on a node that was lost, 1 time in a way that it may have caused" in found.sentences[1]
    bench.worker("heir")
    bench.now += 10
    bench.give()
    assert "It runs apart from other work, because it was on a node that was lost." in told(bench, made).sentences


def test_counters_of_workers_tell_the_speed_of_their_engine() -> None:
    bench = Bench()
    worker = bench.worker("w")
    bench.decision.stats(worker, node_pb2.EngineStats(steps=100, generated_tokens=800, busy_us=10_000), bench.now)
    pace = bench.decision.speeds.pace(DIGEST)
    assert pace is not None
    assert round(pace.busy_us(100, 0, 800)) == 10_000
    made = work([1, 2, 3], max_tokens=4)
    bench.submit(made)
    (attempt,) = bench.give()
    bench.finish(attempt, generated=3)
    assert bench.decision.speeds.output_share(DIGEST) == 0.75


def test_what_is_left_to_the_node_that_holds_its_start_says_so() -> None:
    bench = Bench()
    other = bench.worker("other", sequences=1)
    cordon(bench, other)
    bench.worker("holder", sequences=1)
    heads = [[100 + group] * 40 for group in range(3)]
    for head in heads:
        bench.submit(work([*head, 1], job="earlier"))
        bench.finish(*bench.give())
    cordon(bench, other, cordoned=False)
    rows = [work([*head, 500 + at], max_tokens=1) for at in range(2) for head in heads]
    bench.submit(*rows)
    assert len(bench.give()) == 2, "one at each node"
    left = [made for made in rows if any("It is left to holder" in said for said in told(bench, made).sentences)]
    assert len(left) == 2, "the group that nobody has begun"
