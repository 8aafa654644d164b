# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.credit import NOTHING, Amount, Capacity, CreditBook, reuse

GENERATING = Capacity(
    slots=16,
    max_input_tokens=1024,
    max_sequence_tokens=1280,
    max_output_tokens=256,
    samples_max=1,
    step_token_budget=512,
    pool_tokens=None,
    payload_bytes=0,
)
MINING = replace(
    GENERATING, max_input_tokens=128, max_sequence_tokens=128, max_output_tokens=0, payload_bytes=8192, slots=64
)


def test_a_lone_broker_gets_the_batcher_and_a_look_ahead() -> None:
    credit = GENERATING.credit(shares=1, reuse=1.0)
    assert credit.sequences == 16 + 8
    assert credit.tokens == 24 * 1280
    assert credit.payload_bytes == 0


def test_an_engine_that_only_computes_prompts_has_a_whole_batch_ahead() -> None:
    credit = MINING.credit(shares=1, reuse=1.0)
    assert credit.sequences == 128
    assert credit.payload_bytes == 128 * 8192


def test_tokens_are_bounded_by_the_pool_and_grow_with_measured_reuse() -> None:
    small_pool = replace(GENERATING, pool_tokens=4096)
    alone, shared = small_pool.credit(shares=1, reuse=1.0), small_pool.credit(shares=1, reuse=3.0)
    assert alone.tokens == int(4096 * 1.5) + 512
    assert shared.tokens == int(4096 * 3 * 1.5) + 512
    assert small_pool.credit(shares=1, reuse=64.0).tokens == 24 * 1280


def test_every_broker_may_send_the_largest_item() -> None:
    wide = replace(GENERATING, samples_max=8)
    crowded = wide.credit(shares=1000, reuse=1.0)
    assert crowded == Amount(1024 + 8 * 256, 8, 0)


@pytest.mark.parametrize(
    ("computed", "cached", "expected"), [(0, 0, 1.0), (100, 0, 1.0), (100, 300, 4.0), (1, 10**6, 64)]
)
def test_reuse_is_logical_over_computed(computed: int, cached: int, expected: float) -> None:
    assert reuse(computed, cached) == expected


def test_an_item_beyond_every_grant_is_not_taken_and_one_within_is() -> None:
    book = CreditBook(GENERATING)
    account = book.open()
    one = Amount(100, 1, 0)
    for _ in range(24):
        assert account.take(one)
    assert not account.take(one)
    account.give_back(one)
    assert account.take(one)


def test_a_shrunken_grant_refuses_nothing_that_an_earlier_one_allowed() -> None:
    book = CreditBook(GENERATING)
    first = book.open()
    for _ in range(12):
        assert first.take(Amount(100, 1, 0))
    second = book.open()
    assert second.take(Amount(100, 1, 0))
    assert first.grant(book.due(first))
    assert first.granted.sequences == 12
    for _ in range(12):
        assert first.take(Amount(100, 1, 0))


def test_brokers_without_work_take_nothing_from_those_with_work() -> None:
    book = CreditBook(GENERATING)
    busy, idle = book.open(), book.open()
    assert busy.take(Amount(100, 1, 0))
    assert book.due(busy).sequences == 24
    assert book.due(idle).sequences == 12
    assert idle.take(Amount(100, 1, 0))
    assert book.due(busy).sequences == 12
    book.close(idle)
    assert book.due(busy).sequences == 24


def test_what_is_given_back_leaves_nothing_outstanding() -> None:
    account = CreditBook(MINING).open()
    costs = [Amount(128, 1, 8192), Amount(5, 2, 0), Amount(64, 1, 8192)]
    for cost in costs:
        assert account.take(cost)
    for cost in costs:
        account.give_back(cost)
    assert account.outstanding == NOTHING
