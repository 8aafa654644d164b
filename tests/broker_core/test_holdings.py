# SPDX-License-Identifier: Apache-2.0
"""What workers are believed to hold: bounded, ageing by their own counts, corrected when it was wrong."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.broker.core.holdings import Holdings
from services.broker.core.workers import Amount, Worker
from tests.broker_core.made import BLOCK, DIGEST, Bench, facts, work

_BLOCKS = {DIGEST: BLOCK}
_HERE = frozenset({DIGEST})


def _worker(name: str, *, pool_tokens: int = 1000) -> Worker:
    return Worker(name, facts(), pool_tokens=pool_tokens, credit=Amount(1, 1, 1), now=0.0)


def _raw(prompt: list[int]) -> bytes:
    return np.array(prompt, "<i4").tobytes()


def _held(holdings: Holdings, prompt: list[int], salt: int = 0) -> dict[str, int]:
    hints = holdings.find(_HERE, salt, _raw(prompt), _BLOCKS)
    return {hint.worker_id.split("#")[0]: hint.tokens for hint in hints}


def test_the_longest_held_beginning_is_found() -> None:
    holdings, left, right = Holdings(1 << 20), _worker("left"), _worker("right")
    holdings.note(left, 0, _raw([1] * 12 + [9]))
    holdings.note(right, 0, _raw([1] * 8 + [2] * 8))
    assert _held(holdings, [1] * 20) == {"left": 12, "right": 8}
    assert _held(holdings, [1] * 8 + [2] * 9) == {"left": 8, "right": 16}
    assert _held(holdings, [1] * 5) == {"left": 4, "right": 4}
    assert _held(holdings, [3] * 20) == {}
    assert _held(holdings, [1] * 20, salt=7) == {}


def test_belief_ages_by_what_the_pool_took_in() -> None:
    holdings, worker = Holdings(1 << 20), _worker("w", pool_tokens=100)
    holdings.note(worker, 0, _raw([1] * 8))
    worker.clock += 100
    assert _held(holdings, [1] * 8) == {"w": 8}
    worker.clock += 1
    assert _held(holdings, [1] * 8) == {}
    holdings.note(worker, 0, _raw([1] * 8))
    assert _held(holdings, [1] * 8) == {"w": 8}


def test_belief_is_corrected() -> None:
    holdings, worker = Holdings(1 << 20), _worker("w")
    holdings.note(worker, 0, _raw([1] * 8))
    holdings.note(worker, 0, _raw([1] * 8 + [2] * 8))
    holdings.lost(worker, 0, _raw([1] * 8 + [2] * 8), 8)
    assert _held(holdings, [1] * 8 + [2] * 8) == {"w": 8}
    holdings.lost(worker, 0, _raw([1] * 8), 0)
    assert _held(holdings, [1] * 8) == {}


def test_a_worker_that_is_gone_holds_nothing() -> None:
    holdings, left, right = Holdings(1 << 20), _worker("left"), _worker("right")
    for worker in (left, right):
        holdings.note(worker, 0, _raw([1] * 8))
    holdings.forget(left)
    assert _held(holdings, [1] * 8) == {"right": 8}
    holdings.forget(right)
    assert holdings.bytes == 0


def test_memory_stays_within_its_bound_however_much_passes_through() -> None:
    holdings, worker = Holdings(60_000), _worker("w", pool_tokens=10**9)
    heights = []
    for at in range(3000):
        holdings.note(worker, 0, _raw([at, 1, 2, 3] * 8))
        heights.append(holdings.bytes)
    assert max(heights) <= 61_000
    assert _held(holdings, [2999, 1, 2, 3] * 8) == {"w": 32}, "what is new stays"
    assert _held(holdings, [0, 1, 2, 3] * 8) == {}, "what is old goes"


def test_what_has_aged_out_of_a_pool_does_not_stay_until_the_bound() -> None:
    holdings, worker = Holdings(1 << 30), _worker("w", pool_tokens=3200)
    heights = []
    for at in range(40_000):
        worker.clock += 32
        holdings.note(worker, 0, _raw([at, 1, 2, 3] * 8))
        heights.append(holdings.bytes)
    assert max(heights) < 5_000_000, "40,000 prompts, of which the pool keeps a hundred"
    assert _held(holdings, [39_901, 1, 2, 3] * 8) == {"w": 32}, "what the pool keeps stays"


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=25))
@settings(deadline=None)
def test_it_agrees_with_sets_of_beginnings(noted: list[tuple[int, list[int]]]) -> None:
    holdings, workers = Holdings(1 << 24), [_worker(f"w{at}") for at in range(3)]
    model: dict[str, set[tuple[int, ...]]] = {f"w{at}": set() for at in range(3)}
    for at, bits in noted:
        prompt = [bit for bit in bits for _ in range(BLOCK)]
        expected = {}
        for name, held in model.items():
            longest = max((n for n in range(len(bits) + 1) if tuple(bits[:n]) in held), default=0)
            if longest:
                expected[name] = longest * BLOCK
        assert _held(holdings, prompt) == expected
        holdings.note(workers[at], 0, _raw(prompt))
        model[f"w{at}"].update(tuple(bits[:n]) for n in range(1, len(bits) + 1))


def test_later_turns_go_where_the_earlier_ones_are() -> None:
    bench = Bench()
    for name in ("w1", "w2", "w3"):
        bench.worker(name)
    system = [3] * 8
    where: dict[int, str] = {}
    prompts = {talk: [*system, *[10 + talk] * 8] for talk in range(6)}
    for turn in range(3):
        for talk, prompt in prompts.items():
            bench.submit(work([*prompt, 7], job=""))
            (attempt,) = bench.give()
            if turn:
                assert attempt.worker.node_id == where[talk]
            where[talk] = attempt.worker.node_id
            held = bench.decision.scheduler.holdings
            bench.computed(attempt, attempt.head_tokens)
            bench.finish(attempt, cached=attempt.head_tokens)
            assert held.bytes > 0
            prompt += [100 * turn + talk] * 8


def test_a_holder_that_is_full_is_not_waited_for() -> None:
    bench = Bench()
    bench.worker("w1", sequences=1)
    bench.submit(work([3] * 9))
    (first,) = bench.give()
    bench.finish(first)
    bench.submit(work([8] * 9))
    assert len(bench.give()) == 1
    bench.worker("w2", sequences=4)
    bench.submit(work([3] * 9))
    (second,) = bench.give()
    assert second.worker.node_id == "w2"


def _with_held_heads(groups: int, head_tokens: int, *, sequences: int) -> tuple[Bench, Worker, dict[int, list[int]]]:
    """Two workers, the first of which holds the heads of earlier work."""
    bench = Bench()
    holder = bench.worker("holder", sequences=sequences)
    heads = {group: [100 + group] * head_tokens for group in range(groups)}
    for head in heads.values():
        bench.submit(work([*head, 1], job="earlier"))
        (attempt,) = bench.give()
        bench.finish(attempt)
    bench.worker("other", sequences=sequences)
    return bench, holder, heads


def _shares(bench: Bench, rounds: int = 1000) -> dict[str, int]:
    """Answers what is given, the oldest quarter at each worker a round, until nothing is in flight: rows by node."""
    shares: dict[str, int] = {}
    while len(bench.decision.requests):
        rounds -= 1
        assert rounds, "it does not come to an end"
        bench.give()
        for worker in list(bench.decision.scheduler.workers.values()):
            mine = list(worker.outstanding.values())
            for attempt in mine[: -(-len(mine) // 4)]:
                bench.computed(attempt, attempt.head_tokens)
                bench.finish(attempt, cached=attempt.head_tokens, generated=4)
                shares[worker.node_id] = shares.get(worker.node_id, 0) + 1
        bench.now += 0.1
    return shares


def test_who_holds_short_heads_does_not_do_the_whole_job_alone() -> None:
    """All of it is within the holder's credit, so that it could be sent there at once."""
    bench, _, heads = _with_held_heads(8, 2 * BLOCK, sequences=64)
    rows = [work([*head, *[500 + at] * 8]) for at in range(6) for head in heads.values()]
    bench.submit(*rows)
    shares = _shares(bench)
    assert min(shares["holder"], shares["other"]) >= 12


def test_whole_groups_that_a_full_worker_holds_go_to_one_that_has_nothing_to_do() -> None:
    bench, _, heads = _with_held_heads(8, 10 * BLOCK, sequences=6)
    bench.submit(
        *(work([*head, 500 + at, 7], request_id=f"{at}/{group}") for at in range(6) for group, head in heads.items())
    )
    shares = _shares(bench)
    assert min(shares["holder"], shares["other"]) >= 12
    assert sum(shares.values()) == 48
    owners: dict[str, set[str]] = {}
    for attempt in bench.sent[len(heads) :]:
        owners.setdefault(attempt.entry.work.key[1].split("/")[1], set()).add(attempt.worker.node_id)
    assert all(len(nodes) == 1 for nodes in owners.values()), "groups moved whole"


def test_a_cordon_does_not_make_the_broker_forget_what_a_node_holds() -> None:
    bench = Bench()
    holder = bench.worker("holder")
    head = [3] * (10 * BLOCK)
    bench.submit(work([*head, 1]), work([*head, 2]), work([*head, 3]))
    (leader,) = bench.give()
    bench.computed(leader)
    bench.decision.worker_cordoned(holder, True, bench.now)
    bench.finish(leader)
    assert not bench.give()
    bench.decision.worker_cordoned(holder, False, bench.now)
    assert [attempt.head_tokens for attempt in bench.give()] == [len(head), len(head)], "nobody leads anew"


def test_what_only_a_full_worker_can_take_waits_for_it() -> None:
    """Or it would go from the one to the other and back, and the broker would do nothing else."""
    bench = Bench()
    large = bench.worker("large", tokens=300)
    bench.worker("small", tokens=50)
    bench.submit(*(work([at] * 200) for at in range(3)))
    for _ in range(3):
        (attempt,) = bench.give()
        assert attempt.worker is large
        assert not bench.give()
        bench.finish(attempt)
