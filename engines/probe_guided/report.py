# SPDX-License-Identifier: Apache-2.0
"""A probe as rows for people, as a page to look at, and as evidence beside the engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from engines import evidence
from engines.plots.page import Page
from engines.wording import plain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engines.probe_guided.probing import ProbeResult

KIND: Final = "guided-probe"
COLUMNS: Final = (
    "constraint", "kind", "claimed", "taken", "kept", "cut", "broken", "by chance", "compile", "first token", "a token",
    "a token, free",
)  # fmt: skip


def row(result: ProbeResult) -> tuple[str, ...]:
    """The cells of one result, as COLUMNS calls them; times in milliseconds."""
    return (
        result.name,
        result.word,
        "yes" if result.claimed else "no",
        "no" if result.refused else "yes",
        f"{result.kept} of {result.samples}",
        str(result.cut),
        str(len(result.broken)),
        str(result.kept_unguided),
        f"{result.compile_s * 1e3:.1f} ms",
        f"{result.first_s * 1e3:.1f} ms",
        f"{result.per_token_s * 1e3:.2f} ms",
        f"{result.per_token_unguided_s * 1e3:.2f} ms",
    )


def sentences(results: Sequence[ProbeResult]) -> list[tuple[str, str]]:
    """What is wrong: constraint and sentence."""
    wrong = []
    for each in results:
        if each.claimed and each.refused:
            wrong.append((each.name, f"the contract lists {each.word}, and the engine refuses it: {each.refused}"))
        elif each.refused:
            continue
        elif not each.claimed:
            wrong.append((each.name, f"the contract does not list {each.word}, and the engine takes it"))
        elif each.broken:
            wrong.append(
                (
                    each.name,
                    f"{len(each.broken)} of {each.samples} answers do not keep it, the first: {each.broken[0]!r}",
                )
            )
    return wrong


def summary(results: Sequence[ProbeResult]) -> str:
    """What came out, in one sentence."""
    taken = [each for each in results if not each.refused]
    if not taken:
        return f"the engine takes none of {len(results)} constraints"
    kept = sum(each.kept + each.cut for each in taken)
    asked = sum(each.samples for each in taken)
    slowest = max(taken, key=lambda each: each.compile_s)
    return (
        f"{len(taken)} of {len(results)} constraints are taken, and {kept} of {asked} answers keep them; the longest "
        f"to compile is the {slowest.name}, {slowest.compile_s * 1e3:.0f} ms"
    )


def document(results: Sequence[ProbeResult]) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {"constraints": [{**dataclasses.asdict(each), "holds": each.holds} for each in results]}


def page(results: Sequence[ProbeResult], engine: str, command: str) -> bytes:
    """The probe as one page of HTML."""
    wrong = sentences(results)
    out = Page(f"Guided decoding: {engine}")
    out.text(summary(results), kind="fails" if wrong else "holds")
    out.command(command)
    for name, sentence in wrong:
        out.text(f"{name}: {sentence}.", kind="fails")
    out.table(COLUMNS, [row(each) for each in results], numbers=range(4, 12))
    for each in results:
        if each.refused:
            out.text(f"{each.name}: {each.refused}", kind="muted")
    return out.html()


def write_evidence(results: Sequence[ProbeResult], engine: Path, html: bytes, command: str) -> Path:
    """Adds the probe to what lies beside an engine directory.

    Raises:
        FabricError: As `engines.evidence.write`.
    """
    figures = []
    for each in results:
        figures += [
            evidence.Figure(f"{each.name}.samples", each.samples, "1"),
            evidence.Figure(f"{each.name}.kept", each.kept, "1"),
            evidence.Figure(f"{each.name}.broken", len(each.broken), "1"),
            evidence.Figure(f"{each.name}.compile", each.compile_s, "s"),
            evidence.Figure(f"{each.name}.per_token", each.per_token_s, "s"),
            evidence.Figure(f"{each.name}.per_token_unguided", each.per_token_unguided_s, "s"),
        ]
    wrong = sentences(results)
    return evidence.write(
        engine,
        kind=KIND,
        outcome=evidence.FAILS if wrong else evidence.HOLDS,
        summary=plain(summary(results)),
        command=command,
        figures=figures,
        findings=[evidence.EvidenceFinding(plain(name), plain(sentence), command) for name, sentence in wrong],
        attachments={"guided-probe.html": html},
    )
