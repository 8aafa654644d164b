# SPDX-License-Identifier: Apache-2.0
"""The form that every benchmark of the project reports in.

A benchmark collects figures in a `Report` and prints it once: a table for people, then, as the last line of its
output, one JSON object with every figure under its own key, its spread, the commit and the machine. Example::

    report = Report("wire")
    report.figure("packed_us", [one_run() for _ in range(7)], unit="us")
    report.ratio("packed_over_repeated", over="repeated_us", of="packed_us")
    report.fact("ids", 1024)
    report.print()
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]


def take_no_options(document: str | None) -> None:
    """Ends the program where its command line asks for help, or has anything on it.

    Args:
        document: What it does: the docstring of its module.
    """
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=document, formatter_class=form).parse_args()


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity over several runs."""

    name: str
    values: tuple[float, ...]
    unit: str
    goal: str

    @property
    def median(self) -> float:
        """Median of the runs."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest run."""
        return min(self.values), max(self.values)


class Report:
    """Figures and facts of one benchmark run, in the order in which they were added."""

    def __init__(self, benchmark: str) -> None:
        self._benchmark = benchmark
        self._figures: dict[str, Figure] = {}
        self._facts: dict[str, object] = {}

    def figure(self, name: str, values: Sequence[float], *, unit: str, goal: str = "") -> Figure:
        """Adds a measured quantity.

        Args:
            name: Key in the JSON object; ends in the unit where it has one (`_us`, `_per_s`).
            values: One value a run; at least one.
            unit: Unit, for the table; empty for ratios and counts.
            goal: What is aimed at, for the table, such as `>= 0.95`.

        Raises:
            ValueError: no values, or the name is taken.
        """
        if not values or name in self._figures or name in self._facts:
            raise ValueError(f"figure {name!r} needs a name of its own and at least one value")
        self._figures[name] = Figure(name, tuple(float(value) for value in values), unit, goal)
        return self._figures[name]

    def ratio(self, name: str, *, of: str, over: str, goal: str = "") -> Figure:
        """Adds the ratio of two figures, run by run, so that a slow moment of the machine hits both sides alike."""
        pairs = zip(self._figures[of].values, self._figures[over].values, strict=True)
        return self.figure(name, [left / right for left, right in pairs], unit="", goal=goal)

    def fact(self, name: str, value: object) -> None:
        """Adds something that was not measured in several runs: a setting, a count, rows of a table.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._figures or name in self._facts:
            raise ValueError(f"fact {name!r} needs a name of its own")
        self._facts[name] = value

    def document(self) -> dict[str, object]:
        """The JSON object of the last line."""
        return {
            "benchmark": self._benchmark,
            **commit(),
            "machine": machine(),
            **self._facts,
            **{figure.name: _short(figure.median) for figure in self._figures.values()},
            "spread": {figure.name: [_short(side) for side in figure.spread] for figure in self._figures.values()},
            "runs": {figure.name: len(figure.values) for figure in self._figures.values()},
        }

    def print(self) -> None:
        """Prints the table and, last, the JSON object on one line."""
        print(f"\n{self._benchmark}: medians, with the smallest and largest run")
        width = max((len(name) for name in self._figures), default=0)
        for figure in self._figures.values():
            low, high = figure.spread
            line = f"  {figure.name:<{width}}  {figure.median:>12,.4g} {figure.unit:<9} [{low:,.4g} to {high:,.4g}]"
            print(line + (f"  goal {figure.goal}" if figure.goal else ""))
        print(json.dumps(self.document()), flush=True)


def repeat(measure: Callable[[], float], *, runs: int, warmup: int = 1) -> list[float]:
    """Calls `measure` `warmup + runs` times and returns the last `runs` values."""
    for _ in range(warmup):
        measure()
    return [measure() for _ in range(runs)]


def commit() -> dict[str, object]:
    """Commit of the checkout, and whether tracked files differ from it; `unknown` outside a git checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": True}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def machine() -> dict[str, object]:
    """What the figures depend on: processor, cores that this process may use, Python."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def _short(value: float) -> float:
    """Six significant digits: more are noise, and make the line unreadable."""
    return float(f"{value:.6g}")
