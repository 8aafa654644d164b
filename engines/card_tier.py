# SPDX-License-Identifier: Apache-2.0
"""Tiers of engines for cards: `engines/tiers/*.toml` but the embedded runtime's, one file a card set, read strictly.

A file has the card set and three kinds of work, each of which is a tier: `hopper-141gb` gives `hopper-141gb-generate`,
`hopper-141gb-long` and `hopper-141gb-mining`. What depends on the model as well, slots and the cache's share of the
memory, is in no file: `engines.planner` derives it.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from typing import Final

from engines import tables
from services.common.errors import FailedPreconditionError, NotFoundError

GENERATE: Final = "generate"
LONG: Final = "long"
MINING: Final = "mining"
WORKLOADS: Final = (GENERATE, LONG, MINING)
_FOLDER = "engines.tiers"
_EMBEDDED = "cpu-"
_MINING_FORMATS = ("fp8", "bfloat16")
_GENERATION_FORMATS = ("fp8",)
"""All tiers that generate come from one calibrated checkpoint."""


@dataclass(frozen=True, slots=True)
class CardSet:
    """The cards that one engine runs on."""

    family: str
    """As the contract's `card.family`: the product name that the driver gives, in lower case with hyphens."""
    compute_capability: str
    memory_mib: int
    """Of each card, as the driver reports it."""
    reserved_mib: int
    """Of each card, for what no plan can count: the driver's context, the kernels' code, fragments."""
    count: int
    tensor_parallel: int
    pipeline_parallel: int


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What an engine that generates is to take."""

    max_input_tokens: int
    max_output_tokens: int
    step_token_budget: int
    slots_max: int
    """More are not wanted, whatever the memory: the decoder's buffers grow with them."""
    kv_block_tokens: int
    resident_heads: int
    """Leading parts of prompts, of the longest input, for which the cache has room beside the slots."""
    weights: str
    cache: str
    longest_step_ms: int


@dataclass(frozen=True, slots=True)
class MiningLimits:
    """What an engine that returns hidden states is to take."""

    row_tokens: int
    """Tokens of one row; the longest prompt."""
    step_token_budget: int
    """Tokens of the largest launch: a whole number of rows."""
    weights: str
    longest_step_ms: int


@dataclass(frozen=True, slots=True)
class CardTiers:
    """One file: a card set and its tiers."""

    title: str
    card: CardSet
    generate: GenerationLimits
    long: GenerationLimits
    mining: MiningLimits


@dataclass(frozen=True, slots=True)
class CardTier:
    """One tier: a card set, and the work that an engine on it is built for."""

    name: str
    title: str
    card: CardSet
    limits: GenerationLimits | MiningLimits

    @property
    def generation(self) -> GenerationLimits:
        """The limits of a tier that generates.

        Raises:
            FailedPreconditionError: It is a mining tier.
        """
        if not isinstance(self.limits, GenerationLimits):
            raise FailedPreconditionError(f"tier {self.name} generates nothing")
        return self.limits

    @property
    def mining(self) -> MiningLimits:
        """The limits of a mining tier.

        Raises:
            FailedPreconditionError: It is a tier that generates.
        """
        if not isinstance(self.limits, MiningLimits):
            raise FailedPreconditionError(f"tier {self.name} is no mining tier")
        return self.limits


def card_sets() -> tuple[str, ...]:
    """Names of all files, in order."""
    found = (each.name for each in importlib.resources.files(_FOLDER).iterdir())
    return tuple(sorted(n.removesuffix(".toml") for n in found if n.endswith(".toml") and not n.startswith(_EMBEDDED)))


def names() -> tuple[str, ...]:
    """Names of all tiers for cards, in order."""
    return tuple(f"{card}-{work}" for card in card_sets() for work in WORKLOADS)


def load(name: str) -> CardTier:
    """Reads a tier.

    Raises:
        NotFoundError: There is no tier of that name.
        FailedPreconditionError: A field of its file is missing, unknown, mistyped or out of range: all are named.
    """
    if name.startswith(_EMBEDDED):
        raise NotFoundError(f"tier {name} is no card's: `ifab engine build` makes it without a plan")
    if name not in names():
        raise NotFoundError(f"there is no tier {name}; there are {', '.join(names())}")
    card, _, work = name.rpartition("-")
    return select(name, parse(card, (importlib.resources.files(_FOLDER) / f"{card}.toml").read_text()), work)


def select(name: str, tiers: CardTiers, work: str) -> CardTier:
    """One tier of a file."""
    return CardTier(name, tiers.title, tiers.card, getattr(tiers, work))


def parse(name: str, text: str) -> CardTiers:
    """Reads a file from its text.

    Raises:
        FailedPreconditionError: It is no TOML, or a field is missing, unknown, mistyped or out of range: all are named.
    """
    tiers = tables.parse(CardTiers, f"tiers of {name}", text)
    wrong = [*_card(tiers.card), *_generation("generate", tiers.generate), *_generation("long", tiers.long)]
    wrong += _mining(tiers.mining)
    if wrong:
        raise FailedPreconditionError(f"tiers of {name}: " + "; ".join(wrong))
    return tiers


def _card(card: CardSet) -> list[str]:
    wrong = _positive("card", card, ("memory_mib", "reserved_mib", "count", "tensor_parallel", "pipeline_parallel"))
    if card.count != card.tensor_parallel * card.pipeline_parallel:
        wrong.append(f"card.count is {card.count}, expected tensor_parallel times pipeline_parallel")
    if not wrong and card.reserved_mib >= card.memory_mib:
        wrong.append(f"card.reserved_mib is {card.reserved_mib}, expected less than memory_mib, {card.memory_mib}")
    return wrong


def _generation(at: str, limits: GenerationLimits) -> list[str]:
    numbers = ("max_input_tokens", "max_output_tokens", "step_token_budget", "slots_max", "longest_step_ms")
    wrong = _positive(at, limits, numbers)
    if limits.resident_heads < 0:
        wrong.append(f"{at}.resident_heads is {limits.resident_heads}, expected 0 or more")
    block = limits.kv_block_tokens
    if block < 1 or block & (block - 1):
        wrong.append(f"{at}.kv_block_tokens is {block}, expected a power of two, as the vendor's cache asks for")
    formats = (("weights", limits.weights), ("cache", limits.cache))
    return wrong + [each for field, word in formats for each in _format(f"{at}.{field}", word, _GENERATION_FORMATS)]


def _mining(limits: MiningLimits) -> list[str]:
    wrong = _positive("mining", limits, ("row_tokens", "step_token_budget", "longest_step_ms"))
    if not wrong and limits.step_token_budget % limits.row_tokens:
        wrong.append(
            f"mining.step_token_budget is {limits.step_token_budget}, expected a multiple of row_tokens, "
            f"{limits.row_tokens}"
        )
    return wrong + _format("mining.weights", limits.weights, _MINING_FORMATS)


def _format(at: str, word: str, allowed: tuple[str, ...]) -> list[str]:
    return [] if word in allowed else [f"{at} is {word!r}, expected one of {', '.join(allowed)}"]


def _positive(at: str, table: object, names: tuple[str, ...]) -> list[str]:
    return [f"{at}.{name} is {value}, expected 1 or more" for name in names if (value := int(getattr(table, name))) < 1]
