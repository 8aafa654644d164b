# SPDX-License-Identifier: Apache-2.0
"""What a job's report says of time, engines and cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ifabric.engine.v1 import node_pb2
from services.broker.core.loss import Loss
from tests.broker_core.made import BLOCK, Bench, work

if TYPE_CHECKING:
    from services.broker.core.workers import Worker


def _tell(bench: Bench, worker: Worker, *, steps: int, tokens: int, busy_s: float, uptime_s: float) -> None:
    """The worker tells the counters of its engine, half of the tokens prompt and half generated."""
    stats = node_pb2.EngineStats(
        progress_tick=steps,
        steps=steps,
        prompt_tokens_computed=tokens // 2,
        generated_tokens=tokens - tokens // 2,
        busy_us=int(busy_s * 1e6),
        uptime_us=int(uptime_s * 1e6),
    )
    bench.decision.stats(worker, stats, bench.now)


def test_waiting_and_running_time_add_up_over_requests() -> None:
    bench = Bench()
    bench.worker("w", sequences=1)
    bench.submit(work([1] * 6), work([2] * 6), work([3] * 6, request_id="never sent"))
    (first,) = bench.give()
    bench.now += 3.0
    bench.finish(first)
    (second,) = bench.give()
    bench.now += 2.0
    bench.decision.cancel([("t", "never sent")])
    bench.finish(second)
    account = bench.decision.end_job("j")
    assert account is not None
    report = account.report()
    assert report.running_ms == 3000 + 2000
    assert 3000 + 3000 <= report.waiting_ms <= 3000 + 5000, "the one that was never sent waited to its end"


def test_step_fill_and_idleness_are_the_engines_own_from_the_first_dispatch_on() -> None:
    bench = Bench()
    worker = bench.worker("w")
    _tell(bench, worker, steps=1000, tokens=64_000, busy_s=90.0, uptime_s=100.0)  # what others did does not count
    bench.submit(work([1] * 6))
    (attempt,) = bench.give()
    _tell(bench, worker, steps=1010, tokens=64_000 + 10 * 16, busy_s=93.0, uptime_s=104.0)
    bench.finish(attempt)
    account = bench.decision.end_job("j")
    assert account is not None
    (share,) = account.report().shares
    assert share.engine_steps == 10
    assert share.step_fill == pytest.approx(10 * 16 / (10 * worker.facts.step_token_budget))
    assert share.idle_fraction == pytest.approx(1 - 3.0 / 4.0)


def test_a_worker_that_joins_late_and_one_that_came_back_count_for_their_node() -> None:
    bench = Bench()
    before = bench.worker("w")
    bench.submit(work([1] * 6))
    (attempt,) = bench.give()
    _tell(bench, before, steps=5, tokens=100, busy_s=1.0, uptime_s=2.0)
    _tell(bench, before, steps=9, tokens=200, busy_s=2.0, uptime_s=4.0)
    bench.lose(before, Loss.LEFT)
    after = bench.worker("w")
    bench.now += 10.0
    (attempt,) = bench.give()
    _tell(bench, after, steps=1, tokens=50, busy_s=0.0, uptime_s=1.0)
    _tell(bench, after, steps=7, tokens=80, busy_s=0.0, uptime_s=3.0)
    bench.finish(attempt)
    account = bench.decision.end_job("j")
    assert account is not None
    (share,) = account.report().shares
    assert share.engine_steps == (9 - 5) + (7 - 1)
    assert share.idle_fraction == pytest.approx(1 - 1.0 / (2.0 + 2.0))


def test_a_worker_that_tells_nothing_leaves_its_figures_out() -> None:
    bench = Bench()
    bench.worker("w")
    bench.submit(work([1] * 6))
    (attempt,) = bench.give()
    bench.finish(attempt)
    account = bench.decision.end_job("j")
    assert account is not None
    (share,) = account.report().shares
    assert not any(share.HasField(name) for name in ("engine_steps", "step_fill", "idle_fraction"))


def test_the_cost_of_cuts_is_told() -> None:
    bench = Bench()
    for at in range(2):
        bench.worker(f"w{at}", sequences=8, tokens=100_000)
    bench.submit(*(work([*range(2 * BLOCK), *([600 + at] * 7)], max_tokens=20) for at in range(100)))
    while bench.decision.requests:
        for attempt in bench.give():
            bench.computed(attempt, attempt.head_tokens)
            bench.finish(attempt, cached=attempt.head_tokens)
    account = bench.decision.end_job("j")
    assert account is not None
    report = account.report()
    assert report.prompt_tokens_cut == 2 * BLOCK
    assert report.prompt_tokens_computed == report.prompt_tokens_bound + report.prompt_tokens_cut
