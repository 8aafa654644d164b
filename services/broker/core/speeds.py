# SPDX-License-Identifier: Apache-2.0
"""How fast engines are, learnt from the counters that their workers tell.

A step costs something by itself, and something for each prompt token that it computes and each token that it generates:

    busy time = a * steps + b * prompt tokens computed + c * tokens generated

Each reading of the counters, against the one before, is an observation of the three. They are fitted by least squares
over relative errors, none of them below zero, and old observations fade, so that the fit follows an engine that slows
down. The sums of the fit are all that is kept: nine figures an engine, however long it works.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from services.broker.operating import EnginePace

if TYPE_CHECKING:
    from ifabric.engine.v1 import node_pb2

Floats = npt.NDArray[np.float64]

_FADE = 0.995
"""What is left of an observation's weight after each further one."""
_STEPS_LEAST = 20
"""Steps that have to be seen before a speed is told."""
_RIDGE = 1e-9
"""Keeps the fit solvable where two of the three always grow together."""
_ENGINES_MAX = 1024


class _Reading(NamedTuple):
    steps: int
    prompt_tokens: int
    generated_tokens: int
    busy_us: int


@dataclass(slots=True)
class _Engine:
    """Sums of one engine."""

    squares: Floats = field(default_factory=lambda: np.zeros((3, 3)))
    products: Floats = field(default_factory=lambda: np.zeros(3))
    steps: int = 0
    allowed: float = 0.0
    generated: float = 0.0

    def observe(self, change: _Reading) -> None:
        parts = np.array(change[:3], np.float64) / change.busy_us
        self.squares = self.squares * _FADE + np.outer(parts, parts)
        self.products = self.products * _FADE + parts
        self.steps += change.steps

    def pace(self) -> EnginePace | None:
        if self.steps < _STEPS_LEAST:
            return None
        best, best_gain = np.zeros(3), 0.0
        for kept in itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3)):
            part = self.squares[np.ix_(kept, kept)]
            ridge = _RIDGE * np.diag(np.diag(part) + np.finfo(np.float64).tiny)
            costs = np.linalg.lstsq(part + ridge, self.products[list(kept)], rcond=None)[0]
            gain = float(costs @ self.products[list(kept)])
            if (costs >= 0).all() and gain > best_gain:
                best, best_gain = np.zeros(3), gain
                best[list(kept)] = costs
        return EnginePace(*best.tolist()) if best_gain else None


class SpeedBook:
    """Speeds by engine digest, and how much of what requests allow they generate."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._last: dict[str, _Reading] = {}

    def learn(self, worker_id: str, digest: str, stats: node_pb2.EngineStats) -> None:
        """Takes a reading of a worker's counters in; its first one tells of all that the engine did before."""
        now = _Reading(stats.steps, stats.prompt_tokens_computed, stats.generated_tokens, stats.busy_us)
        before = self._last.get(worker_id, _Reading(0, 0, 0, 0))
        change = _Reading(*(new - old for new, old in zip(now, before, strict=True)))
        if change.steps > 0 and change.busy_us > 0 and min(change) >= 0:
            self._last[worker_id] = now
            self._engine(digest).observe(change)

    def forget(self, worker_id: str) -> None:
        """A worker is gone; what was learnt of its engine stays."""
        self._last.pop(worker_id, None)

    def ended(self, digest: str, allowed_tokens: int, generated_tokens: int) -> None:
        """A request ended well that might have generated so many tokens, over all samples."""
        engine = self._engine(digest)
        engine.allowed = engine.allowed * _FADE + allowed_tokens
        engine.generated = engine.generated * _FADE + generated_tokens

    def pace(self, digest: str) -> EnginePace | None:
        """How fast an engine is; None where too little is known."""
        engine = self._engines.get(digest)
        return None if engine is None else engine.pace()

    def output_share(self, digest: str) -> float | None:
        """Share of what requests allowed that they generated, 0 to 1; None where none has ended."""
        engine = self._engines.get(digest)
        return None if engine is None or not engine.allowed else min(1.0, engine.generated / engine.allowed)

    def _engine(self, digest: str) -> _Engine:
        engine = self._engines.get(digest)
        if engine is None:
            if len(self._engines) >= _ENGINES_MAX:
                self._engines.pop(next(iter(self._engines)))
            engine = self._engines[digest] = _Engine()
        return engine
