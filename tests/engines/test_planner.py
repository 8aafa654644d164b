# SPDX-License-Identifier: Apache-2.0
"""The planner: its sum is the model's, slots and fraction follow from it, and what does not fit says why."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest

from engines import card_tier, planner
from engines.card_tier import CardSet, CardTier
from engines.model_config import ModelConfig
from services.common.errors import FailedPreconditionError
from tests.engines.models import DENSE_7B, GROUPED_8B, GROUPED_70B, SMALL, make_weights

GIB = 1 << 30
ONE = CardSet("card", "9.0", 100_000, 1_000, 1, 1, 1)
LONGER = dataclasses.replace(DENSE_7B, trained_tokens=8192)


def with_limits(tier: CardTier, **changes: Any) -> CardTier:
    return dataclasses.replace(tier, limits=dataclasses.replace(tier.limits, **changes))


def test_weights_are_counted_to_the_byte_of_a_real_checkpoint() -> None:
    weights = make_weights(SMALL, ml_dtypes.bfloat16)
    small = ModelConfig(SMALL, True, 8192, (2,))
    assert planner.weights_bytes(small, "bfloat16", ONE, head=False) == sum(array.nbytes for array in weights.values())
    matrices = sum(array.size for name, array in weights.items() if "proj" in name)
    halved = planner.weights_bytes(small, "fp8", ONE, head=False)
    assert planner.weights_bytes(small, "bfloat16", ONE, head=False) - halved == matrices


@pytest.mark.parametrize(
    ("model", "billions"), [(DENSE_7B, 6.74), (GROUPED_8B, 8.03), (GROUPED_70B, 70.6)], ids=["7b", "8b", "70b"]
)
def test_models_have_as_many_weights_as_their_names_say(model: ModelConfig, billions: float) -> None:
    parameters = planner.weights_bytes(model, "bfloat16", ONE, head=True) / 2
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("weights", "plan_gb"), [("bfloat16", 1.9), ("fp8", 1.07)])
def test_a_compiled_plan_is_as_large_as_the_planner_says(weights: str, plan_gb: float) -> None:
    """The plans of four such layers that TensorRT 10.6 compiled on an H200 (docs/engines.md)."""
    four = dataclasses.replace(DENSE_7B, shape=dataclasses.replace(DENSE_7B.shape, layers=4))
    said = planner.weights_bytes(four, weights, ONE, head=False) / 1e9
    assert said == pytest.approx(plan_gb, rel=0.05)


def test_two_cards_halve_what_can_be_cut() -> None:
    pair = CardSet("card", "12.0", 100_000, 1_000, 2, 2, 1)
    one, two = (planner.weights_bytes(GROUPED_8B, "fp8", cards, head=True) for cards in (ONE, pair))
    embedding = GROUPED_8B.shape.vocab_size * GROUPED_8B.shape.hidden_size * 2
    norms = (2 * 32 + 1) * 4096 * 2
    assert two - embedding - norms == pytest.approx((one - embedding - norms) / 2, rel=1e-6)
    assert planner.cache_token_bytes(GROUPED_8B.shape, "fp8", pair) * 2 == 2 * 32 * 8 * 128


@pytest.mark.parametrize("name", [name for name in card_tier.names() if not name.endswith("-mining")])
@pytest.mark.parametrize("model", [LONGER, GROUPED_8B], ids=["7b", "8b"])
def test_slots_are_the_most_that_fit_and_the_fraction_gives_them_their_cache(model: ModelConfig, name: str) -> None:
    tier = card_tier.load(name)
    made = planner.plan(tier, model)
    limits, card = tier.generation, tier.card.memory_mib << 20
    assert made.memory.total <= card
    assert made.slots <= min(limits.slots_max, limits.step_token_budget)
    assert made.cache_fraction is not None
    found_free = card - (made.memory.total - made.memory.cache)
    pool_tokens = made.cache_fraction * found_free / made.cache_token_bytes
    blocks = -(-made.max_sequence_tokens // limits.kv_block_tokens)
    assert pool_tokens >= made.slots * blocks * limits.kv_block_tokens
    assert made.cache_fraction <= 0.951
    if made.slots < limits.slots_max:
        one_more = blocks * limits.kv_block_tokens * made.cache_token_bytes + model.shape.vocab_size * 4 * 3
        assert made.memory.cache + one_more > 0.95 * (found_free - model.shape.vocab_size * 4 * 3)


def test_a_mining_engine_runs_on_one_card_and_has_no_cache() -> None:
    made = planner.plan(card_tier.load("blackwell-32gb-pair-mining"), GROUPED_8B)
    assert (made.cards.count, made.cards.tensor_parallel) == (1, 1)
    assert (made.memory.cache, made.memory.logits, made.cache_fraction) == (0, 0, None)
    assert (made.max_sequence_tokens, made.max_output_tokens) == (128, 0)
    assert made.slots <= 8192


def test_what_does_not_fit_is_refused_with_its_sum() -> None:
    with pytest.raises(FailedPreconditionError) as raised:
        planner.plan(card_tier.load("ada-24gb-generate"), GROUPED_70B)
    said = raised.value.message
    assert said.startswith("tier ada-24gb-generate does not fit this model: with the cache of one sequence of 1152 ")
    parts = {name: float(size) for name, size in re.findall(r"(\w+) ([\d.]+) GiB", said)}
    named = ("weights", "activations", "logits", "cache", "reserved")
    total = float(re.findall(r"= ([\d.]+) GiB", said)[0])
    assert total == pytest.approx(sum(parts[name] for name in named), abs=0.03)
    assert parts["has"] == 23.99
    with pytest.raises(FailedPreconditionError, match="does not fit this model: with launches of 8192 tokens"):
        planner.plan(card_tier.load("blackwell-32gb-mining"), GROUPED_70B)


def test_what_the_model_cannot_do_is_refused() -> None:
    long = card_tier.load("hopper-80gb-long")
    short = dataclasses.replace(DENSE_7B, trained_tokens=4095)
    with pytest.raises(FailedPreconditionError, match="sequences of 4096 tokens, and the model was trained on 4095"):
        planner.plan(long, short)
    odd = dataclasses.replace(GROUPED_8B, shape=dataclasses.replace(GROUPED_8B.shape, intermediate_size=14337))
    with pytest.raises(FailedPreconditionError, match="cuts matrices in 2, which 32 heads or 14337 inner values"):
        planner.plan(card_tier.load("blackwell-32gb-pair-generate"), odd)


def test_each_part_grows_with_what_takes_it() -> None:
    tier = card_tier.load("hopper-80gb-generate")
    before = planner.plan(tier, GROUPED_8B)
    budget = planner.plan(with_limits(tier, step_token_budget=16384), GROUPED_8B)
    assert budget.memory.activations == 2 * before.memory.activations
    assert budget.slots < before.slots, "a larger budget takes room from the cache"
    longer = planner.plan(with_limits(tier, max_output_tokens=1024), GROUPED_8B)
    assert longer.slots * 2048 == pytest.approx(before.slots * 1152, rel=0.05)
    few = planner.plan(with_limits(tier, slots_max=8), GROUPED_8B)
    assert few.slots == 8
    assert few.cache_fraction is not None
    assert few.cache_fraction < 0.1, "memory that no slot needs is left to others"


def test_the_table_of_the_documentation_is_what_the_planner_says() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == [name for name in card_tier.names() if not name.endswith("-mining")]
    for name, seven, eight in rows:
        slots = [planner.plan(card_tier.load(name), model).slots for model in (LONGER, GROUPED_8B)]
        assert [int(seven.replace(",", "")), int(eight.replace(",", ""))] == slots, name
