# SPDX-License-Identifier: Apache-2.0
"""The bound of a job is the sum of what its groups add, wherever they are cut and whoever runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ifabric.broker.v1 import broker_service_pb2
from services.broker.jobs.bound import Prompt, group_bound
from services.broker.journal.order import KEY_TOKENS, GroupRule, Key, groups, sort_key
from services.broker.journal.values import Batch, Bound
from tests.jobs.made import TENANT, sealed
from tests.jobs.proof import least

if TYPE_CHECKING:
    import random

    from services.broker.journal import Journal

BLOCK = 4
RULE = GroupRule(shared_bytes=8, rows_min=2, rows_max=3, bytes_max=200)
rows = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 1)), max_size=30)
"""Prompts of two letters, with one of two salts."""


def in_groups(prompts: list[list[int]], salts: list[int], *, text: bool) -> list[tuple[Bound, int]]:
    """What each group of the journal's order adds, and how many rows it has."""
    wire = broker_service_pb2.Prompt
    sent = [
        wire(text="".join(map(chr, ids))) if text else wire(packed_token_ids=np.array(ids, "<i4").tobytes())
        for ids in prompts
    ]
    keys = sorted((Key(row, 10, sort_key(prompt)) for row, prompt in enumerate(sent)), key=lambda key: key.sort_key)
    return [
        (
            group_bound(
                [Prompt(np.array(prompts[row], np.int32), salts[row]) for row in rows], BLOCK, group.reach, text=text
            ),
            len(rows),
        )
        for group, rows in groups(iter(keys), RULE)
    ]


def total(bounds: list[Bound]) -> int:
    """As the journal adds them up."""
    seen: set[int] = set()
    tokens = 0
    for bound in bounds:
        blocks, ends = set(bound.blocks) - seen, set(bound.ends) - seen
        tokens += bound.tokens + bound.block_tokens * len(blocks) - len(ends)
        seen |= blocks | ends
    return tokens


@given(rows, st.booleans(), st.randoms(use_true_random=False))
def test_groups_add_up_to_the_bound_in_any_order(
    drawn: list[tuple[list[int], int]], text: bool, chance: random.Random
) -> None:
    prompts, salts = [[97 + letter for letter in ids] for ids, _ in drawn], [salt for _, salt in drawn]
    bounds = [bound for bound, _ in in_groups(prompts, salts, text=text)]
    chance.shuffle(bounds)
    expected = sum(
        least([ids for ids, of in zip(prompts, salts, strict=True) if of == salt], BLOCK) for salt in set(salts)
    )
    assert total(bounds) == expected


def test_heads_beyond_the_end_of_keys_are_counted_once() -> None:
    head = list(range(KEY_TOKENS + 2 * BLOCK))
    prompts = [[*head, number] for number in range(10)]
    found = in_groups(prompts, [0] * 10, text=False)
    assert len(found) > 3
    assert total([bound for bound, _ in found]) == len(head) + 10


def test_blocks_that_no_other_group_can_have_are_counted_on_the_spot() -> None:
    prompts = [[number, *range(11)] for number in range(9)]
    found = in_groups(prompts, [0] * 9, text=False)
    assert [(bound.blocks, bound.ends, bound.tokens) for bound, _ in found] == [
        ((), (), 12 * rows) for _, rows in found
    ]


def test_without_a_cache_every_token_counts() -> None:
    prompt = Prompt(np.arange(10, dtype=np.int32), 0)
    assert group_bound([prompt, prompt], 0, None, text=False) == Bound(20, 0, (), ())


async def test_the_journal_counts_a_group_once_and_a_chain_once(journal: Journal) -> None:
    job = await sealed(journal, 64)
    await journal.enter("a", 30.0)
    groups_ = await journal.claim("a", job.number, 3, ())
    assert not any(group.counted for group in groups_)
    first = Bound(100, BLOCK, (-5, 7), (11,))
    for _ in range(2):
        await journal.record("a", [Batch(job.number, (), bounds=((groups_[0].number, first),))])
    assert (await journal.job(TENANT, "job")).bound_tokens == 100 + 2 * BLOCK - 1
    second = Bound(10, BLOCK, (-5, 8), (11,))
    await journal.record("a", [Batch(job.number, (), bounds=((groups_[1].number, second),))])
    assert (await journal.job(TENANT, "job")).bound_tokens == 100 + 2 * BLOCK - 1 + 10 + BLOCK
    again = await journal.claim("a", job.number, 0, ())
    assert [group.counted for group in again] == [True, True, False]
    await journal.cancel(TENANT, "job", why="enough", code=1)
    assert await journal.stale_chains() == [job.number]
    await journal.drop_chains(job.number)
    assert await journal.stale_chains() == []
