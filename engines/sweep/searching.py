# SPDX-License-Identifier: Apache-2.0
"""Searches one lever after the other for the smallest value that gives all there is.

The step's token budget comes first. Each lever's values are tried upwards until the curve has been flat for two steps
and the value that the engine came with is behind; the lever is then set to the smallest value that gives all but a
share `flat` of the best. When a round has moved anything, another one looks whether an earlier lever moves again. What
a lever is worth is measured at the end: how much is lost when it alone is put back.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engines.sweep.settings import LEVERS, Engine, Setting, grid
from services.common.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from engines.sweep.journal import Journal

    Measure = Callable[[Setting], Awaitable[Sequence[float]]]

_ROUNDS_MAX: Final = 3
_FLAT_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One setting that was measured."""

    setting: Setting
    values: tuple[float, ...]
    """A rate for each run, more is better; empty where the engine cannot be set so."""

    @property
    def median(self) -> float:
        """Of the runs; 0 where there are none."""
        return statistics.median(self.values) if self.values else 0.0

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest run."""
        return (min(self.values), max(self.values)) if self.values else (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """One lever, all others held."""

    lever: str
    points: tuple[Point, ...]
    """By rising value; only settings that the engine can have."""
    chosen: int
    flat: bool
    """Whether it was left early since it had become flat."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What a lever is worth at the end."""

    lever: str
    start: int
    chosen: int
    gain: float
    """Rate at the proposed setting over the rate with this lever alone put back; 1 where it did not move."""
    reach: float
    """Best over worst of its last curve: what setting it wrongly costs."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep found."""

    start: Point
    best: Point
    curves: tuple[Curve, ...]
    """In the order in which they were made; the last one of a lever counts."""
    worth: tuple[Worth, ...]
    """The lever that is worth most first."""

    @property
    def gain(self) -> float:
        """Rate at the proposed setting over that at the start."""
        return self.best.median / self.start.median if self.start.median else 0.0


def ignore(_point: Point) -> None:
    """The listener of those who do not watch."""


async def search(
    engine: Engine,
    measure: Measure,
    journal: Journal,
    *,
    levers: Sequence[str] = LEVERS,
    flat: float = 0.03,
    on_point: Callable[[Point], None] = ignore,
) -> SweepResult:
    """Sweeps an engine.

    Args:
        engine: Where it starts.
        measure: Runs the engine with a setting and gives a rate for each run. It raises InvalidArgumentError for a
            setting that the rules refuse.
        journal: What was measured already is taken from it, and what is measured is put into it.
        levers: Those that are tried.
        flat: Share of the best rate that a smaller value may lose.
        on_point: Told each setting as it is measured.

    Raises:
        InvalidArgumentError: A lever is none.
        FailedPreconditionError: The engine could not be measured as it is.
        FabricError: Whatever else `measure` raises.
    """
    if unknown := [lever for lever in levers if lever not in LEVERS]:
        raise InvalidArgumentError(f"levers: {', '.join(unknown)} is none of {', '.join(LEVERS)}")
    run = _Search(engine, measure, journal, flat, on_point)
    start = await run.point(engine.setting)
    if not start.values or not start.median:
        raise FailedPreconditionError(f"{engine.directory} could not be measured as it is: {engine.setting.text()}")
    now = engine.setting
    tried = [lever for lever in LEVERS if lever in levers and engine.setting.value(lever) is not None]
    for _ in range(_ROUNDS_MAX):
        before = now
        for lever in tried:
            now = await run.settle(lever, now)
        if now == before:
            break
    worth = [await run.worth(lever, now) for lever in tried]
    worth.sort(key=lambda each: (-each.gain, -each.reach))
    return SweepResult(start, await run.point(now), tuple(run.curves), tuple(worth))


class _Search:
    def __init__(
        self, engine: Engine, measure: Measure, journal: Journal, flat: float, on_point: Callable[[Point], None]
    ) -> None:
        self._engine = engine
        self._measure = measure
        self._journal = journal
        self._flat = flat
        self._on_point = on_point
        self.curves: list[Curve] = []

    async def point(self, setting: Setting) -> Point:
        """A setting as measured, now or earlier."""
        values = self._journal.get(setting)
        if values is None:
            try:
                values = tuple(await self._measure(setting))
            except InvalidArgumentError:
                values = ()
            self._journal.add(setting, values)
            self._on_point(Point(setting, values))
        return Point(setting, values)

    async def settle(self, lever: str, now: Setting) -> Setting:
        """Tries a lever's values and takes the smallest that gives all there is."""
        points: list[Point] = []
        behind = max(self._engine.setting.value(lever) or 0, now.value(lever) or 0)
        left_early = False
        for value in grid(self._engine, lever, now):
            point = await self.point(now.with_(lever, value))
            if point.values:
                points.append(point)
            if value >= behind and self._has_flattened(points):
                left_early = True
                break
        best = max(point.median for point in points)
        chosen = next(point for point in points if point.median >= (1 - self._flat) * best)
        self.curves.append(Curve(lever, tuple(points), chosen.setting.value(lever) or 0, left_early))
        return chosen.setting

    async def worth(self, lever: str, final: Setting) -> Worth:
        """What is lost when a lever alone is put back."""
        start, chosen = self._engine.setting.value(lever) or 0, final.value(lever) or 0
        here = await self.point(final)
        there = await self.point(final.with_(lever, start))
        curve = next(each for each in reversed(self.curves) if each.lever == lever)
        medians = [point.median for point in curve.points]
        gain = here.median / there.median if there.median else 1.0
        return Worth(lever, start, chosen, gain if start != chosen else 1.0, max(medians) / max(min(medians), 1e-12))

    def _has_flattened(self, points: list[Point]) -> bool:
        if len(points) <= _FLAT_STEPS:
            return False
        earlier = max(point.median for point in points[:-_FLAT_STEPS])
        return all(point.median < (1 + self._flat) * earlier for point in points[-_FLAT_STEPS:])
