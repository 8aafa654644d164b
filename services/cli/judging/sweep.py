# SPDX-License-Identifier: Apache-2.0
"""`ifab engine sweep`: which settings of an engine are worth how much here?"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.judging import suites
from services.cli.running import CommandError, run, write_columns, write_json
from services.common.contract import CONTRACT_FILE, engine_digest
from services.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.sweep.searching import Point
    from engines.sweep.settings import Engine, Setting


@dataclass(frozen=True, slots=True)
class _Command:
    directory: Path
    levers: tuple[str, ...]
    prompts: Path | None
    requests: int
    tokens: int
    runs: int
    flat: float
    journal: Path | None
    propose: Path | None
    start_limit_s: float
    words: tuple[object, ...]


def sweep(
    engine: Annotated[Path, typer.Argument(metavar="DIR", help="The engine directory.")],
    levers: Annotated[
        str, typer.Option(metavar="NAME,…", help="Of budget, slots, chunk, block, heads; tried in this order.")
    ] = "budget,slots,chunk,block,heads",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with `prompt`; random words where absent.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests of a run.")] = 64,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Tokens a request.")] = 32,
    runs: Annotated[int, typer.Option(min=1, max=100, help="Runs of a setting, after one that warms up.")] = 3,
    flat: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of the best rate that a smaller value may lose.")
    ] = 0.03,
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what is measured, and go on from what it holds.")
    ] = None,
    propose: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the engine with the proposed settings there.")
    ] = None,
    html: suites.Html = None,
    evidence: suites.Keep = True,
    start_limit: suites.StartLimit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Find the settings that give most tokens a second, the step's token budget first, and what each is worth.

    Each setting runs as an engine of its own through broker and worker, warmed up and repeated. A lever is left where
    its curve is flat, at the smallest value that gives all there is. The contract with the settings that are proposed
    is printed, and written with the whole engine by --propose.

    Example: ifab engine sweep build/engines/smollm2-135m --levers budget,slots --journal sweep.jsonl
    """
    words = ["ifab", "engine", "sweep", engine, "--levers", levers, "--requests", requests, "--tokens", tokens]
    words += ["--runs", runs, "--flat", flat, *(["--prompts", prompts] if prompts else [])]
    command = _Command(
        engine, tuple(word for word in levers.split(",") if word), prompts, requests, tokens, runs, flat, journal,
        propose, start_limit, tuple(words),
    )  # fmt: skip
    run(_sweep(command, html, evidence, as_json), as_json=as_json)


async def _sweep(command: _Command, html: Path | None, keep: bool, as_json: bool) -> None:
    from engines.ladder import workload
    from engines.sweep import report
    from engines.sweep.journal import Journal
    from engines.sweep.searching import search
    from engines.sweep.settings import open_engine
    from engines.sweep.variants import write_variant
    from engines.wording import command_line

    texts = workload.read_prompts(command.prompts) if command.prompts else workload.synthetic(command.requests)
    engine = open_engine(command.directory)
    line = command_line(command.words)
    work = hashlib.sha256(repr((engine_digest(command.directory), texts, command.requests, command.tokens)).encode())
    journal = Journal(command.journal, work.hexdigest())

    def tell(point: Point) -> None:
        sys.stderr.write(report.point_row(point) + "\n")
        sys.stderr.flush()

    async def measure(setting: Setting) -> Sequence[float]:
        try:
            return await _measured(command, engine, setting, texts)
        except CommandError as error:
            # Such as an engine that the provisioner refuses: the others are measured all the same.
            sys.stderr.write(f"{setting.text()}: {error}\n")
            raise InvalidArgumentError(str(error)) from error

    result = await search(engine, measure, journal, levers=command.levers, flat=command.flat, on_point=tell)
    with tempfile.TemporaryDirectory(prefix="ifab-") as folder:
        place = command.propose or Path(folder) / "proposed"
        contract = (write_variant(engine, place, result.best.setting) / CONTRACT_FILE).read_bytes()
    page = report.page(result, engine.contract.engine_id, contract.decode(), line)
    if html is not None:
        await asyncio.to_thread(html.write_bytes, page)
    kept = report.write_evidence(result, command.directory, page, contract, line) if keep else None
    if as_json:
        proposed = str(command.propose) if command.propose else None
        write_json({**report.document(result), "proposed": proposed, "evidence": str(kept) if kept else None})
    else:
        write_columns(report.worth_rows(result))
        sys.stdout.write(report.summary(result) + "\n" + contract.decode())


async def _measured(command: _Command, engine: Engine, setting: Setting, texts: Sequence[str]) -> list[float]:
    """Tokens a second of each run of one setting."""
    from engines.sweep.variants import write_variant
    from engines.targets.broker import BrokerTarget
    from ifabric.broker.v1 import broker_service_pb2

    with tempfile.TemporaryDirectory(prefix="ifab-", dir=command.directory.parent) as folder:
        directory = write_variant(engine, Path(folder) / "engine", setting)
        async with suites.running([directory], start_limit_s=command.start_limit_s) as suite:
            target = BrokerTarget(suite.channels, at_once=command.requests)
            rates = []
            for number in range(command.runs + 1):
                requests = []
                for at in range(command.requests):
                    request = broker_service_pb2.GenerationRequest(max_tokens=command.tokens, ignore_end=True)
                    # A head that an earlier run computed would make the next one faster.
                    request.cache_salt = f"run-{number}"
                    request.prompt.text = texts[at % len(texts)]
                    requests.append(request)
                began = time.monotonic()
                results = await target.answers(requests)
                generated = sum(result.usage.generated_tokens for result in results)
                rates.append(generated / (time.monotonic() - began))
    return rates[1:]
