# SPDX-License-Identifier: Apache-2.0
"""`ifab engine`: engine directories, looked at without loading them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engines import inspect
from services.cli import engine_making, options
from services.cli.contracts import check_readable
from services.cli.judging.audit import audit
from services.cli.judging.compare import compare
from services.cli.judging.ladder import ladder
from services.cli.judging.probe_guided import probe_guided
from services.cli.judging.sweep import sweep
from services.cli.judging.verdict import verdict
from services.cli.running import CommandError, run_plain, write_columns, write_json
from services.common.contract import CONTRACT_FILE, all_findings, engine_digest, read, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.common.contract import Finding

_HELP = """Look at engine directories, build them and judge them.

Example: ifab engine describe build/engines/smollm2-135m
"""
app = typer.Typer(no_args_is_help=True, help=_HELP)
app.command("plan")(engine_making.plan)
app.command("build")(engine_making.build)
app.command("schema")(engine_making.schema)
app.command("evidence")(engine_making.evidence)
app.command("audit")(audit)
app.command("compare")(compare)
app.command("probe-guided")(probe_guided)
app.command("ladder")(ladder)
app.command("sweep")(sweep)
app.command("verdict")(verdict)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The engine directory.")]


@app.command()
def describe(directory: Directory, as_json: options.AsJson = False) -> None:
    """Show the contract of an engine: its limits, what it can do, how it was made.

    Fields that are absent or wrong are listed below it; the exit status is 0 all the same, and 1 where it is no JSON.

    Example: ifab engine describe build/engines/smollm2-135m
    """
    run_plain(lambda: _describe(directory, as_json), as_json=as_json)


@app.command()
def verify(directory: Directory, as_json: options.AsJson = False) -> None:
    """Check contract, configuration and the digest of every file; fails with all findings at once.

    Example: ifab engine verify build/engines/smollm2-135m
    """
    run_plain(lambda: _verify(directory, as_json), as_json=as_json)


def _describe(directory: Path, as_json: bool) -> None:
    check_readable(directory)
    contract, reading = read(directory)
    findings = all_findings(contract, reading)
    digest = engine_digest(directory)
    document = json.loads(to_json(contract))
    if as_json:
        write_json({"engine_digest": digest, "contract": document, "findings": _documents(findings)})
        return
    write_columns([("engine_digest", digest), *_leaves("", document)])
    for finding in findings:
        sys.stdout.write(f"! {_line(finding)}\n")


def _verify(directory: Path, as_json: bool) -> None:
    check_readable(directory)
    findings = inspect.verify(directory)
    if as_json:
        write_json({"engine_digest": engine_digest(directory), "findings": _documents(findings)})
    if findings:
        raise CommandError(f"{directory}: " + "; ".join(map(_line, findings)), reported=as_json)
    if not as_json:
        sys.stdout.write(f"{directory} holds what its contract says\n")


def _documents(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [{"path": each.path, "found": each.found, "expected": each.expected} for each in findings]


def _line(finding: Finding) -> str:
    return f"{finding.path or CONTRACT_FILE} is {finding.found}, expected {finding.expected}"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Paths and values of a contract, one line each; files and flat lists on one line."""
    match value:
        case dict():
            for name, inner in value.items():
                yield from _leaves(f"{path}.{name}" if path else name, inner)
        case [dict(), *_]:
            for number, inner in enumerate(value):
                yield f"{path}[{number}]", "  ".join(str(each) for each in inner.values())
        case list():
            yield path, ", ".join(map(str, value)) or "none"
        case _:
            yield path, json.dumps(value) if isinstance(value, bool) else str(value)
