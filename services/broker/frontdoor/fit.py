# SPDX-License-Identifier: Apache-2.0
"""Whether one engine can serve one request: the request against the engine's contract."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import contract_pb2
from services.common.errors import FabricError, InvalidArgumentError, UnimplementedError, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ifabric.broker.v1 import broker_service_pb2
    from services.broker.frontdoor.selection import EngineProfile
    from services.broker.work import TokenArray

IDS_NAMED = 16
"""Of the ids outside the vocabulary, so many are named one by one; the next violation counts the rest."""

_ONLY_WHERE_GENERATED = ("stop", "stop_token_ids", "ignore_end", "sampling", "guide", "logprobs")


@dataclass(slots=True)
class Misfit:
    """Why one engine cannot serve a request."""

    engine: EngineProfile
    unserved: list[str] = field(default_factory=list)
    """Fields that ask for what the engine does not do, each with a sentence."""
    violations: list[Violation] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.unserved or self.violations)

    @property
    def size(self) -> int:
        """How far the request is from fitting."""
        return len(self.unserved) + len(self.violations)


def misfit(
    engine: EngineProfile,
    request: broker_service_pb2.GenerationRequest,
    tokens: TokenArray | None,
) -> Misfit:
    """Compares a request with what one engine allows.

    Args:
        engine: The engine.
        request: The request; its engine-independent rules hold or are reported elsewhere.
        tokens: The prompt, shape [n], int32; None where it is not known, and then not compared.

    Returns:
        What stands against it; false where nothing does.
    """
    found = Misfit(engine)
    limit = engine.samples_max
    if request.samples > limit:
        found.violations.append(Violation("samples", f"is {request.samples}; {_of(engine)} makes at most {limit}"))
    if engine.generates:
        _check_generation(engine, request, found)
    else:
        _check_no_generation(engine, request, found)
    if request.prompt_logprobs and not engine.scoring:
        found.unserved.append(f"prompt_logprobs: {_of(engine)} does not score prompts")
    if tokens is not None:
        _check_tokens(engine, request, tokens, found)
    return found


def refusal(misfits: Sequence[Misfit], violations: Sequence[Violation]) -> FabricError:
    """Makes the error for a request that no candidate can serve.

    Args:
        misfits: What stands against each candidate; may be empty where `violations` is not.
        violations: Engine-independent violations.

    Returns:
        The violations that the nearest candidate has, together with the engine-independent ones; UNIMPLEMENTED where
        the nearest candidate only lacks what is asked for.
    """
    nearest = min(misfits, key=_distance, default=None)
    every = [*violations, *(nearest.violations if nearest else ())]
    if every or nearest is None:
        return InvalidArgumentError.of(every)
    names = ",".join(sentence.split(":")[0] for sentence in nearest.unserved)
    return UnimplementedError("; ".join(nearest.unserved), metadata={"fields": names})


def _distance(found: Misfit) -> tuple[int, int, int]:
    """Fewest reasons first; among equals the roomiest engine, whose limits are the ones to keep to."""
    return found.size, -found.engine.max_input_tokens, -found.engine.max_output_tokens


def _check_generation(
    engine: EngineProfile,
    request: broker_service_pb2.GenerationRequest,
    found: Misfit,
) -> None:
    limit = engine.max_output_tokens
    if not 1 <= request.max_tokens <= limit:
        value = f"is {request.max_tokens}" if request.HasField("max_tokens") else "is absent"
        found.violations.append(Violation("max_tokens", f"{value}; {_of(engine)} allows 1 to {limit}"))
    if request.stop_token_ids:
        ids = np.array(request.stop_token_ids, dtype=np.int32)
        if not _in_vocabulary(engine, ids):
            _name_ids(engine, "stop_token_ids", ids, found)
    if request.HasField("guide") and request.guide.kind not in engine.guides:
        kind = request.guide.kind
        if kind in contract_pb2.GuideKind.values() and kind:
            found.unserved.append(f"guide: {_of(engine)} does not serve {contract_pb2.GuideKind.Name(kind)}")


def _check_no_generation(
    engine: EngineProfile,
    request: broker_service_pb2.GenerationRequest,
    found: Misfit,
) -> None:
    if request.max_tokens:
        found.violations.append(
            Violation("max_tokens", f"is {request.max_tokens}; {_of(engine)} generates nothing: it must be absent or 0")
        )
    set_fields = {descriptor.name for descriptor, _ in request.ListFields()}
    found.violations.extend(
        Violation(name, f"is set; {_of(engine)} generates nothing: it must be absent")
        for name in _ONLY_WHERE_GENERATED
        if name in set_fields
    )


def _check_tokens(
    engine: EngineProfile,
    request: broker_service_pb2.GenerationRequest,
    tokens: TokenArray,
    found: Misfit,
) -> None:
    count, limit = len(tokens), engine.max_input_tokens
    if count > limit:
        found.violations.append(
            Violation(_prompt_path(request), f"has {count} tokens; {_of(engine)} takes at most {limit}")
        )
    elif count + request.max_tokens > engine.max_sequence_tokens and 0 < request.max_tokens <= engine.max_output_tokens:
        found.violations.append(
            Violation(
                "max_tokens",
                f"is {request.max_tokens} after a prompt of {count} tokens, together {count + request.max_tokens}; "
                f"{_of(engine)} takes at most {engine.max_sequence_tokens} for both",
            )
        )
    if not _in_vocabulary(engine, tokens):
        _name_ids(engine, _prompt_path(request), tokens, found)


def _in_vocabulary(engine: EngineProfile, ids: TokenArray) -> bool:
    # Seen as unsigned, a negative id is larger than any vocabulary: one reduction finds both kinds of wrong id.
    return bool(np.maximum.reduce(ids.view(np.uint32)) < engine.vocab_size)


def _name_ids(engine: EngineProfile, path: str, ids: TokenArray, found: Misfit) -> None:
    wrong = np.flatnonzero(ids.view(np.uint32) >= engine.vocab_size)
    found.violations.extend(
        Violation(f"{path}[{index}]", f"is {ids[index]}; ids of {_of(engine)} run from 0 to {engine.vocab_size - 1}")
        for index in wrong[:IDS_NAMED].tolist()
    )
    if len(wrong) > IDS_NAMED:
        found.violations.append(Violation(path, f"has {len(wrong) - IDS_NAMED} more ids outside the vocabulary"))


def _prompt_path(request: broker_service_pb2.GenerationRequest) -> str:
    form = request.prompt.WhichOneof("form")
    return "prompt.tokens.ids" if form == "tokens" else f"prompt.{form}"


def _of(engine: EngineProfile) -> str:
    return f"engine {engine.engine_id}"
