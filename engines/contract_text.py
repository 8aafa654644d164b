# SPDX-License-Identifier: Apache-2.0
"""The text of a `contract.json`: what every builder writes alike, and nothing that would be refused."""

from __future__ import annotations

import datetime
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from services.common.contract import CONTRACT_FILE, check, from_document, to_json
from services.common.errors import FailedPreconditionError
from services.common.schema import Real

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engines.card_tier import CardSet
    from engines.cpu import FileFacts

NOT_APPLICABLE: Final = "not_applicable"
TOOL: Final = "ifab engine build"


@dataclass(frozen=True, slots=True)
class BuiltFrom:
    """How an engine was made."""

    flags: Sequence[str]
    """Settings that shaped the result, as `name=value`."""
    calibration: str | None
    """The calibration data; None where none was needed."""


def card_document(cards: CardSet, memory_bytes: int) -> dict[str, Any]:
    """The contract's `card`.

    Args:
        cards: The cards of the engine.
        memory_bytes: What the engine needs of each.
    """
    return {
        "family": cards.family,
        "compute_capability": cards.compute_capability,
        "memory_bytes": memory_bytes,
        "count": cards.count,
        "tensor_parallel": cards.tensor_parallel,
        "pipeline_parallel": cards.pipeline_parallel,
    }


def contract_text(
    *,
    engine_id: str,
    files: Mapping[str, FileFacts],
    model: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    card: Mapping[str, Any],
    limits: Mapping[str, Any],
    capabilities: Mapping[str, Any],
    runtime: Mapping[str, Any],
    built: BuiltFrom,
) -> bytes:
    """Puts a contract together; each part is the member of that name.

    Raises:
        FailedPreconditionError: The contract would be refused: all findings are named.
    """
    document = {
        "contract_version": 1,
        "engine_id": engine_id,
        "files": [{"path": p, "size_bytes": f.size_bytes, "sha256": f.sha256} for p, f in sorted(files.items())],
        "model": dict(model),
        "tokenizer": dict(tokenizer),
        "card": dict(card),
        "limits": dict(limits),
        "capabilities": dict(capabilities),
        "runtime": dict(runtime),
        "build": {
            "tool": TOOL,
            "tool_version": importlib.metadata.version("inference-fabric"),
            "flags": list(built.flags),
            "calibration": built.calibration or NOT_APPLICABLE,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
    }
    proto = from_document(_real(document))
    if findings := check(proto):
        raise FailedPreconditionError(f"{CONTRACT_FILE} would be refused: " + "; ".join(map(str, findings)))
    return to_json(proto)


def _real(value: Any) -> Any:
    """The value as a strict document has it, in which a number with a fraction knows its text."""
    match value:
        case dict():
            return {key: _real(inner) for key, inner in value.items()}
        case list():
            return [_real(inner) for inner in value]
        case float():
            return Real.of(value)
        case _:
            return value
