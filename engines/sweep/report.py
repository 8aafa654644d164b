# SPDX-License-Identifier: Apache-2.0
"""A sweep as rows for people, as a page to look at, and as evidence beside the engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from engines import evidence
from engines.plots.page import Page
from engines.plots.svg import Chart
from engines.wording import plain

if TYPE_CHECKING:
    from pathlib import Path

    from engines.sweep.searching import Curve, Point, SweepResult

KIND: Final = "sweep"
UNITS: Final = "tokens/s"
_LABELS: Final = {
    "budget": "token budget of a step",
    "slots": "slots",
    "chunk": "prompts over several steps (0: no, 1: yes)",
    "block": "tokens of a cache block",
    "heads": "shared heads that are kept",
}


def point_row(point: Point) -> str:
    """One line for people."""
    if not point.values:
        return f"{point.setting.text()}: not possible"
    low, high = point.spread
    return f"{point.setting.text()}: {point.median:,.1f} {UNITS} [{low:,.1f} to {high:,.1f}]"


def worth_rows(result: SweepResult) -> list[tuple[str, ...]]:
    """Cells for people, a heading first: the lever that is worth most first."""
    return [
        ("lever", "from", "to", "worth", "best over worst"),
        *(
            (each.lever, str(each.start), str(each.chosen), f"{each.gain:.3f} times", f"{each.reach:.3f} times")
            for each in result.worth
        ),
    ]


def summary(result: SweepResult) -> str:
    """What was found, in one sentence."""
    first = result.worth[0] if result.worth else None
    moved = [each for each in result.worth if each.start != each.chosen]
    most = (
        f"; worth most is {first.lever}, {first.gain:.2f} times" if first is not None and moved else "; no lever moved"
    )
    return (
        f"{result.best.setting.text()} gives {result.best.median:,.1f} {UNITS}, {result.gain:.2f} times what "
        f"{result.start.setting.text()} gives{most}"
    )


def document(result: SweepResult) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "start": _point(result.start),
        "best": _point(result.best),
        "gain": result.gain,
        "worth": [dataclasses.asdict(each) for each in result.worth],
        "curves": [
            {
                "lever": curve.lever,
                "chosen": curve.chosen,
                "flat": curve.flat,
                "points": [_point(point) for point in curve.points],
            }
            for curve in result.curves
        ],
    }


def page(result: SweepResult, engine: str, contract: str, command: str) -> bytes:
    """The sweep as one page of HTML; `contract` is the text of the one that is proposed."""
    out = Page(f"Sweep: {engine}")
    out.text(summary(result) + ".")
    out.command(command)
    heading, *cells = worth_rows(result)
    out.table(heading, cells, numbers=(1, 2, 3, 4))
    for curve in last_curves(result):
        chart = Chart(_LABELS[curve.lever], curve.lever, UNITS, x_log=curve.lever not in ("chunk", "heads"))
        chart.line(
            "median, with smallest and largest run",
            [(float(point.setting.value(curve.lever) or 0), point.median) for point in curve.points],
            low_high=[point.spread for point in curve.points],
            notes=[point_row(point) for point in curve.points],
        )
        out.chart(chart.svg())
    out.heading("Everything that was measured")
    out.table(
        ("lever", "setting", UNITS, "smallest", "largest"),
        [
            (curve.lever, point.setting.text(), f"{point.median:,.1f}", *(f"{side:,.1f}" for side in point.spread))
            for curve in result.curves
            for point in curve.points
        ],
        numbers=(2, 3, 4),
    )
    out.heading("The contract that is proposed")
    for line in contract.splitlines():
        out.command(line)
    return out.html()


def last_curves(result: SweepResult) -> list[Curve]:
    """The last curve of each lever."""
    return list({curve.lever: curve for curve in result.curves}.values())


def write_evidence(result: SweepResult, engine: Path, html: bytes, contract: bytes, command: str) -> Path:
    """Adds the sweep to what lies beside an engine directory, with the contract that it proposes.

    Raises:
        FabricError: As `engines.evidence.write`.
    """
    figures = [
        evidence.Figure("start", result.start.median, UNITS),
        evidence.Figure("best", result.best.median, UNITS),
        evidence.Figure("gain", result.gain, "1"),
    ]
    for each in result.worth:
        figures += [
            evidence.Figure(f"{each.lever}.start", each.start, "1"),
            evidence.Figure(f"{each.lever}.chosen", each.chosen, "1"),
            evidence.Figure(f"{each.lever}.worth", each.gain, "1"),
        ]
    for curve in last_curves(result):
        figures += [
            evidence.Figure(f"{curve.lever}[{point.setting.value(curve.lever)}]", point.median, UNITS)
            for point in curve.points
        ]
    return evidence.write(
        engine,
        kind=KIND,
        outcome=evidence.MEASURED,
        summary=plain(summary(result)),
        command=command,
        figures=figures,
        attachments={"sweep.html": html, "contract.json": contract},
    )


def _point(point: Point) -> dict[str, Any]:
    return {"setting": dataclasses.asdict(point.setting), "median": point.median, "values": list(point.values)}
