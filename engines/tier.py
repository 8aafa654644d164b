# SPDX-License-Identifier: Apache-2.0
"""Tiers of engines for the embedded runtime: `engines/tiers/cpu-*.toml`, read strictly."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

from engines import tables
from services.common.errors import NotFoundError

_FOLDER = "engines.tiers"


@dataclass(frozen=True, slots=True)
class CpuCard:
    """The processor."""

    family: str
    threads: int
    """Of a step that generates."""
    batch_threads: int
    """Of a step that computes prompts."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What a request and a step may be."""

    max_input_tokens: int
    max_output_tokens: int
    slots: int
    step_token_budget: int
    longest_step_ms: int


@dataclass(frozen=True, slots=True)
class TierCache:
    """The KV cache."""

    layout: str
    """`streams`: each sequence has its own; `unified`: one pool."""
    resident_heads: int
    """Leading parts of prompts that stay for requests to come."""
    dtype: str


@dataclass(frozen=True, slots=True)
class TierWeights:
    """What the checkpoint is turned into."""

    dtype: str
    end_tokens: tuple[str, ...]
    """Texts of the tokens that end a generation."""


@dataclass(frozen=True, slots=True)
class TierCapabilities:
    """What the engine promises beyond plain generation."""

    samples_max: int
    scoring: bool
    reproducible: bool
    guided_decoding: tuple[str, ...]
    payload_layers: tuple[int, ...]
    """Layers whose hidden state every request brings; empty for none."""


@dataclass(frozen=True, slots=True)
class CpuTier:
    """What an engine of one tier is built to be; ranges are judged by the contract that comes out."""

    engine_id: str
    card: CpuCard
    limits: TierLimits
    cache: TierCache
    weights: TierWeights
    capabilities: TierCapabilities

    @property
    def sequence_tokens(self) -> int:
        """The longest sequence: prompt and output together."""
        return self.limits.max_input_tokens + self.limits.max_output_tokens


def names() -> tuple[str, ...]:
    """Names of all tiers of the embedded runtime, in order."""
    found = importlib.resources.files(_FOLDER).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in found if f.name.startswith("cpu-")))


def load(name: str) -> CpuTier:
    """Reads a tier.

    Raises:
        NotFoundError: There is no tier of that name.
        FailedPreconditionError: A field of it is missing, unknown or mistyped: all are named.
    """
    if name not in names():
        raise NotFoundError(f"there is no tier {name}; there are {', '.join(names())}")
    return parse(name, (importlib.resources.files(_FOLDER) / f"{name}.toml").read_text())


def parse(name: str, text: str) -> CpuTier:
    """Reads a tier from its text.

    Raises:
        FailedPreconditionError: It is no TOML, or a field of it is missing, unknown or mistyped: all are named.
    """
    return tables.parse(CpuTier, f"tier {name}", text)
