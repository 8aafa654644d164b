# SPDX-License-Identifier: Apache-2.0
"""What an engine of a tier takes of a card's memory, and what that leaves: slots and the cache's share.

Memory of one card, in bytes, of the card that carries most where several share an engine:

    weights       every matrix in the tier's format, cut by tensor parallelism; embedding, output head and norms in 16
                  bits, since quantisation leaves them alone; the embedding whole on every card
    activations   step token budget x what one token holds at the widest moment of a layer
    logits        slots x vocabulary x 4 bytes x 3: the engine's output, the decoder's copy, its probabilities
    cache         (slots x blocks of the longest sequence + resident heads x blocks of the longest prompt) x a block
    reserved      what the tier sets aside

Slots are the most that fit; the cache's fraction is the cache over what is left once everything else is there, which is
what the vendor's runtime takes it of. A tier that has no room for one slot is refused with this sum. Context, kernels
and the builder's choice of scratch memory cannot be counted before there is an engine: `docs/engines.md` has what was
predicted and what a card showed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engines.card_tier import GenerationLimits, MiningLimits
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from engines.card_tier import CardSet, CardTier
    from engines.model_config import ModelConfig, ModelShape

MIB: Final = 1 << 20
_FORMAT_BYTES: Final = {"fp8": 1, "bfloat16": 2}
_WIDE: Final = 2
"""Bytes a value of activations and of what is not quantised."""
_LOGIT_COPIES: Final = 3
_FRACTION_STEPS: Final = 1000
_CACHE_PERCENT_MAX: Final = 95
"""Of what is left for the cache it takes at most this much: what is allocated later finds room, too."""
_ROW_SLOTS: Final = 16
"""Prompts a row of a mining engine may have waiting: prompts of 8 tokens still fill a launch."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What lies in the memory of the card that carries most, in bytes."""

    weights: int
    activations: int
    logits: int
    cache: int
    reserved: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations + self.logits + self.cache + self.reserved

    def __str__(self) -> str:
        """The sum, written out."""
        parts = (
            ("weights", self.weights),
            ("activations", self.activations),
            ("logits", self.logits),
            ("cache", self.cache),
            ("reserved", self.reserved),
        )
        return " + ".join(f"{name} {_gib(size)}" for name, size in parts) + f" = {_gib(self.total)}"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine that fits."""

    tier: CardTier
    model: ModelConfig
    slots: int
    """Derived: the most that fit, within the tier's bound."""
    max_sequence_tokens: int
    max_output_tokens: int
    cache_fraction: float | None
    """Derived: of what the runtime finds free after loading; None without a cache."""
    cache_token_bytes: int
    """Of one token on one card; 0 without a cache."""
    memory: Memory

    @property
    def cards(self) -> CardSet:
        """The cards of one engine: a mining engine takes one, however many there are."""
        return engine_cards(self.tier)


def plan(tier: CardTier, model: ModelConfig, *, own_kernels: bool = False) -> EnginePlan:
    """Plans an engine.

    Args:
        tier: What it shall hold.
        model: Of what.
        own_kernels: Whether attention, norms and gated units of a mining plan are kernels of our own, which hold less.

    Raises:
        FailedPreconditionError: The tier does not fit the model: the sum is in the message.
    """
    if isinstance(tier.limits, MiningLimits):
        return _plan_mining(tier, model, tier.limits, own_kernels=own_kernels)
    return _plan_generation(tier, model, tier.limits)


def engine_cards(tier: CardTier) -> CardSet:
    """The cards of one engine of a tier: our own network is not cut, so that mining engines run on one card each."""
    card = tier.card
    if isinstance(tier.limits, GenerationLimits):
        return card
    return dataclasses.replace(card, count=1, tensor_parallel=1, pipeline_parallel=1)


def weights_bytes(model: ModelConfig, weights: str, cards: CardSet, *, head: bool) -> int:
    """Weights on the card that carries most.

    Args:
        model: The model.
        weights: Format of the matrices, `fp8` or `bfloat16`.
        cards: The card set.
        head: Whether there is an output head.
    """
    shape, parallel = model.shape, cards.tensor_parallel
    layers = math.ceil(shape.layers / cards.pipeline_parallel)
    width, kv_width = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    matrices = shape.hidden_size * (2 * width + 2 * kv_width + 3 * shape.intermediate_size)
    norms = 2 * shape.hidden_size * _WIDE
    layer = math.ceil(matrices / parallel) * _FORMAT_BYTES[weights] + norms
    embedding = shape.vocab_size * shape.hidden_size * _WIDE
    output = math.ceil(embedding / parallel) if head else 0
    ends = embedding + output if cards.pipeline_parallel == 1 else max(embedding, output)
    return layers * layer + ends + shape.hidden_size * _WIDE


def activation_token_bytes(
    shape: ModelShape, weights: str, cards: CardSet, *, row_tokens: int | None, own_kernels: bool = False
) -> int:
    """What one token of a step holds at the widest moment of a layer, in bytes.

    The residual stream and the normed input live through a layer. In the gated unit both products and what comes of
    them live at once; in attention the projections and the attended values. A mining plan (`row_tokens` given) also has
    rotated float32 forms and the scores twice where its attention is recorded, and its builder does not give one half
    of a layer the memory of the other: a plan for an H200 kept 149,248 bytes in FP8 and 164,352 in bfloat16 with
    attention of our own (docs/gpu-truth.md), where this gives 157,440 and 172,544; recorded in bfloat16 it kept
    222,720. Where norms and gated units are kernels of our own as well (`own_kernels`), what is wide lives in one half
    only, and the normed input is nothing but the kernel's result: the same plan in FP8 kept 67,328, which this gives.
    """
    parallel = cards.tensor_parallel
    width, kv_width = (math.ceil(n * shape.head_size / parallel) for n in (shape.heads, shape.kv_heads))
    inner = math.ceil(shape.intermediate_size / parallel)
    narrow = _FORMAT_BYTES[weights]
    stream = shape.hidden_size * (_WIDE + _WIDE + narrow)
    gated = inner * (2 * _WIDE + narrow)
    attention = (width + 2 * kv_width) * _WIDE + width * _WIDE
    if row_tokens is not None and own_kernels:
        return shape.hidden_size * (_WIDE + narrow) + max(gated, attention)
    if row_tokens is not None:
        attention += (width + kv_width) * 4 + 2 * math.ceil(shape.heads / parallel) * row_tokens * _WIDE
        return stream + gated + attention
    return stream + max(gated, attention)


def cache_token_bytes(shape: ModelShape, cache: str, cards: CardSet) -> int:
    """Keys and values of one token on one card, in bytes."""
    layers = math.ceil(shape.layers / cards.pipeline_parallel)
    heads = math.ceil(shape.kv_heads / cards.tensor_parallel)
    return 2 * layers * heads * shape.head_size * _FORMAT_BYTES[cache]


def _plan_generation(tier: CardTier, model: ModelConfig, limits: GenerationLimits) -> EnginePlan:
    cards, shape = tier.card, model.shape
    sequence = limits.max_input_tokens + limits.max_output_tokens
    if sequence > model.trained_tokens:
        raise FailedPreconditionError(
            f"tier {tier.name} holds sequences of {sequence} tokens, and the model was trained on "
            f"{model.trained_tokens}"
        )
    if shape.heads % cards.tensor_parallel or shape.intermediate_size % cards.tensor_parallel:
        raise FailedPreconditionError(
            f"tier {tier.name} cuts matrices in {cards.tensor_parallel}, which {shape.heads} heads or "
            f"{shape.intermediate_size} inner values do not allow"
        )
    token = cache_token_bytes(shape, limits.cache, cards)
    slot_cache = _in_blocks(sequence, limits.kv_block_tokens) * token
    heads_cache = limits.resident_heads * _in_blocks(limits.max_input_tokens, limits.kv_block_tokens) * token
    slot_logits = shape.vocab_size * 4 * _LOGIT_COPIES
    weights = weights_bytes(model, limits.weights, cards, head=True)
    activations = limits.step_token_budget * activation_token_bytes(shape, limits.weights, cards, row_tokens=None)
    reserved = cards.reserved_mib * MIB
    left = cards.memory_mib * MIB - weights - activations - reserved
    room = left * _CACHE_PERCENT_MAX // 100 - heads_cache
    most = max(room, 0) // (slot_cache + slot_logits * _CACHE_PERCENT_MAX // 100)
    slots = min(most, limits.slots_max, limits.step_token_budget)
    counted = max(slots, 1)
    cache = counted * slot_cache + heads_cache
    memory = Memory(weights, activations, counted * slot_logits, cache, reserved)
    if slots < 1:
        raise _refusal(tier, memory, f"the cache of one sequence of {sequence} tokens")
    fraction = math.ceil(cache / (left - memory.logits) * _FRACTION_STEPS) / _FRACTION_STEPS
    return EnginePlan(tier, model, slots, sequence, limits.max_output_tokens, fraction, token, memory)


def _plan_mining(tier: CardTier, model: ModelConfig, limits: MiningLimits, *, own_kernels: bool) -> EnginePlan:
    cards = engine_cards(tier)
    token = activation_token_bytes(
        model.shape, limits.weights, cards, row_tokens=limits.row_tokens, own_kernels=own_kernels
    )
    memory = Memory(
        weights=weights_bytes(model, limits.weights, cards, head=False),
        activations=limits.step_token_budget * token,
        logits=0,
        cache=0,
        reserved=cards.reserved_mib * MIB,
    )
    if memory.total > cards.memory_mib * MIB:
        raise _refusal(tier, memory, f"launches of {limits.step_token_budget} tokens")
    slots = min(limits.step_token_budget, limits.step_token_budget // limits.row_tokens * _ROW_SLOTS)
    return EnginePlan(tier, model, slots, limits.row_tokens, 0, None, 0, memory)


def _refusal(tier: CardTier, memory: Memory, for_what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"tier {tier.name} does not fit this model: with {for_what}, {memory}, and each card has "
        f"{_gib(tier.card.memory_mib * MIB)}, and the cache may take {_CACHE_PERCENT_MAX} % of what the rest leaves"
    )


def _in_blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
