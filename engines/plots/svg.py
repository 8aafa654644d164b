# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text: lines and points over linear or logarithmic axes.

chart = Chart(title="Throughput", x="clients", y="tokens/s", x_log=True)
chart.line("ours", [(1, 80), (2, 150), (4, 240)])
chart.svg()
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    Point = tuple[float, float]

COLOURS: Final = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#846358", "#495057")
"""Told apart in print and by most eyes; series take them in order."""
STYLE: Final = """
svg text { font: 11px system-ui, sans-serif; fill: #343a40; } svg .title { font-size: 13px; font-weight: 600; }
svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .frame { fill: none; stroke: #adb5bd; } svg .grid { stroke: #e9ecef; }
svg .rule { stroke: #c92a2a; stroke-dasharray: 5 3; }
"""
"""What the elements of a chart look like."""
_WIDTH: Final = 760
_HEIGHT: Final = 320
_LEFT: Final = 74
_RIGHT: Final = 16
_TOP: Final = 34
_BOTTOM: Final = 46
_TICKS: Final = 6
_ROW: Final = 18
"""Height of a row of names."""
_LETTER: Final = 7
"""Width of a letter, about."""


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    points: tuple[Point, ...]
    colour: str
    joined: bool
    notes: tuple[str, ...]
    """A tooltip for each point; empty for the values."""
    low_high: tuple[tuple[float, float], ...]
    """Spread of each point, in y; empty for none."""


@dataclass(slots=True)
class Chart:
    """One chart. Points that are not finite, or not above 0 on a logarithmic axis, are left out."""

    title: str
    x: str
    """What the axis shows, with its unit."""
    y: str
    x_log: bool = False
    y_log: bool = False
    _series: list[_Series] = field(default_factory=list)
    _rules: list[tuple[float, str]] = field(default_factory=list)

    def line(
        self,
        name: str,
        points: Sequence[Point],
        *,
        notes: Sequence[str] = (),
        low_high: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Adds joined points; `low_high` draws the spread of each."""
        self._add(name, points, joined=True, notes=notes, low_high=low_high)

    def dots(self, name: str, points: Sequence[Point], *, notes: Sequence[str] = (), colour: str = "") -> None:
        """Adds single points; `notes` are their tooltips."""
        self._add(name, points, joined=False, notes=notes, colour=colour)

    def rule(self, y: float, label: str) -> None:
        """Adds a horizontal line, such as a limit."""
        self._rules.append((y, label))

    def svg(self) -> str:
        """The chart as an SVG element."""
        xs = [x for each in self._series for x, _ in each.points]
        ys = [y for each in self._series for _, y in each.points] + [y for y, _ in self._rules if self._fits(1.0, y)]
        ys += [edge for each in self._series for pair in each.low_high for edge in pair if self._fits(1.0, edge)]
        across = _Axis.over(xs, _LEFT, _WIDTH - _RIGHT, log=self.x_log)
        up = _Axis.over(ys, _HEIGHT - _BOTTOM, _TOP, log=self.y_log)
        legend, rows = self._legend()
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _ROW * rows}" role="img" xmlns="http://www.w3.org/2000/svg">',
            f"<title>{escape(self.title)}</title>",
            f'<text x="{_LEFT}" y="18" class="title">{escape(self.title)}</text>',
            f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_HEIGHT - _TOP - _BOTTOM}" '
            'class="frame"/>',
            *self._grid(across, up),
        ]
        for y, label in self._rules:
            if self._fits(1.0, y):
                at = up.at(y)
                parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="rule"/>')
                parts.append(f'<text x="{_WIDTH - _RIGHT - 4}" y="{at - 4:.1f}" class="end">{escape(label)}</text>')
        for each in self._series:
            parts += _drawn(each, across, up)
        parts += legend
        return "\n".join([*parts, "</svg>"])

    def file(self) -> str:
        """The chart as the text of an SVG file of its own, on white."""
        head, rest = self.svg().split("\n", 1)
        return f'{head}\n<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{rest}\n'

    def _add(
        self,
        name: str,
        points: Sequence[Point],
        *,
        joined: bool,
        notes: Sequence[str] = (),
        low_high: Sequence[tuple[float, float]] = (),
        colour: str = "",
    ) -> None:
        kept = [number for number, (x, y) in enumerate(points) if self._fits(x, y)]
        self._series.append(
            _Series(
                name,
                tuple(points[number] for number in kept),
                colour or COLOURS[len(self._series) % len(COLOURS)],
                joined,
                tuple(notes[number] for number in kept) if notes else (),
                tuple(low_high[number] for number in kept) if low_high else (),
            )
        )

    def _fits(self, x: float, y: float) -> bool:
        return math.isfinite(x) and math.isfinite(y) and (x > 0 or not self.x_log) and (y > 0 or not self.y_log)

    def _grid(self, across: _Axis, up: _Axis) -> list[str]:
        parts = []
        for value in across.ticks():
            at = across.at(value)
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="grid"/>')
            parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 15}" class="mid">{short(value)}</text>')
        for value in up.ticks():
            at = up.at(value)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" class="end">{short(value)}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" class="mid">{escape(self.x)}</text>')
        height = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<text x="14" y="{height:.0f}" class="mid" transform="rotate(-90 14 {height:.0f})">{escape(self.y)}</text>'
        )
        return parts

    def _legend(self) -> tuple[list[str], int]:
        """Names of the series below the axis, as many to a row as fit; and how many rows they take."""
        parts: list[str] = []
        across, rows = _LEFT, 0
        for each in (series for series in self._series if series.name):
            width = _LETTER * len(each.name) + 28
            if rows == 0 or across + width > _WIDTH - _RIGHT:
                across, rows = _LEFT, rows + 1
            down = _HEIGHT + _ROW * rows - 4
            parts.append(f'<circle cx="{across + 4}" cy="{down - 4}" r="4" fill="{each.colour}"/>')
            parts.append(f'<text x="{across + 12}" y="{down}">{escape(each.name)}</text>')
            across += width
        return parts, rows


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    """Pixel of `low`."""
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool) -> _Axis:
        low, high = (min(values), max(values)) if values else (1.0, 10.0) if log else (0.0, 1.0)
        if log:
            low, high = (low / 1.3, high * 1.3) if high > low else (low / 3, high * 3)
        else:
            low, high = min(0.0, low), high if high > low else low + 1
            high += 0.05 * (high - low)
        return cls(low, high, start, end, log)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        place = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.start + place * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values along the axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            spread = max(1, (last - first) // 8)
            values = [step * 10.0**power for power in range(first, last + 1, spread) for step in steps]
        else:
            rough = (self.high - self.low) / _TICKS
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
            first = math.ceil(self.low / step)
            values = [step * number for number in range(first, math.floor(self.high / step) + 1)]
        return [value for value in values if self.low <= value <= self.high]


def _drawn(series: _Series, across: _Axis, up: _Axis) -> list[str]:
    places = [(across.at(x), up.at(y)) for x, y in series.points]
    parts = []
    if series.joined and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{series.colour}" stroke-width="1.8"/>')
    for (x, _), (low, high) in zip(places, series.low_high, strict=False):
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up.at(low):.1f}" y2="{up.at(high):.1f}" stroke="{series.colour}"/>'
        )
    for number, (x, y) in enumerate(places):
        value = series.points[number]
        note = series.notes[number] if series.notes else f"{series.name}: {short(value[0])}, {short(value[1])}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if series.joined else 2.4}" fill="{series.colour}">'
            f"<title>{escape(note)}</title></circle>"
        )
    return parts


def short(value: float) -> str:
    """A number for people: three significant digits, with k, M and G where it is large."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
