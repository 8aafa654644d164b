# SPDX-License-Identifier: Apache-2.0
"""What shared heads are worth, against a model that compares all prompts with all others; and what is made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.broker.jobs.bound import Prompt, group_bound
from services.broker.operating import EnginePace
from services.broker.operators import analysis
from services.broker.operators.analysis import Analysis, Group, Worth
from services.broker.operators.prediction import Seat, predict
from services.common.errors import ResourceExhaustedError

BLOCK = 4
prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=18), st.integers(0, 1)), min_size=0, max_size=12
)


def worth_of(rows: list[tuple[list[int], int]], block: int = BLOCK) -> Worth:
    made = Analysis(block)
    for number, (ids, salt) in enumerate(rows):
        made.add(f"r{number}", np.array(ids, np.int32), salt, 3)
    return made.worth()


@given(prompts, st.sampled_from([0, 1, BLOCK]))
def test_the_bound_is_the_one_of_jobs(rows: list[tuple[list[int], int]], block: int) -> None:
    worth = worth_of(rows, block)
    one = group_bound([Prompt(np.array(ids, np.int32), salt) for ids, salt in rows], block, None, text=False)
    # All of it is one group, so that every block and every end that the journal would compare counts.
    assert worth.bound_tokens == one.tokens + one.block_tokens * len(one.blocks) - len(one.ends)
    assert worth.logical_tokens == sum(len(ids) for ids, _ in rows)
    assert (worth.rows, worth.generated_tokens_max) == (len(rows), 3 * len(rows))


@given(prompts)
def test_heads_save_what_sharing_them_saves(rows: list[tuple[list[int], int]]) -> None:
    worth = worth_of(rows)
    sharers: dict[tuple[int, tuple[int, ...]], int] = {}
    for ids, salt in rows:
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            begin = salt, tuple(ids[:end])
            sharers[begin] = sharers.get(begin, 0) + 1
    saved = sum(BLOCK * (count - 1) for count in sharers.values())
    if len(worth.heads) < analysis.HEADS_TOLD:
        assert sum(head.saved_tokens for head in worth.heads) == saved
    for head in worth.heads:
        ids, salt = rows[int(head.row_id[1:])]
        assert sharers[salt, tuple(ids[: head.tokens])] == head.rows > 1
        longer = salt, tuple(ids[: head.tokens + BLOCK])
        assert len(longer[1]) < head.tokens + BLOCK or sharers[longer] < head.rows, "the head goes on"
    assert [head.saved_tokens for head in worth.heads] == sorted((h.saved_tokens for h in worth.heads), reverse=True)


def test_groups_are_rows_below_one_first_block() -> None:
    shared, other = [7] * 8, [9] * 8
    worth = worth_of([([*shared, 1], 0), ([*shared, 2], 0), ([*shared, 3], 0), ([*other, 1], 0), ([5], 0), ([6], 0)])
    assert sorted(worth.groups) == [Group(1, 3, 0), Group(1, 3, 0), Group(9, 3, 0), Group(11, 9, 8)]


def test_more_blocks_than_are_kept_is_refused() -> None:
    made = Analysis(BLOCK, blocks_max=3)
    made.add("a", np.arange(12, dtype=np.int32), 0, 1)
    with pytest.raises(ResourceExhaustedError, match="more than 3 blocks of 4 tokens"):
        made.add("b", np.arange(4, dtype=np.int32), 0, 1)


PACE = EnginePace(step_us=1000.0, prompt_token_us=10.0, generated_token_us=50.0)


def worth(*groups: Group) -> Worth:
    computed = sum(group.computed_tokens for group in groups)
    return Worth(1000, 10 * computed, computed, sum(group.generated_tokens for group in groups), (), groups)


def test_one_node_computes_every_head_once() -> None:
    made = predict(worth(Group(5000, 0, 400)), [Seat(PACE, 10, 1000)], output_share=None, decode_weight=2.0)
    assert (made.computed_tokens, made.cut_tokens, made.generated_tokens) == (5000, 0, 0)
    assert made.wall_s == pytest.approx((5 * 1000 + 5000 * 10) / 1e6), "five steps of a whole budget"


def test_a_group_larger_than_its_share_is_cut_and_its_head_paid_again() -> None:
    seats = [Seat(PACE, 10, 1000)] * 4
    whole = predict(worth(*[Group(1000, 0, 400)] * 40), seats, output_share=None, decode_weight=2.0)
    assert whole.cut_tokens == 0
    cut = predict(worth(Group(40_000, 0, 400)), seats, output_share=None, decode_weight=2.0)
    assert cut.cut_tokens == 3 * 400
    assert cut.computed_tokens == 40_000 + cut.cut_tokens


def test_time_follows_slots_nodes_and_the_share_that_is_generated() -> None:
    rows = worth(*[Group(10, 100, 0)] * 100)
    one = predict(rows, [Seat(PACE, 10, 1000)], output_share=None, decode_weight=2.0)
    # 10,000 tokens, ten at a time.
    assert one.wall_s == pytest.approx((1000 * 1000 + 1000 * 10 + 10_000 * 50) / 1e6)
    two = predict(rows, [Seat(PACE, 10, 1000)] * 2, output_share=None, decode_weight=2.0)
    assert one.wall_s is not None
    assert two.wall_s == pytest.approx(one.wall_s / 2)
    half = predict(rows, [Seat(PACE, 10, 1000)], output_share=0.5, decode_weight=2.0)
    assert half.generated_tokens == 5000
    stranger = predict(rows, [Seat(PACE, 10, 1000), Seat(None, 10, 1000)], output_share=None, decode_weight=2.0)
    assert stranger.wall_s == two.wall_s, "who is unknown counts as fast as the others"
    assert predict(rows, [Seat(None, 10, 1000)], output_share=None, decode_weight=2.0).wall_s is None
