# SPDX-License-Identifier: Apache-2.0
"""Asks an engine for constrained answers, checks each of them, and takes the time."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from engines.probe_guided.constraints import Constraint, constraints
from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.common.errors import InvalidArgumentError, UnimplementedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engines.targets.broker import BrokerTarget, Timed

_REPEATS: Final = 3
_STOP: Final = generation_pb2.FINISH_REASON_STOP
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What became of one constraint."""

    name: str
    word: str
    """Its kind, as contracts call it."""
    claimed: bool
    """Whether the engine's contract lists the kind."""
    refused: str
    """Why the engine did not take it; empty where it did."""
    samples: int
    kept: int
    """Samples that ended by themselves and keep the constraint."""
    cut: int
    """Samples that max_tokens ended, and that begin as such an answer does."""
    broken: tuple[str, ...]
    """Beginnings of answers that do not keep it."""
    kept_unguided: int
    """Of as many answers without the constraint, those that keep it all the same: by chance."""
    compile_s: float
    """First token with a constraint that is new to the engine, less that with one that is not."""
    first_s: float
    """First token with a constraint that is not new."""
    per_token_s: float
    per_token_unguided_s: float

    @property
    def holds(self) -> bool:
        """Whether the engine does what its contract says."""
        return (not self.claimed and bool(self.refused)) or (self.claimed and not self.refused and not self.broken)


def ignore(_result: ProbeResult) -> None:
    """The listener of those who do not watch."""


async def probe(
    target: BrokerTarget,
    claimed: tuple[str, ...],
    *,
    catalogue: int = 3000,
    samples: int = 16,
    on_result: Callable[[ProbeResult], None] = ignore,
) -> list[ProbeResult]:
    """Probes all constraints.

    Args:
        target: The engine.
        claimed: Kinds that its contract lists.
        catalogue: Names in the largest constraint.
        samples: Answers checked for each constraint.
        on_result: Told each result as it comes.

    Raises:
        FabricError: The engine failed otherwise than by refusing a constraint.
    """
    results = []
    fresh = [constraints(catalogue, seed=seed) for seed in range(2, 2 + _REPEATS)]
    for number, constraint in enumerate(constraints(catalogue)):
        others = [each[number] for each in fresh]
        result = await _probe(target, constraint, others, constraint.word in claimed, samples)
        results.append(result)
        on_result(result)
    return results


async def _probe(
    target: BrokerTarget, constraint: Constraint, fresh: list[Constraint], claimed: bool, samples: int
) -> ProbeResult:
    empty = ProbeResult(constraint.name, constraint.word, claimed, "", 0, 0, 0, (), 0, 0.0, 0.0, 0.0, 0.0)
    unguided = [await target.timed(_request(constraint, seed, guided=False)) for seed in range(_REPEATS)]
    try:
        await target.timed(_request(constraint, 0))
    except (InvalidArgumentError, UnimplementedError) as error:
        return replace(empty, refused=error.message)
    new = [(await target.timed(_request(each, 0))).first_s for each in fresh]
    known = [await target.timed(_request(constraint, seed)) for seed in range(_REPEATS)]
    answers = await target.answers([_request(constraint, seed) for seed in range(samples)])
    free = await target.answers([_request(constraint, seed, guided=False) for seed in range(samples)])
    first_s = statistics.median(each.first_s for each in known)
    texts = [(result.samples[0].text, result.samples[0].finish_reason == _STOP) for result in answers]
    good = [constraint.keeps(text) if ended else constraint.begins(text) for text, ended in texts]
    return replace(
        empty,
        samples=samples,
        kept=sum(fine and ended for fine, (_, ended) in zip(good, texts, strict=True)),
        cut=sum(fine and not ended for fine, (_, ended) in zip(good, texts, strict=True)),
        broken=tuple(text[:_SHOWN] for fine, (text, _) in zip(good, texts, strict=True) if not fine),
        kept_unguided=sum(constraint.keeps(result.samples[0].text) for result in free),
        compile_s=max(0.0, statistics.median(new) - first_s),
        first_s=first_s,
        per_token_s=_median_per_token(known),
        per_token_unguided_s=_median_per_token(unguided),
    )


def _request(constraint: Constraint, seed: int, *, guided: bool = True) -> broker_service_pb2.GenerationRequest:
    request = broker_service_pb2.GenerationRequest(max_tokens=constraint.max_tokens)
    request.prompt.text = constraint.prompt
    request.sampling.temperature = 1.0
    request.sampling.seed = seed
    if guided:
        request.guide.kind = constraint.kind
        request.guide.text = constraint.text
    return request


def _median_per_token(timed: list[Timed]) -> float:
    times = [each.per_token_s for each in timed if each.tokens > 1]
    return statistics.median(times) if times else 0.0
