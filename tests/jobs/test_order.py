# SPDX-License-Identifier: Apache-2.0
"""Sort keys, and where an order is cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ifabric.broker.v1 import broker_service_pb2
from services.broker.journal.order import KEY_BYTES, GroupRule, Key, groups, sort_key

RULE = GroupRule(shared_bytes=4, rows_min=3, rows_max=8, bytes_max=100)
keys = st.lists(st.tuples(st.binary(max_size=8).map(lambda data: bytes(b % 3 for b in data)), st.integers(0, 40)))


def in_order(drawn: list[tuple[bytes, int]]) -> list[Key]:
    return [Key(row, size, key) for row, (key, size) in enumerate(sorted(drawn))]


@given(keys)
def test_every_row_is_in_one_group_in_order_and_groups_are_bounded(drawn: list[tuple[bytes, int]]) -> None:
    rows = in_order(drawn)
    made = list(groups(iter(rows), RULE))
    assert [row for _, part in made for row in part] == [key.row for key in rows]
    place = 0
    for number, (group, part) in enumerate(made):
        assert (group.number, group.first, group.last) == (number, place, place + len(part) - 1)
        place += len(part)
        assert 1 <= len(part) <= RULE.rows_max
        assert len(part) == 1 or sum(rows[row].size for row in part) <= RULE.bytes_max


@given(keys)
def test_a_group_ends_between_heads_or_at_the_shallowest_node(drawn: list[tuple[bytes, int]]) -> None:
    rows = in_order([(key, 1) for key, _ in drawn])
    for group, part in list(groups(iter(rows), RULE))[:-1]:
        shared = [shared_bytes(rows[at - 1], rows[at]) for at in range(group.first + 1, group.last + 2)]
        assert shared[-1] < RULE.shared_bytes or shared[-1] <= min(shared) or len(part) == RULE.rows_max


def shared_bytes(left: Key, right: Key) -> int:
    pairs = zip(left.sort_key, right.sort_key, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left.sort_key), len(right.sort_key)))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), min_size=2, max_size=8))
def test_ids_sort_as_ids_in_either_form(prompts: list[list[int]]) -> None:
    packed = [broker_service_pb2.Prompt(packed_token_ids=np.array(ids, "<i4").tobytes()) for ids in prompts]
    listed = [broker_service_pb2.Prompt(tokens=broker_service_pb2.TokenIds(ids=ids)) for ids in prompts]
    assert [sort_key(prompt) for prompt in packed] == [sort_key(prompt) for prompt in listed]
    assert sorted(prompts) == [ids for _, ids in sorted(zip(map(sort_key, packed), prompts, strict=True))]


def test_keys_are_cut_and_malformed_prompts_have_one() -> None:
    long = broker_service_pb2.Prompt(text="ä" * 100_000)
    assert len(sort_key(long)) == KEY_BYTES + 1
    assert sort_key(broker_service_pb2.Prompt(packed_token_ids=b"abcde"))
    assert sort_key(broker_service_pb2.Prompt())
