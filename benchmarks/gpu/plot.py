# SPDX-License-Identifier: Apache-2.0
"""Draws what a stage measured, as SVG.

    python3 -m benchmarks.gpu.plot FOLDER/sweep.json docs/plots/card-sweep.svg

Of `sweep` tokens a second over the token budget, a line for each number of slots; of `ladder` tokens a second over
clients, with a resident engine and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from engines.plots.svg import Chart


def sweep(figures: dict[str, Any]) -> Chart:
    """Tokens a second over the token budget."""
    chart = Chart("Token budget and slots", "tokens of a step's budget", "prompt and output tokens/s", x_log=True)
    for slots in sorted({row["slots"] for row in figures["rows"]}):
        rows = [row for row in figures["rows"] if row["slots"] == slots]
        points = [(row["budget"], statistics.mean(row["tokens_per_s"])) for row in rows]
        spreads = [(min(row["tokens_per_s"]), max(row["tokens_per_s"])) for row in rows]
        chart.line(f"{slots} slots", points, low_high=spreads)
    return chart


def ladder(figures: dict[str, Any]) -> Chart:
    """Tokens a second over clients."""
    chart = Chart("The ladder", "clients", "output tokens/s", x_log=True)
    for name, climbed in figures["ladder"].items():
        if isinstance(climbed, dict):
            chart.line(name, [(rung["level"], rung["tokens_per_s"]) for rung in climbed["rungs"]])
    return chart


CHARTS = {"sweep": sweep, "ladder": ladder}


def main() -> None:
    """Draws one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path)
    parser.add_argument("svg", type=Path)
    words = parser.parse_args()
    figures = json.loads(words.figures.read_text())
    words.svg.write_text(CHARTS[figures["stage"]](figures).file())


if __name__ == "__main__":
    main()
