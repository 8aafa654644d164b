# SPDX-License-Identifier: Apache-2.0
"""A verdict as rows for people, as one page, and as evidence beside the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engines import evidence
from engines.plots.page import Page
from engines.verdict.judgement import CLOSE, KEEP, OPEN, Verdict
from engines.wording import plain

if TYPE_CHECKING:
    from pathlib import Path

KIND: Final = "verdict"
_FIGURES_SHOWN: Final = 12
_GROUNDS_SHOWN: Final = 40
_FINDINGS_MAX: Final = 1024
_OUTCOMES: Final = {KEEP: evidence.HOLDS, CLOSE: evidence.FAILS, OPEN: evidence.MEASURED}


def document(verdict: Verdict) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "verdict": verdict.outcome,
        "sentence": verdict.sentence,
        "engine_digest": verdict.engine_digest,
        "missing": list(verdict.missing),
        "evidence": [
            {"kind": each.kind, "outcome": each.outcome, "digest": each.digest, "time": each.produced_by.time}
            for each in verdict.counted
        ],
        "grounds": [
            {
                "kind": each.kind,
                "subject": each.subject,
                "statement": each.statement,
                "command": each.command,
                "against": each.against,
            }
            for each in verdict.grounds
        ],
        "flawed": [{"path": str(each.path), "why": each.why} for each in verdict.flawed],
    }


def rows(verdict: Verdict) -> list[tuple[str, ...]]:
    """Cells for people, a heading first."""
    said = [
        (each.kind, "against" if each.against else "", each.subject, each.statement, each.command)
        for each in verdict.grounds[:_GROUNDS_SHOWN]
    ]
    return [("evidence", "", "about", "finding", "repeat it with"), *said]


def page(verdict: Verdict, engine: str, command: str) -> bytes:
    """The verdict as one page of HTML."""
    out = Page(f"Verdict: {engine}")
    kind = {KEEP: "holds", CLOSE: "fails", OPEN: "muted"}[verdict.outcome]
    out.text(verdict.sentence + ".", kind=kind)
    out.command(command)
    out.heading("What it rests on")
    heading, *cells = rows(verdict)
    out.table(heading, cells)
    if (more := len(verdict.grounds) - _GROUNDS_SHOWN) > 0:
        out.text(f"And {more} more findings, in the documents.", kind="muted")
    for each in verdict.counted:
        out.heading(f"{each.kind}, {each.produced_by.time}")
        out.text(f"{each.produced_by.machine}; document {each.digest[:16]}", kind="muted")
        shown = each.figures[:_FIGURES_SHOWN]
        if shown:
            out.table(("figure", "value", "unit"), [(f.name, f"{f.value:.6g}", f.unit) for f in shown], numbers=(1,))
    for flawed in verdict.flawed:
        out.text(f"Does not count: {flawed.path.name}: {flawed.why}", kind="fails")
    return out.html()


def write_evidence(verdict: Verdict, engine: Path, html: bytes, command: str) -> Path:
    """Adds the verdict to what lies beside an engine directory.

    Raises:
        FabricError: As `engines.evidence.write`.
    """
    return evidence.write(
        engine,
        kind=KIND,
        outcome=_OUTCOMES[verdict.outcome],
        summary=plain(verdict.sentence),
        command=command,
        findings=[
            evidence.EvidenceFinding(plain(f"{each.kind}: {each.subject}"), plain(each.statement), plain(each.command))
            for each in verdict.grounds[:_FINDINGS_MAX]
        ],
        inputs=[evidence.Input(plain(each.kind, 128), each.digest) for each in verdict.counted[:64]],
        attachments={"verdict.html": html},
    )
