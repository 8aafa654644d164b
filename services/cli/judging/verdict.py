# SPDX-License-Identifier: Apache-2.0
"""`ifab engine verdict`: one page that keeps or closes the way that made an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from services.cli.judging import suites
from services.cli.running import CommandError, run_plain, write_columns, write_json
from services.common.contract import engine_digest

_REQUIRED = "audit,comparison,guided-probe,ladder"


def verdict(
    engine: Annotated[Path, typer.Argument(metavar="DIR", help="The engine directory.")],
    required: Annotated[
        str, typer.Option(metavar="KIND,…", help="Kinds of evidence without which nothing is decided.")
    ] = _REQUIRED,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page.")] = None,
    evidence: suites.Keep = True,
    as_json: options.AsJson = False,
) -> None:
    """Judge an engine by the evidence beside it: keep, close, or open where something was not made.

    Nothing is measured. The newest document of each kind counts, and each finding is told with the command that repeats
    it. The exit status is 0 for keep and 1 otherwise.

    Example: ifab engine verdict build/engines/smollm2-135m --html verdict.html
    """
    run_plain(lambda: _verdict(engine, required, html, evidence, as_json), as_json=as_json)


def _verdict(engine: Path, required: str, html: Path | None, keep: bool, as_json: bool) -> None:
    from engines.verdict import report
    from engines.verdict.judgement import KEEP, judge
    from engines.wording import command_line

    kinds = [word for word in map(str.strip, required.split(",")) if word]
    found = judge(engine, engine_digest(engine), required=kinds)
    command = command_line(["ifab", "engine", "verdict", engine, "--required", required])
    page = report.page(found, engine.name, command)
    if html is not None:
        html.write_bytes(page)
    kept = report.write_evidence(found, engine, page, command) if keep else None
    if as_json:
        write_json({**report.document(found), "written": str(kept) if kept else None})
    else:
        write_columns(report.rows(found))
        sys.stdout.write(found.sentence + "\n")
    if found.outcome != KEEP:
        raise CommandError(f"{engine}: {found.sentence}", reported=as_json)
