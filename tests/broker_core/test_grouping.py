# SPDX-License-Identifier: Apache-2.0
"""What grouping is worth: never less than the best one-level grouping, and all that the tree has."""

from __future__ import annotations

import gc
from functools import cache
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.broker.core.settings import CoreSettings
from tests.broker_core.made import BLOCK, Bench, Caches, work

Blocks = tuple[int, ...]

_rows = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=5).map(tuple), st.integers(1, BLOCK - 1)), min_size=1, max_size=16
)


def _prompt(blocks: Blocks, tail: int, at: int) -> list[int]:
    return [block * 100 + step for block in blocks for step in range(BLOCK)] + [500 + at] * tail


def best_one_level_saving(rows: list[Blocks]) -> int:
    """The most tokens that putting each prompt into at most one prefix group can save, exactly.

    With d(n) the tokens of prefix n: V(n, X) is the best for the prompts below n when whoever stays ungrouped below
    joins a group at an ancestor of depth X; V = max(W(n, X), W(n, d(n)) - d(n)), W(n, X) = own(n) * X + the sum of
    V(child, X).
    """
    rows = sorted(rows)

    @cache
    def value(prefix: Blocks, depth: int) -> int:
        below = [row for row in rows if row[: len(prefix)] == prefix]
        own = sum(row == prefix for row in below)
        children = [key for key, _ in groupby(below, key=lambda row: row[: len(prefix) + 1]) if len(key) > len(prefix)]

        def with_group_at(at: int) -> int:
            return own * at + sum(value(child, at) for child in children)

        here = len(prefix) * BLOCK
        return max(with_group_at(depth), with_group_at(here) - here)

    return value((), 0)


def _bound(prompts: list[list[int]]) -> int:
    whole = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    return len(whole) * BLOCK + sum(len(prompt) % BLOCK for prompt in prompts)


@pytest.mark.parametrize("workers", [1, 3])
@given(rows=_rows)
@settings(max_examples=150, deadline=None)
def test_the_bound_is_reached_but_for_cuts_and_beats_one_level(workers: int, rows: list[tuple[Blocks, int]]) -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, join_factor=1.0))
    for at in range(workers):
        bench.worker(f"w{at}", sequences=3, tokens=1000)
    prompts = {f"r{at}": _prompt(blocks, tail, at) for at, (blocks, tail) in enumerate(rows)}
    bench.submit(*(work(prompt, request_id=name) for name, prompt in prompts.items()))
    caches = Caches()
    caches.run(bench, prompts)
    logical = sum(map(len, prompts.values()))
    bound = _bound(list(prompts.values()))
    account = bench.decision.end_job("j")
    assert account is not None
    assert account.bound_tokens() == bound
    assert account.logical_tokens == logical
    assert account.computed_tokens == caches.computed_tokens
    if workers == 1:
        assert caches.computed_tokens == bound
        assert logical - bound >= best_one_level_saving([blocks for blocks, _ in rows])
    else:
        # Heads that a second worker computed are the cost of cuts, and nothing else is computed twice.
        assert bound <= caches.computed_tokens <= bound + account.cut_tokens


def test_the_published_example_of_one_level() -> None:
    # Two groups of two below one head: deep groups save more than the shallow one; the tree saves both.
    rows = [(0, 0, 0), (0, 0, 0), (0, 1, 1), (0, 1, 1)]
    assert best_one_level_saving([tuple(row) for row in rows]) == 2 * 3 * BLOCK


def test_groups_are_not_torn_apart_for_idle_workers() -> None:
    bench = Bench()
    for at in range(4):
        bench.worker(f"w{at}", sequences=16, tokens=100_000)
    prompts = {
        f"g{group}-{at}": [group * 50 + step for step in range(8 * BLOCK)] + [1000 + at] * 3
        for group in range(8)
        for at in range(6)
    }
    bench.submit(*(work(prompt, request_id=name, max_tokens=1) for name, prompt in prompts.items()))
    Caches().run(bench, prompts)
    owners: dict[str, set[str]] = {}
    for attempt in bench.sent:
        owners.setdefault(attempt.entry.work.key[1].split("-")[0], set()).add(attempt.worker.node_id)
    assert all(len(workers) == 1 for workers in owners.values())
    assert len(set().union(*owners.values())) == 4


def test_one_great_group_is_cut_so_that_everybody_has_a_share() -> None:
    bench = Bench()
    for at in range(4):
        bench.worker(f"w{at}", sequences=8, tokens=100_000)
    prompts = {f"r{at}": [*range(4 * BLOCK), *([600 + at] * 7)] for at in range(200)}
    bench.submit(*(work(prompt, request_id=name, max_tokens=20) for name, prompt in prompts.items()))
    caches = Caches()
    caches.run(bench, prompts)
    shares: dict[str, int] = {}
    for attempt in bench.sent:
        shares[attempt.worker.node_id] = shares.get(attempt.worker.node_id, 0) + 1
    assert len(shares) == 4
    assert max(shares.values()) <= 1.3 * min(shares.values())
    account = bench.decision.end_job("j")
    assert account is not None
    # The head once for each worker, and the report says so.
    assert caches.computed_tokens == account.bound_tokens() + 3 * 4 * BLOCK
    assert account.cut_tokens == 3 * 4 * BLOCK


def test_a_worker_that_joins_late_takes_whole_subtrees() -> None:
    bench = Bench()
    bench.worker("first", sequences=4, tokens=100_000)
    prompts = {
        f"s{part}-{at}": [*range(2 * BLOCK), *([300 + part] * (2 * BLOCK)), 600 + at, part]
        for part in range(12)
        for at in range(8)
    }
    bench.submit(*(work(prompt, request_id=name, max_tokens=8) for name, prompt in prompts.items()))
    begun: set[str] = set()
    owners: dict[str, set[str]] = {}
    while len(bench.decision.requests):
        given = bench.give()
        for attempt in given:
            part = attempt.entry.work.key[1].split("-")[0]
            owners.setdefault(part, set()).add(attempt.worker.node_id)
            bench.computed(attempt, attempt.head_tokens)
        for attempt in given:
            bench.finish(attempt, cached=attempt.head_tokens)
        if len(bench.sent) > 20 and not begun:
            begun = set(owners)
            bench.worker("late", sequences=4, tokens=100_000)
        bench.now += 0.1
    assert set().union(*owners.values()) == {"first", "late"}
    parted = [part for part in owners if len(owners[part]) > 1]
    assert parted in ([], list(owners)[-1:]), "siblings were parted before there was nothing else left to take"
    moved = [part for part in owners if owners[part] == {"late"}]
    assert len(moved) >= 3


def test_late_work_of_a_group_goes_where_its_head_is() -> None:
    bench = Bench()
    for at in range(3):
        bench.worker(f"w{at}")
    head = list(range(3 * BLOCK))
    bench.submit(work([*head, 900], request_id="first"))
    (first,) = bench.give()
    bench.computed(first)
    bench.finish(first)
    for at in range(6):
        bench.submit(work([*head, 901 + at]))
        (late,) = bench.give()
        assert late.worker is first.worker
        bench.finish(late, cached=3 * BLOCK)


def test_a_worker_takes_the_share_that_its_limits_allow() -> None:
    bench = Bench()
    bench.worker("whole", sequences=16, tokens=16 * 40)
    bench.worker("half", sequences=8, tokens=8 * 40)
    bench.submit(*(work([2 + at] * 30, max_tokens=10) for at in range(240)))
    counts = {"whole": 0, "half": 0}
    while len(bench.decision.requests):
        for attempt in bench.give():
            counts[attempt.worker.node_id] += 1
        for worker in list(bench.decision.scheduler.workers.values()):
            for attempt in list(worker.outstanding.values())[: len(worker.outstanding) // 2 + 1]:
                bench.finish(attempt)
    assert 1.6 <= counts["whole"] / counts["half"] <= 2.4


def test_decode_heavy_groups_go_first() -> None:
    bench = Bench()
    bench.worker("w", sequences=1, tokens=10_000)
    bench.submit(
        *(work([50 + at] * 40, max_tokens=2, request_id=f"light{at}") for at in range(3)),
        *(work([80 + at] * 40, max_tokens=200, request_id=f"heavy{at}") for at in range(3)),
    )
    order = []
    while len(bench.decision.requests):
        (attempt,) = bench.give()
        order.append(attempt.entry.work.key[1])
        bench.finish(attempt)
    assert [name[:5] for name in order] == ["heavy"] * 3 + ["light"] * 3


def test_age_makes_up_for_density() -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, ageing_s=10.0))
    bench.worker("w", sequences=1, tokens=10_000)
    bench.submit(work([1] * 30, max_tokens=100, request_id="running"))
    (running,) = bench.give()
    bench.submit(work([5] * 40, max_tokens=2, request_id="old and light"))
    bench.now += 200.0
    bench.submit(work([6] * 40, max_tokens=200, request_id="new and heavy"))
    bench.finish(running)
    (first,) = bench.give()
    assert first.entry.work.key[1] == "old and light"


def test_what_takes_longest_is_not_left_for_the_end() -> None:
    bench = Bench()
    for at in range(2):
        bench.worker(f"w{at}", sequences=1, tokens=10_000)
    bench.submit(*(work([50 + at] * 40, max_tokens=40) for at in range(6)))
    bench.submit(work([9] * 900, max_tokens=1, request_id="long"))
    # Density alone would send it last, and one worker would wait for the other.
    assert "long" in {attempt.entry.work.key[1] for attempt in bench.give()}


def test_what_has_ended_lies_in_no_ring() -> None:
    """Else the collector would have to look through everything that waits to find it."""
    bench = Bench()
    for at in range(2):
        bench.worker(f"w{at}", sequences=4, tokens=100_000)
    prompts = {f"r{at}": [*range(at % 3, 2 * BLOCK), *([300 + at % 6] * BLOCK), 600 + at] for at in range(60)}
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        bench.submit(*(work(prompt, request_id=name) for name, prompt in prompts.items()))
        Caches().run(bench, prompts)
        bench.sent.clear()
        gc.collect()
        left = [found for found in gc.garbage if type(found).__module__.startswith("services.broker.core")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
