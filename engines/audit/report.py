# SPDX-License-Identifier: Apache-2.0
"""An audit as a page to look at, as a document for machines, and as evidence beside an engine."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines import evidence
from engines.audit.measure import BINS_AN_OCTAVE, OCTAVES
from engines.plots.page import Page
from engines.plots.svg import Chart
from engines.sources import digest
from engines.wording import plain

if TYPE_CHECKING:
    from pathlib import Path

    from engines.audit.conversion import AuditResult, TensorResult

KIND: Final = "audit"
_SHOWN: Final = 60
"""Tensors in the page's table, the worst ones; failing ones are all shown."""
_HISTOGRAMS: Final = 6
_FINDINGS_MAX: Final = 1024


def by_precision(result: AuditResult) -> dict[str, dict[str, Any]]:
    """For each number format of the conversion: tensors, failing ones, worst errors and what the format explains."""
    groups: dict[str, list[TensorResult]] = defaultdict(list)
    for each in result.tensors:
        groups[each.dtype].append(each)
    return {
        dtype: {
            "tensors": len(members),
            "failing": sum(each.reason is not None for each in members),
            "max_row_error": max(each.measured.max_row_error for each in members),
            "row_error_limit": members[0].limit.row_error,
            "max_value_error": max(each.measured.max_value_error for each in members),
            "value_error_limit": members[0].limit.value_error,
            "min_cosine": min(each.measured.cosine for each in members),
        }
        for dtype, members in sorted(groups.items())
    }


def document(result: AuditResult) -> dict[str, Any]:
    """Everything that was found, for `--json`."""
    return {
        "source": str(result.source),
        "converted": str(result.converted),
        "holds": result.holds,
        "precisions": by_precision(result),
        "findings": [{"tensor": f.tensor, "kind": f.kind, "sentence": f.sentence} for f in result.findings],
        "notes": list(result.notes),
        "bytes_read": result.bytes_read,
        "wall_s": round(result.wall_s, 3),
        "gb_per_s": round(result.bytes_per_s / 1e9, 3),
        "disk_gb_per_s": round(result.disk_bytes_per_s / 1e9, 3),
        "tensors": [_tensor(each) for each in result.tensors],
    }


def summary(result: AuditResult) -> str:
    """The verdict in one sentence."""
    wrong = sum(each.reason is not None for each in result.tensors)
    formats = ", ".join(f"{row['tensors']} {dtype}" for dtype, row in by_precision(result).items())
    if result.holds:
        return f"all {len(result.tensors)} tensors ({formats}) are what the source says"
    first = result.findings[0]
    return (
        f"{wrong} of {len(result.tensors)} tensors ({formats}) are not what the source says, and there are "
        f"{len(result.findings)} findings; the first: {first.tensor}: {first.sentence}"
    )


def page(result: AuditResult, command: str) -> bytes:
    """The audit as one page of HTML."""
    out = Page(f"Conversion audit: {result.converted.name}")
    out.text(("Holds: " if result.holds else "Fails: ") + summary(result), kind="holds" if result.holds else "fails")
    out.command(command)
    out.text(
        f"{result.source} against {result.converted}; {result.bytes_read / 1e9:.2f} GB compared at "
        f"{result.bytes_per_s / 1e9:.2f} GB/s; a plain read of the files gives "
        f"{result.disk_bytes_per_s / 1e9:.2f} GB/s.",
        kind="muted",
    )
    if result.findings:
        out.heading("What is wrong")
        out.table(("tensor", "what", "in words"), [(f.tensor, f.kind, f.sentence) for f in result.findings])
    for note in result.notes:
        out.text(f"Note: {note}.", kind="muted")
    out.heading("By number format")
    out.table(
        ("format", "tensors", "failing", "worst row error", "explained", "worst value error", "explained", "cosine"),
        [
            (
                dtype, str(row["tensors"]), str(row["failing"]), f"{row['max_row_error']:.4f}",
                f"{row['row_error_limit']:g}", f"{row['max_value_error']:.4f}", f"{row['value_error_limit']:g}",
                f"{row['min_cosine']:.6f}",
            )
            for dtype, row in by_precision(result).items()
        ],
        numbers=range(1, 8),
    )  # fmt: skip
    out.heading("Every tensor")
    out.chart(_errors(result))
    out.chart(_cosines(result))
    worst = sorted(result.tensors, key=lambda each: (each.reason is None, -_strain(each)))
    out.heading("Ratios of the worst tensors")
    out.text("How often the converted value is so many times the source's; a format's rounding gives a hill around 1.")
    out.chart(_histograms(worst[:_HISTOGRAMS]))
    failing = sum(each.reason is not None for each in worst)
    shown = worst[: max(_SHOWN, failing)]
    out.heading(f"The {len(shown)} worst of {len(worst)} tensors")
    out.table(
        ("tensor", "source", "format", "row error", "value error", "relative error", "cosine", "ratio 1 / 50 / 99 %",
         "sign flips", "zeros", "NaN or infinite", "verdict"),
        [_row(each) for each in shown],
        numbers=range(3, 11),
    )  # fmt: skip
    return out.html()


def write_evidence(result: AuditResult, engine: Path, html: bytes, command: str) -> Path:
    """Adds the audit to what lies beside an engine directory.

    Raises:
        FabricError: As `engines.evidence.write`.
    """
    figures = [
        evidence.Figure("tensors", len(result.tensors), "1"),
        evidence.Figure("bytes_read", result.bytes_read, "B"),
        evidence.Figure("audited", result.bytes_per_s / 1e9, "GB/s"),
        evidence.Figure("disk", result.disk_bytes_per_s / 1e9, "GB/s"),
    ]
    for dtype, row in by_precision(result).items():
        figures += [evidence.Figure(f"{dtype}.{name}", float(value), "1") for name, value in row.items()]
    findings = [
        evidence.EvidenceFinding(plain(f.tensor), plain(f.sentence), command) for f in result.findings[:_FINDINGS_MAX]
    ]
    inputs = [evidence.Input(result.source.name, digest(result.source))] if result.source.is_file() else []
    return evidence.write(
        engine,
        kind=KIND,
        outcome=evidence.HOLDS if result.holds else evidence.FAILS,
        summary=plain(summary(result)),
        command=command,
        figures=figures,
        findings=findings,
        inputs=inputs,
        attachments={"audit.html": html},
    )


def _tensor(each: TensorResult) -> dict[str, Any]:
    m = each.measured
    return {
        "role": each.role,
        "name": each.name,
        "source_name": each.source_name,
        "dtype": each.dtype,
        "shape": [each.rows, each.columns],
        "holds": each.reason is None,
        "reason": each.reason.sentence if each.reason else "",
        "error": m.error,
        "cosine": m.cosine,
        "factor": m.factor,
        "max_row_error": m.max_row_error,
        "max_value_error": m.max_value_error,
        "max_relative_error": m.max_relative_error,
        "ratio_quantiles": {str(share): m.quantile(share) for share in (0.01, 0.25, 0.5, 0.75, 0.99)},
        "sign_flips": m.sign_flips,
        "zeros": m.zeros,
        "source_zeros": m.source_zeros,
        "lost": m.lost,
        "nonfinite": m.nonfinite,
        "bad_rows": m.bad_rows,
    }


def _row(each: TensorResult) -> tuple[str, ...]:
    m = each.measured
    return (
        each.name,
        each.source_name,
        each.dtype,
        f"{m.max_row_error:.4g}",
        f"{m.max_value_error:.4g}",
        f"{m.max_relative_error:.4g}",
        f"{m.cosine:.6f}",
        " / ".join(f"{m.quantile(share):.3f}" for share in (0.01, 0.5, 0.99)),
        str(m.sign_flips),
        f"{m.zeros} of {m.source_zeros}" if m.source_zeros else str(m.zeros),
        str(m.nonfinite),
        each.reason.sentence if each.reason else "holds",
    )


def _strain(each: TensorResult) -> float:
    """How much of what its format explains a tensor uses."""
    return max(
        each.measured.max_row_error / each.limit.row_error, each.measured.max_value_error / each.limit.value_error
    )


def _places(result: AuditResult) -> dict[bool, list[tuple[int, TensorResult]]]:
    groups: dict[bool, list[tuple[int, TensorResult]]] = {True: [], False: []}
    for number, each in enumerate(result.tensors):
        groups[each.reason is None].append((number, each))
    return groups


def _errors(result: AuditResult) -> str:
    chart = Chart(
        "Worst error, as a share of what the format explains", "tensor, in the order of the model", "share", y_log=True
    )
    chart.rule(1.0, "explained")
    for holds, members in _places(result).items():
        chart.dots(
            "holds" if holds else "fails",
            [(float(number), max(_strain(each), 1e-4)) for number, each in members],
            notes=[f"{each.name}: {_strain(each):.3g}" for _, each in members],
            colour="#1f6feb" if holds else "#c92a2a",
        )
    return chart.svg()


def _cosines(result: AuditResult) -> str:
    chart = Chart("Distance in direction: 1 - cosine", "tensor, in the order of the model", "1 - cosine", y_log=True)
    for holds, members in _places(result).items():
        chart.dots(
            "holds" if holds else "fails",
            [(float(number), max(1 - each.measured.cosine, 1e-12)) for number, each in members],
            notes=[f"{each.name}: cosine {each.measured.cosine:.6f}" for _, each in members],
            colour="#1f6feb" if holds else "#c92a2a",
        )
    return chart.svg()


def _histograms(tensors: list[TensorResult]) -> str:
    chart = Chart("Converted over source", "ratio", "share of values", x_log=True, y_log=True)
    for each in tensors:
        counts = each.measured.ratios
        total = int(counts.sum())
        filled = np.flatnonzero(counts)
        chart.line(
            each.name,
            [
                (float(2.0 ** ((at + 0.5) / BINS_AN_OCTAVE - OCTAVES)), float(counts[at]) / total)
                for at in filled.tolist()
            ],
        )
    return chart.svg()
