# SPDX-License-Identifier: Apache-2.0
"""What is taken in and what is refused; credit; cancelling; the account of a job."""

from __future__ import annotations

import numpy as np
import pytest

from services.broker.core.accounting import DistinctCounter, JobAccount
from services.broker.core.settings import CoreSettings
from services.broker.core.tree import Placed
from services.broker.core.workers import Amount, Ledger
from services.broker.work import Lane, WorkEnd
from services.common import reasons
from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from tests.broker_core.made import BLOCK, DIGEST, OTHER, Bench, RecordingSink, work

_CANCELLED = 3


def test_an_id_in_flight_is_refused_and_then_free_again() -> None:
    bench = Bench()
    bench.worker("w")
    (taken, again, other) = bench.submit(
        work([1, 2], request_id="x"), work([1, 2], request_id="x"), work([1, 2], request_id="x", tenant="other")
    )
    assert taken is None
    assert isinstance(again, AlreadyExistsError)
    assert other is None
    for attempt in bench.give():
        bench.finish(attempt)
    assert bench.submit(work([1, 2], request_id="x")) == [None]


def test_a_late_cancel_of_one_attempt_never_touches_the_next_of_the_same_id() -> None:
    bench = Bench()
    bench.worker("w")
    bench.submit(work([1, 2], request_id="x"))
    (first,) = bench.give()
    bench.decision.cancel([("t", "x")])
    (told,) = bench.decision.take_cancels()
    bench.finish(first, reason=_CANCELLED)
    bench.submit(work([1, 2], request_id="x"))
    (second,) = bench.give()
    assert second.handle not in told[1]
    bench.finish(first)
    assert second.entry.work.sink.ends == []  # type: ignore[attr-defined]


def test_bounds_are_kept_and_say_when_to_try_again() -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, waiting_requests_max=3))
    results = bench.submit(*(work([at + 1] * 6) for at in range(5)))
    assert results[:3] == [None] * 3
    for refusal in results[3:]:
        assert isinstance(refusal, ResourceExhaustedError)
        assert refusal.retry_after_s == 1.0
    bench.worker("w")
    bench.finish(bench.give()[0])
    assert bench.submit(work([9] * 6)) == [None]


def test_one_tenant_at_its_bound_keeps_no_other_out() -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, tenant_requests_max=2))
    first, second, third, other = bench.submit(
        *(work([at + 1] * 6, tenant=tenant) for at, tenant in enumerate(["a", "a", "a", "b"]))
    )
    assert (first, second, other) == (None, None, None)
    assert isinstance(third, ResourceExhaustedError)
    assert (third.reason, third.metadata) == ("QUOTA_EXCEEDED", {"limit": "2"})
    assert third.retry_after_s
    bench.worker("w")
    bench.finish(next(attempt for attempt in bench.give() if attempt.entry.work.key[0] == "a"))
    assert bench.submit(work([9] * 6, tenant="a")) == [None]
    assert bench.submit(work([8] * 6, tenant="a")) != [None]


def test_memory_is_a_bound_too() -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, waiting_bytes_max=20_000))
    results = bench.submit(*(work(list(np.random.default_rng(at).integers(0, 999, 2000))) for at in range(8)))
    assert results.count(None) == 4
    assert bench.decision.requests.held_bytes() < 30_000


def test_a_prompt_lies_in_memory_once() -> None:
    bench = Bench()
    made = work(list(range(100)))
    bench.submit(made)
    assert len(made.tokens) == 0


def test_a_broker_that_goes_away_takes_nothing_in() -> None:
    bench = Bench()
    bench.decision.draining = True
    (refusal,) = bench.submit(work([1]))
    assert isinstance(refusal, UnavailableError)
    assert refusal.reason == reasons.DRAINING


def test_an_engine_that_was_never_heard_of_is_refused() -> None:
    (refusal,) = Bench().submit(work([1], digests=frozenset({"c" * 64})))
    assert isinstance(refusal, UnavailableError)


@pytest.mark.parametrize("short", ["tokens", "sequences", "payload_bytes"])
def test_credit_is_never_exceeded(short: str) -> None:
    amounts = {"tokens": 1000, "sequences": 100, "payload_bytes": 100_000} | {
        short: {"tokens": 30, "sequences": 3, "payload_bytes": 3 * 64}[short]
    }
    bench = Bench()
    worker = bench.worker(
        "w", tokens=amounts["tokens"], sequences=amounts["sequences"], payload_bytes=amounts["payload_bytes"]
    )
    bench.submit(*(work([at + 1] * 6, max_tokens=4, payload_bytes=64) for at in range(8)))
    assert len(bench.give()) == 3
    assert bench.give() == []
    bench.decision.credit(worker, Amount(10_000, 2, 10_000))
    bench.finish(next(iter(worker.outstanding.values())))
    assert bench.give() == [], "the newest credit counts, and two are out still"
    bench.finish(next(iter(worker.outstanding.values())))
    assert len(bench.give()) == 1


def test_samples_count_and_are_one_item() -> None:
    bench = Bench()
    worker = bench.worker("w", sequences=5)
    bench.submit(*(work([at + 1] * 6, samples=2) for at in range(4)))
    given = bench.give()
    assert len(given) == 2
    assert worker.ledger.sequences == 4
    assert worker.ledger.tokens == 2 * (6 + 2 * 4)


def test_a_request_beyond_a_workers_whole_credit_goes_to_one_that_grants_more() -> None:
    bench = Bench()
    bench.worker("small", tokens=20)
    bench.worker("large", tokens=200)
    bench.submit(work([1] * 60))
    (attempt,) = bench.give()
    assert attempt.worker.node_id == "large"


def test_a_request_beyond_every_credit_ends_with_the_figures() -> None:
    bench = Bench()
    bench.worker("small", tokens=20)
    sink = RecordingSink()
    bench.submit(work([1] * 60, sink=sink), work([2] * 6, request_id="fits"))
    (attempt,) = bench.give()
    assert attempt.entry.work.key[1] == "fits"
    assert isinstance(sink.end, FailedPreconditionError)
    assert "64 tokens" in sink.end.message


def test_a_ledger_counts_every_measure() -> None:
    ledger = Ledger(Amount(100, 4, 10))
    ledger.take(Amount(60, 1, 5))
    assert ledger.fits(Amount(40, 3, 5))
    assert not ledger.fits(Amount(41, 1, 0))
    assert not ledger.fits(Amount(1, 4, 0))
    assert not ledger.fits(Amount(1, 1, 6))
    assert not ledger.fits(Amount(31, 1, 0), kept_back=0.1)
    assert ledger.fill() == 0.6
    ledger.give_back(Amount(60, 1, 5))
    assert ledger.fits(Amount(100, 4, 10))
    assert Ledger(Amount(0, 0, 0)).fill() == 1.0


def test_work_goes_only_where_its_engine_is() -> None:
    bench = Bench()
    bench.worker("a", digest=DIGEST)
    bench.worker("b", digest=OTHER)
    bench.submit(
        *(work([at + 1] * 6, digests=frozenset({OTHER})) for at in range(3)),
        *(work([at + 1] * 6, digests=frozenset({DIGEST, OTHER})) for at in range(6)),
    )
    for attempt in bench.give():
        assert attempt.worker.facts.digest in attempt.entry.work.engine_digests
    assert not bench.decision.scheduler.flows or all(
        flow.waiting == 0 for flow in bench.decision.scheduler.flows.values()
    )


def test_cancelling_at_every_stage_ends_a_request_once() -> None:
    bench = Bench()
    worker = bench.worker("w", sequences=1)
    sinks = [RecordingSink() for _ in range(3)]
    works = [work([at + 1] * 6, sink=sink, samples=1) for at, sink in enumerate(sinks)]
    bench.submit(*works)
    (running,) = bench.give()
    assert bench.decision.cancel([made.key for made in works]) == 3
    assert bench.decision.cancel([made.key for made in works]) == 1, "those that waited are gone"
    bench.decision.deliver()
    told = bench.decision.take_cancels()
    assert told == [(worker, [running.handle])], "and the worker is told once"
    bench.finish(running, reason=_CANCELLED)
    for sink in sinks:
        end = sink.end
        assert isinstance(end, WorkEnd)
        assert end.samples[0].finish_reason == _CANCELLED
    assert bench.decision.cancel([made.key for made in works]) == 0


def test_a_cancelled_job_leaves_at_most_one_grant_behind() -> None:
    bench = Bench()
    worker = bench.worker("w", sequences=4)
    works = [work([at + 1] * 6) for at in range(50)]
    bench.submit(*works)
    bench.give()
    assert bench.decision.cancel([made.key for made in works]) == 50
    bench.decision.deliver()
    assert len(bench.decision.requests) == len(worker.outstanding) == 4


def test_finish_early_is_for_that_very_work() -> None:
    bench = Bench()
    bench.worker("w")
    first = work([1] * 6, request_id="x")
    bench.submit(first)
    (attempt,) = bench.give()
    bench.finish(attempt)
    second = work([1] * 6, request_id="x")
    bench.submit(second)
    bench.decision.finish_early(first)
    assert bench.decision.take_cancels() == []
    bench.give()
    bench.decision.finish_early(second)
    assert len(bench.decision.take_cancels()) == 1


def test_a_head_that_is_gone_is_led_again_and_the_plan_grows_careful() -> None:
    bench = Bench()
    worker = bench.worker("w", sequences=2)
    first, second = [1] * 8, [1, 1, 1, 1, 2, 2, 2, 2]
    bench.submit(*(work([*head, 100 + at]) for head in (first, second) for at in range(6)))
    (leader,) = bench.give()
    bench.computed(leader)
    bench.finish(leader)
    slow, *others = bench.give()
    while not others[0].leads:
        bench.finish(others[0], cached=8)
        others = bench.give()
    # The other head is led now, and then held; its siblings could follow.
    bench.computed(others[0], cached=4)
    room = worker.pool_tokens - worker.plan.own - worker.plan.heads
    assert worker.plan.fits_head(room)
    # But one that was sent before finds that what both begin with had been evicted.
    bench.computed(slow, cached=0)
    assert not worker.plan.fits_head(room)
    bench.finish(others[0])
    (again,) = bench.give()
    assert again.leads


def test_nothing_is_led_without_blocks() -> None:
    bench = Bench()
    bench.decision.learn_engine(bench.worker("w", digest="n" * 64, block_tokens=0, pool_tokens=0).facts)
    bench.submit(*(work([1] * 20, digests=frozenset({"n" * 64}), max_tokens=0) for _ in range(8)))
    given = bench.give()
    assert len(given) == 8
    assert not any(attempt.reports_context for attempt in given)


def test_the_account_of_a_job_counts_what_the_engines_counted() -> None:
    bench = Bench()
    bench.worker("w1", sequences=2)
    head = [1] * (2 * BLOCK)
    bench.submit(*(work([*head, 50 + at, 7], request_id=f"r{at}", job="job") for at in range(3)))
    bench.submit(work([5] * 6, lane=Lane.INTERACTIVE, job="", request_id="not of it"))
    while bench.decision.requests:
        for attempt in bench.give():
            bench.computed(attempt, cached=attempt.head_tokens)
            bench.finish(attempt, cached=attempt.head_tokens, generated=3)
    account = bench.decision.end_job("job")
    assert account is not None
    report = account.report()
    assert report.prompt_tokens_logical == 30
    assert report.prompt_tokens_bound == 8 + 3 * 2
    assert report.prompt_tokens_computed == 14
    assert report.prompt_tokens_cached == 16
    assert report.generated_tokens == 9
    assert [(share.node_id, share.requests) for share in report.shares] == [("w1", 3)]
    assert bench.decision.end_job("job") is None


def test_the_bound_counts_whole_prompts_as_at_least_one_token_each() -> None:
    account = JobAccount.open(4, 1000)
    # Twice the same two blocks, and once more with a block behind them.
    account.accepted(8, Placed([11, 12], 12))
    account.accepted(8, Placed([], 12))
    account.accepted(12, Placed([13], 13))
    assert account.bound_tokens() == 3 * 4 + 1


def test_distinct_chains_are_counted_exactly_and_then_by_sample() -> None:
    rng = np.random.default_rng(5)
    chains = rng.integers(0, 2**63, 60_000, dtype=np.int64).astype(np.uint64) * 2
    exact, sampled = DistinctCounter(10**6), DistinctCounter(8_000)
    for at in range(0, len(chains), 700):
        part = chains[at : at + 700].tolist()
        for counter in (exact, sampled):
            counter.add(part)
            counter.add(part[:100])
    distinct = len(set(chains.tolist()))
    assert exact.count() == distinct
    assert sampled.count() == pytest.approx(distinct, rel=0.05)
