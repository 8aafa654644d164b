# SPDX-License-Identifier: Apache-2.0
"""`ifab engine probe-guided`: does guided decoding do what the contract says, and at what cost?"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.judging import suites
from services.cli.running import CommandError, run, write_columns, write_json
from services.common.contract import Contract, engine_digest

if TYPE_CHECKING:
    from engines.probe_guided.probing import ProbeResult


def probe_guided(
    engine: Annotated[Path, typer.Argument(metavar="DIR", help="The engine directory.")],
    catalogue: Annotated[int, typer.Option(min=2, max=20_000, help="Names in the catalogue.")] = 3000,
    samples: Annotated[int, typer.Option(min=1, max=10_000, help="Answers checked for each constraint.")] = 16,
    html: suites.Html = None,
    evidence: suites.Keep = True,
    start_limit: suites.StartLimit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Ask an engine for answers under real constraints and check every one; fails where the contract is not kept.

    A catalogue of thousands of names, a nested schema, a regular expression, a grammar: is each taken, kept on every
    sample, and what does it cost to compile and per token? The result is kept as evidence.

    Example: ifab engine probe-guided build/engines/smollm2-135m --samples 16
    """
    run(_probe(engine, catalogue, samples, html, evidence, start_limit, as_json), as_json=as_json)


async def _probe(
    engine: Path, catalogue: int, samples: int, html: Path | None, keep: bool, start_limit_s: float, as_json: bool
) -> None:
    from engines.probe_guided import report
    from engines.probe_guided.probing import probe
    from engines.targets.broker import BrokerTarget
    from engines.wording import command_line

    def tell(result: ProbeResult) -> None:
        sys.stderr.write(f"probe: {result.name}: {'refused' if result.refused else f'{result.kept} kept'}\n")
        sys.stderr.flush()

    digest = engine_digest(engine)
    async with suites.running([engine], start_limit_s=start_limit_s) as suite:
        contract = Contract.from_proto(suite.engines[digest].contract)
        if not contract.limits.max_output_tokens:
            raise CommandError(f"{engine} generates nothing, so there is nothing to guide")
        target = BrokerTarget(suite.channels, engine_digest=digest)
        claimed = contract.capabilities.guided_decoding
        results = await probe(target, claimed, catalogue=catalogue, samples=samples, on_result=tell)
    words = ["ifab", "engine", "probe-guided", engine, "--catalogue", catalogue, "--samples", samples]
    command = command_line(words)
    page = report.page(results, contract.engine_id, command)
    if html is not None:
        await asyncio.to_thread(html.write_bytes, page)
    kept = report.write_evidence(results, engine, page, command) if keep else None
    if as_json:
        write_json({**report.document(results), "evidence": str(kept) if kept else None})
    else:
        write_columns([report.COLUMNS, *map(report.row, results)])
        sys.stdout.write(report.summary(results) + "\n")
    if wrong := report.sentences(results):
        raise CommandError("; ".join(f"{name}: {sentence}" for name, sentence in wrong), reported=as_json)
