# SPDX-License-Identifier: Apache-2.0
"""The values of a contract that has no findings.

Every range and agreement that `engines/schema/contract.schema.json` states holds here, and nothing behind checks them
again. None is the contract's `not_applicable`; nothing is ever left out. What the fields mean is written once, at
`ifabric.engine.v1.EngineContract`; here stand the units and what code relies on.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

from services.common.contract import wire
from services.common.contract.findings import check, violations
from services.common.errors import InvalidArgumentError
from services.common.schema.document import Real, decode
from services.common.schema.nodes import NOT_APPLICABLE

if typing.TYPE_CHECKING:
    from ifabric.engine.v1 import contract_pb2

_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class File:
    """One file of the engine directory."""

    path: str
    """Relative to the engine directory, never leaving it."""
    size_bytes: int
    sha256: str
    """64 lower-case hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model inside."""

    architecture: str
    layers: int
    hidden_size: int
    """In values."""
    vocab_size: int
    weights_dtype: str
    activations_dtype: str
    kv_cache_dtype: str | None


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The tokenizer document and what ends a generation."""

    file: str
    end_token_ids: tuple[int, ...]
    """Empty exactly where the engine generates nothing."""


@dataclass(frozen=True, slots=True)
class Card:
    """The card set that the engine was built for."""

    family: str
    compute_capability: str | None
    memory_bytes: int
    """Of each card."""
    count: int
    tensor_parallel: int
    pipeline_parallel: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request and a step may be."""

    max_input_tokens: int
    max_sequence_tokens: int
    max_output_tokens: int
    """0: the engine generates nothing."""
    slots: int
    step_token_budget: int
    built_step_token_budget: int
    kv_block_tokens: int | None
    kv_cache_memory_fraction: float | None
    host_cache_bytes: int
    beams: int
    longest_step_ms: int


@dataclass(frozen=True, slots=True)
class Payload:
    """The tensor that every finished request carries."""

    shape: tuple[int, ...]
    """Outermost first."""
    dtype: str
    """`float32`, `float16` or `bfloat16`, little-endian."""
    layers: tuple[int, ...]
    """-1: after the final norm, before the output head."""

    @property
    def size_bytes(self) -> int:
        """Size of one payload."""
        return functools.reduce(int.__mul__, self.shape, _DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the engine can do beyond plain generation."""

    guided_decoding: tuple[str, ...]
    """Of `json_schema`, `regex`, `grammar`."""
    samples_max: int
    scoring: bool
    reproducible: bool
    payload: Payload | None


@dataclass(frozen=True, slots=True)
class Runtime:
    """What executes the engine."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Build:
    """How the engine was made."""

    tool: str
    tool_version: str
    flags: tuple[str, ...]
    calibration: str | None
    date: str
    """`YYYY-MM-DD`."""


@dataclass(frozen=True, slots=True)
class Contract:
    """An engine's contract without findings."""

    contract_version: int
    engine_id: str
    files: tuple[File, ...]
    model: Model
    tokenizer: Tokenizer
    card: Card
    limits: Limits
    capabilities: Capabilities
    runtime: Runtime
    build: Build

    @classmethod
    def from_proto(cls, proto: contract_pb2.EngineContract) -> Contract:
        """The values of a contract in wire form.

        Raises:
            InvalidArgumentError: The contract has findings: one violation each.
        """
        if findings := check(proto):
            raise InvalidArgumentError.of(violations(findings))
        return typing.cast("Contract", _build(cls, decode(wire.to_document(proto))))

    def to_proto(self) -> contract_pb2.EngineContract:
        """The wire form; `Contract.from_proto(contract.to_proto()) == contract`."""
        return wire.from_document(_document(self))


def _build(kind: Any, value: Any) -> Any:
    """A value of the annotated type `kind` from the plain value of a document."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**{name: _build(hint, value[name]) for name, hint in _hints(kind).items()})
    arguments = typing.get_args(kind)
    if NoneType in arguments:
        return None if value == NOT_APPLICABLE else _build(arguments[0], value)
    if typing.get_origin(kind) is tuple:
        return tuple(_build(arguments[0], item) for item in value)
    return value


def _document(value: Any) -> Any:
    """The document form of a value."""
    if dataclasses.is_dataclass(value):
        return {field.name: _document(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_document(item) for item in value]
    if isinstance(value, float):
        return Real.of(value)
    return NOT_APPLICABLE if value is None else value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
