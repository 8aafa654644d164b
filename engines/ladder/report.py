# SPDX-License-Identifier: Apache-2.0
"""A ladder as rows for people, as a page to look at, as a document for machines, and as evidence beside an engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from engines import evidence
from engines.ladder.plan import CLOSED
from engines.plots.page import Page
from engines.plots.svg import Chart
from engines.wording import plain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engines.ladder.climbing import Ladder
    from engines.ladder.rung import Rung

KIND: Final = "ladder"
COLUMNS: Final = (
    "level", "tokens/s", "requests/s", "first token p50", "p99", "between tokens p50", "p99", "failed", "shed", "cut",
    "waiting", "beside",
)  # fmt: skip


def row(rung: Rung) -> tuple[str, ...]:
    """The cells of one rung, as COLUMNS calls them: times in milliseconds, `beside` the other engine's tokens/s."""
    return (
        f"{rung.level:g}",
        f"{rung.tokens_per_s:,.1f}",
        f"{rung.requests_per_s:,.2f}",
        f"{rung.first_token.p50 * 1e3:,.0f} ms",
        f"{rung.first_token.p99 * 1e3:,.0f} ms",
        f"{rung.per_token.p50 * 1e3:,.1f} ms",
        f"{rung.per_token.p99 * 1e3:,.1f} ms",
        ", ".join(f"{count} {reason}" for reason, count in rung.errors.items()) or "0",
        str(rung.shed),
        str(rung.cut),
        str(rung.waiting),
        _beside(rung),
    )


def _beside(rung: Rung) -> str:
    if rung.company is None:
        return "-"
    failed = f", {rung.company.failed} failed" if rung.company.failed else ""
    return f"{rung.company_tokens_per_s:,.1f}{failed}"


def summary(ladders: Mapping[str, Ladder]) -> str:
    """What came out, in one sentence."""
    parts = []
    for name, ladder in ladders.items():
        best = ladder.best
        if best is not None:
            level = f"{best.level:g} clients" if ladder.plan.mode == CLOSED else f"{best.level:g} requests/s"
            ended = f" (ended early: {ladder.ended})" if ladder.ended else ""
            parts.append(f"{name}: at most {best.tokens_per_s:,.1f} tokens/s, at {level}{ended}")
    return "; ".join(parts) or "nothing was measured"


def document(ladders: Mapping[str, Ladder]) -> dict[str, Any]:
    """Everything that was measured, for `--json`."""
    return {
        name: {
            "target": ladder.target,
            "plan": dataclasses.asdict(ladder.plan),
            "ended": ladder.ended,
            "rungs": [
                {
                    **dataclasses.asdict(rung),
                    "tokens_per_s": rung.tokens_per_s,
                    "requests_per_s": rung.requests_per_s,
                    "error_share": rung.error_share,
                    "company_tokens_per_s": rung.company_tokens_per_s,
                }
                for rung in ladder.rungs
            ],
        }
        for name, ladder in ladders.items()
    }


def page(ladders: Mapping[str, Ladder], command: str) -> bytes:
    """The ladder as one page of HTML."""
    out = Page("Throughput ladder")
    out.text(summary(ladders))
    out.command(command)
    first = next(iter(ladders.values()))
    x = "clients" if first.plan.mode == CLOSED else "requests a second"
    throughput = Chart("Throughput", x, "tokens/s", x_log=True)
    waiting = Chart("Time to the first token", x, "seconds", x_log=True, y_log=True)
    between = Chart("Time between tokens", x, "seconds", x_log=True, y_log=True)
    for name, ladder in ladders.items():
        rungs = ladder.rungs
        throughput.line(name, [(each.level, each.tokens_per_s) for each in rungs])
        waiting.line(f"{name}, p50", [(each.level, each.first_token.p50) for each in rungs])
        waiting.line(f"{name}, p99", [(each.level, each.first_token.p99) for each in rungs])
        between.line(f"{name}, p50", [(each.level, each.per_token.p50) for each in rungs])
        between.line(f"{name}, p99", [(each.level, each.per_token.p99) for each in rungs])
    for chart in (throughput, waiting, between):
        out.chart(chart.svg())
    for name, ladder in ladders.items():
        out.heading(f"{name}: {ladder.target}")
        out.text(
            f"{ladder.plan.mode} loop, {ladder.plan.max_tokens} tokens a request, {ladder.plan.rung_s:g} s a rung "
            f"after {ladder.plan.warmup_s:g} s of the same load.",
            kind="muted",
        )
        if ladder.ended:
            out.text(f"Ended early: {ladder.ended}.", kind="fails")
        out.table(COLUMNS, [row(each) for each in ladder.rungs], numbers=range(7))
    return out.html()


def write_evidence(ladders: Mapping[str, Ladder], engine: Path, html: bytes, command: str) -> Path:
    """Adds the ladder to what lies beside an engine directory.

    Raises:
        FabricError: As `engines.evidence.write`.
    """
    figures = []
    for name, ladder in ladders.items():
        for rung in ladder.rungs:
            where = f"{name}[{rung.level:g}]"
            figures += [
                evidence.Figure(f"{where}.tokens_per_s", rung.tokens_per_s, "1/s"),
                evidence.Figure(f"{where}.requests_per_s", rung.requests_per_s, "1/s"),
                evidence.Figure(f"{where}.first_token_p50", rung.first_token.p50, "s"),
                evidence.Figure(f"{where}.first_token_p99", rung.first_token.p99, "s"),
                evidence.Figure(f"{where}.per_token_p50", rung.per_token.p50, "s"),
                evidence.Figure(f"{where}.per_token_p99", rung.per_token.p99, "s"),
                evidence.Figure(f"{where}.failed", rung.failed, "1"),
            ]
            if rung.company is not None:
                figures.append(evidence.Figure(f"{where}.company_tokens_per_s", rung.company_tokens_per_s, "1/s"))
    ended = [
        evidence.EvidenceFinding(plain(name), plain(ladder.ended), command)
        for name, ladder in ladders.items()
        if ladder.ended
    ]
    return evidence.write(
        engine,
        kind=KIND,
        outcome=evidence.MEASURED,
        summary=plain(summary(ladders)),
        command=command,
        figures=figures,
        findings=ended,
        attachments={"ladder.html": html},
    )
