# SPDX-License-Identifier: Apache-2.0
"""`ifab engine audit`: are converted weights what their source says?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.running import CommandError, run_plain, write_columns, write_json
from services.common.contract import CONTRACT_FILE

if TYPE_CHECKING:
    from engines.audit.conversion import AuditResult


def audit(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="What was converted: a GGUF or safetensors file, or a folder.")
    ],
    converted: Annotated[
        Path,
        typer.Argument(metavar="CONVERTED", help="What became of it: such a file or folder, or an engine directory."),
    ],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    accept_unit_scales: Annotated[
        bool, typer.Option("--accept-unit-scales", help="Let scales of cache and activations all be exactly 1.0.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Tensors that are compared at a time.")] = 2,
    evidence: Annotated[
        bool, typer.Option("--evidence/--no-evidence", help="Whether the result is kept beside an engine directory.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare all weights of a conversion with their source; fails where one is not what it should be.

    Files are streamed: memory does not grow with the model. Each tensor is judged by what its number format explains,
    and each that fails is named with the reason. Beside an engine directory the result is kept as evidence.

    Example: ifab engine audit smollm2-f16.gguf build/engines/smollm2-135m --html audit.html
    """
    run_plain(
        lambda: _audit(source, converted, html, accept_unit_scales, jobs, evidence, as_json),
        as_json=as_json,
    )


def _audit(
    source: Path, converted: Path, html: Path | None, accept_units: bool, jobs: int, keep: bool, as_json: bool
) -> None:
    # Here and not above: the builders need packages (`engines` in pyproject.toml) that no other command does.
    from engines.audit import report
    from engines.audit.conversion import audit as compare_all
    from engines.wording import command_line

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\raudit: {done} of {total} tensors" + ("\n" if done == total else ""))
            sys.stderr.flush()

    result = compare_all(source, converted, accept_unit_scales=accept_units, jobs=jobs, progress=tell)
    flags = ["--accept-unit-scales"] if accept_units else []
    command = command_line(["ifab", "engine", "audit", source, converted, *flags])
    page = report.page(result, command)
    if html is not None:
        html.write_bytes(page)
    kept = None
    if keep and (converted / CONTRACT_FILE).is_file():
        kept = report.write_evidence(result, converted, page, command)
    if as_json:
        write_json({**report.document(result), "evidence": str(kept) if kept else None})
    else:
        _print(result, report.by_precision(result))
    if not result.holds:
        raise CommandError(report.summary(result), reported=as_json)


def _print(result: AuditResult, precisions: dict[str, dict[str, float]]) -> None:
    rows = [
        ("format", "tensors", "failing", "worst row error", "explained", "worst value error", "explained", "cosine")
    ]
    rows += [
        (
            dtype,
            str(row["tensors"]),
            str(row["failing"]),
            f"{row['max_row_error']:.4f}",
            f"{row['row_error_limit']:g}",
            f"{row['max_value_error']:.4f}",
            f"{row['value_error_limit']:g}",
            f"{row['min_cosine']:.6f}",
        )
        for dtype, row in precisions.items()
    ]
    write_columns(rows)
    for finding in result.findings:
        sys.stdout.write(f"! {finding.tensor}: {finding.sentence}\n")
    for note in result.notes:
        sys.stdout.write(f"  {note}\n")
    sys.stdout.write(
        f"{result.bytes_read / 1e6:,.0f} MB in {result.wall_s:.1f} s: {result.bytes_per_s / 1e9:.2f} GB/s, where a "
        f"plain read of the files gives {result.disk_bytes_per_s / 1e9:.2f}\n"
    )
    sys.stdout.flush()
