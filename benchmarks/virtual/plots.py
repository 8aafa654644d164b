# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG text, with nothing but lines, areas and words: small enough to lie beside the pages that show them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.virtual.fleet import Stretch

WIDTH, LEFT, RIGHT, TOP = 760, 70, 190, 46
COLOURS = ("#1f5fa8", "#c2571a", "#4d8a3c", "#8a4da8", "#8c8c8c", "#b8960c")
_FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: where values lie on it, and where it is marked."""

    low: float
    high: float
    marks: Sequence[float]
    name: str
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Share of the axis at which a value lies, 0 to 1."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], across: Axis, up: Axis) -> str:
    """A line for each series of (x, y), with its name at the right."""
    height, inner = 360, 360 - TOP - 50
    span = WIDTH - LEFT - RIGHT
    parts = [_text(LEFT, 22, title, size=14)]
    for mark in up.marks:
        y = TOP + inner * (1 - up.place(mark))
        parts.append(_line(LEFT, y, LEFT + span, y, "#dddddd"))
        parts.append(_text(LEFT - 8, y + 4, f"{mark:g}", anchor="end"))
    for mark in across.marks:
        x = LEFT + span * across.place(mark)
        parts.append(_line(x, TOP + inner, x, TOP + inner + 4, "#333333"))
        parts.append(_text(x, TOP + inner + 18, f"{mark:,g}", anchor="middle"))
    parts.append(_text(LEFT + span / 2, TOP + inner + 38, across.name, anchor="middle"))
    parts.append(_text(LEFT, TOP - 8, up.name))
    labels: list[float] = []
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        path = " ".join(f"{LEFT + span * across.place(x):.1f},{TOP + inner * (1 - up.place(y)):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = TOP + inner * (1 - up.place(points[-1][1])) + 4
        while any(abs(at - other) < 14 for other in labels):
            at -= 2
        labels.append(at)
        parts.append(_text(LEFT + span + 8, at, name, colour=colour))
    return _document(height, parts)


def timeline(title: str, runs: Mapping[str, Sequence[Stretch]], workers: int, *, buckets: int = 180) -> str:
    """What each worker did over time in each of several runs, all on one scale of time.

    Two areas a worker: the share of its time that went into prompts, and above it the share that went into steps that
    only generated; what is white is time in no step.
    """
    end = max(stretch.end_us for stretches in runs.values() for stretch in stretches)
    lane, gap = 26, 6
    span = WIDTH - LEFT - 30
    parts = [_text(LEFT, 22, title, size=14)]
    y = TOP
    for name, stretches in runs.items():
        parts.append(_text(LEFT, y + 10, name))
        y += 16
        for worker in range(workers):
            prompt, busy = _shares([it for it in stretches if it.worker == worker], end, buckets)
            parts.append(_area(busy, y, lane, span, "#f0b98d"))
            parts.append(_area(prompt, y, lane, span, COLOURS[0]))
            parts.append(_line(LEFT, y + lane, LEFT + span, y + lane, "#999999"))
            parts.append(_text(LEFT - 8, y + lane - 8, f"worker {worker + 1}", anchor="end"))
            y += lane + gap
        y += 8
    for quarter in range(5):
        x = LEFT + span * quarter / 4
        parts.append(_text(x, y + 8, f"{end / 1e6 * quarter / 4:,.0f} s", anchor="middle"))
    parts.append(_text(LEFT, y + 28, "steps with prompts", colour=COLOURS[0]))
    parts.append(_text(LEFT + 140, y + 28, "steps that only generate", colour="#c2571a"))
    return _document(y + 40, parts)


def _shares(stretches: Sequence[Stretch], end: float, buckets: int) -> tuple[list[float], list[float]]:
    """For each bucket of time, the share in steps with prompts and the share in any step."""
    prompt, busy = [0.0] * buckets, [0.0] * buckets
    width = end / buckets
    for stretch in stretches:
        first, last = int(stretch.begin_us / width), min(buckets - 1, int(stretch.end_us / width))
        for at in range(first, last + 1):
            inside = min(stretch.end_us, (at + 1) * width) - max(stretch.begin_us, at * width)
            busy[at] += inside / width
            if stretch.prompt_tokens:
                prompt[at] += inside / width
    return [min(1.0, share) for share in prompt], [min(1.0, share) for share in busy]


def _area(shares: Sequence[float], y: float, lane: float, span: float, colour: str) -> str:
    width = span / len(shares)
    points = [f"{LEFT},{y + lane:.1f}"]
    for at, share in enumerate(shares):
        top = f"{y + lane * (1 - share):.1f}"
        points += [f"{LEFT + at * width:.1f},{top}", f"{LEFT + (at + 1) * width:.1f},{top}"]
    points.append(f"{LEFT + span:.1f},{y + lane:.1f}")
    return f'<polygon points="{" ".join(points)}" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222222", size: int = 12) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _document(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" {_FONT}>'
    ground = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"
