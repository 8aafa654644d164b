# SPDX-License-Identifier: Apache-2.0
"""Tiers of engines for the embedded runtime: `engines/tiers/cpu-*.toml`, read strictly."""

from __future__ import annotations

import importlib.resources
import tomllib
import typing
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from services.common.errors import FailedPreconditionError, NotFoundError

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
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FailedPreconditionError(f"tier {name}: {error}") from error
    wrong: list[str] = []
    tier = _build(CpuTier, document, "", wrong)
    if wrong:
        raise FailedPreconditionError(f"tier {name}: " + "; ".join(wrong))
    return typing.cast("CpuTier", tier)


def _build(kind: Any, value: Any, path: str, wrong: list[str]) -> Any:
    """The value of an annotated type; what does not fit goes into `wrong`, and the result is not to be used."""
    if isinstance(kind, type) and is_dataclass(kind):
        return _build_table(kind, value, path, wrong)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            wrong.append(f"{path} is {value!r}, expected a list")
            return ()
        item = typing.get_args(kind)[0]
        return tuple(_build(item, each, f"{path}[{index}]", wrong) for index, each in enumerate(value))
    if type(value) is not kind:
        wrong.append(f"{path} is {value!r}, expected {kind.__name__}")
    return value


def _build_table(kind: Any, value: Any, path: str, wrong: list[str]) -> Any:
    if not isinstance(value, dict):
        wrong.append(f"{path} is {value!r}, expected a table")
        return None
    at = f"{path}." if path else ""
    hints = typing.get_type_hints(kind)
    wrong += [f"{at}{name} is unknown" for name in value if name not in hints]
    wrong += [f"{at}{field.name} is missing" for field in fields(kind) if field.name not in value]
    built = {name: _build(hint, value[name], f"{at}{name}", wrong) for name, hint in hints.items() if name in value}
    return kind(**built) if len(built) == len(hints) else None
