# SPDX-License-Identifier: Apache-2.0
"""Leader first: one request computes a shared head, its siblings follow when it is there."""

from __future__ import annotations

from services.broker.core.settings import CoreSettings
from services.broker.core.wire import dispatch_messages
from tests.broker_core.made import Bench, Caches, ids_of, work

HEAD = list(range(8))


def test_siblings_wait_for_their_leader() -> None:
    bench = Bench()
    bench.worker("w")
    bench.submit(*(work([*HEAD, 100 + n, 1, 2, 3], request_id=f"s{n}") for n in range(4)))
    (leader,) = bench.give()
    assert leader.reports_context
    assert bench.give() == []
    bench.computed(leader)
    assert sorted(ids_of([leader, *bench.give()])) == ["s0", "s1", "s2", "s3"]


def test_an_end_is_as_good_as_a_computed_prompt() -> None:
    bench = Bench()
    bench.worker("w")
    bench.submit(*(work([*HEAD, 100 + n, 1, 2, 3]) for n in range(3)))
    (leader,) = bench.give()
    bench.finish(leader)
    assert len(bench.give()) == 2


def test_nested_heads_are_led_level_by_level() -> None:
    bench = Bench()
    bench.worker("w")
    left, right = [*HEAD, 20, 21, 22, 23], [*HEAD, 30, 31, 32, 33]
    bench.submit(*(work([*branch, 100 + n, 1, 2, 3]) for branch in (left, right) for n in range(3)))
    (first,) = bench.give()
    bench.computed(first)
    second = bench.give()
    # The first led its own branch too: its two siblings go, and one leader for the other branch.
    assert len(second) == 3
    leaders = [attempt for attempt in second if attempt.leads]
    assert len(leaders) == 1
    bench.computed(leaders[0])
    assert len(bench.give()) == 2


def test_a_lost_leader_is_replaced() -> None:
    bench = Bench()
    worker = bench.worker("w")
    bench.submit(*(work([*HEAD, 100 + n, 1, 2, 3]) for n in range(3)))
    (leader,) = bench.give()
    bench.decision.cancel([leader.entry.work.key])
    bench.finish(leader, reason=3)
    (second,) = bench.give()
    assert second.leads
    assert second.worker is worker


def test_siblings_do_not_wait_for_ever() -> None:
    bench = Bench(CoreSettings(bulk_linger_s=0.0, lead_limit_s=5.0))
    bench.worker("w")
    bench.submit(*(work([*HEAD, 100 + n, 1, 2, 3]) for n in range(3)))
    bench.give()
    bench.now += 4.9
    assert bench.give() == []
    bench.now += 0.2
    assert len(bench.give()) == 2


def test_a_late_sibling_waits_for_who_runs_already() -> None:
    bench = Bench()
    bench.worker("w1")
    bench.worker("w2")
    bench.submit(work([*HEAD, 1, 2, 3, 4]))
    (leader,) = bench.give()
    bench.submit(work([*HEAD, 5, 6, 7, 8]))
    assert bench.give() == []
    bench.computed(leader)
    (follower,) = bench.give()
    assert follower.worker is leader.worker
    assert follower.head_tokens == 8


def test_head_ends_tell_where_siblings_part() -> None:
    bench = Bench()
    bench.worker("w")
    deep = [*HEAD, 20, 21, 22, 23]
    bench.submit(work([*deep, 1, 1, 1, 1]), work([*deep, 2, 2, 2, 2]), work([*HEAD, 3, 3, 3, 3], request_id="short"))
    (first,) = bench.give()
    bench.computed(first)
    (second,) = bench.give()
    ends = {attempt.entry.work.key[1]: attempt.entry.flow.head_ends(attempt.entry) for attempt in (first, second)}
    assert ends == {"short": [8], second.entry.work.key[1]: [8, 12]}


def test_equal_prompts_that_end_with_a_block_have_no_head_as_long_as_themselves() -> None:
    bench = Bench()
    bench.worker("w")
    prompts = [[*HEAD, 1, 2, 3, 4], [*HEAD, 1, 2, 3, 4], [*HEAD, 9]]
    bench.submit(*(work(ids) for ids in prompts))
    items = []
    while given := bench.give():
        items += [item for message in dispatch_messages(given) for item in message.dispatch.items]
        for attempt in given:
            bench.computed(attempt)
    assert len(items) == len(prompts)
    for item in items:
        assert all(0 < end < len(item.token_ids) // 4 for end in item.head_ends), list(item.head_ends)


def _report(bench: Bench) -> tuple[int, int]:
    account = bench.decision.end_job("j")
    assert account is not None
    report = account.report()
    return report.head_prefills, report.heads_held


def test_each_head_is_computed_once_at_each_worker_that_came_to_hold_it() -> None:
    bench = Bench()
    for at in range(3):
        bench.worker(f"w{at}", sequences=8, tokens=100_000)
    prompts = {
        f"g{group}-{at}": [*[group * 50 + step for step in range(8)], *([900 + group] * 4 * (at % 2)), 200 + at, 1]
        for group in range(6)
        for at in range(20)
    }
    bench.submit(*(work(prompt, request_id=name, max_tokens=8) for name, prompt in prompts.items()))
    Caches().run(bench, prompts)
    prefills, held = _report(bench)
    assert prefills == held >= 12, "six heads, and one within each"


def test_a_head_whose_leader_was_lost_counts_twice() -> None:
    bench = Bench()
    worker = bench.worker("w")
    bench.submit(*(work([*HEAD, 100 + n, 1, 2, 3]) for n in range(3)))
    (leader,) = bench.give()
    bench.decision.cancel([leader.entry.work.key])
    bench.finish(leader, reason=3)
    (second,) = bench.give()
    bench.computed(second)
    for attempt in [second, *bench.give()]:
        bench.finish(attempt, cached=8)
    assert worker.outstanding == {}
    assert _report(bench) == (2, 1)
