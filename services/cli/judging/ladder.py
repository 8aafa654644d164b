# SPDX-License-Identifier: Apache-2.0
"""`ifab engine ladder`: throughput at rising concurrency, of an engine, a broker, or a foreign server."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.judging import suites
from services.cli.running import CommandError, run, write_json
from services.common.contract import engine_digest
from services.common.errors import UnavailableError
from services.common.rpc import channel as plain_channel

if TYPE_CHECKING:
    import grpc

    from engines.ladder.climbing import Ladder
    from engines.ladder.plan import LadderPlan
    from engines.ladder.rung import Rung
    from engines.targets.broker import BrokerTarget
    from engines.targets.target import Target

_ALONE = "alone"
_SHARED = "with a resident engine"
_BUSY = "beside a busy engine"
_CLIENTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Command:
    engine: Path | None
    broker: str
    openai: str
    kserve: str
    model: str
    streams: bool
    resident: Path | None
    resident_clients: int
    """That keep the resident engine busy; 0: it is loaded and idle."""
    prompts: Path | None
    request_s: float
    start_limit_s: float
    words: tuple[str, ...]
    """The command line that repeats it."""

    @property
    def foreign(self) -> str:
        """Where a server that is not ours is; empty where it is."""
        return self.openai or self.kserve


def ladder(
    engine: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Engine directory to run and measure; or name a server.")
    ] = None,
    broker: Annotated[str, typer.Option(metavar="HOST:PORT", help="Measure a broker that runs.")] = "",
    openai: Annotated[
        str, typer.Option(metavar="URL", help="Measure an OpenAI-compatible server, http://HOST:PORT.")
    ] = "",
    kserve: Annotated[str, typer.Option(metavar="HOST:PORT", help="Measure a KServe v2 gRPC server.")] = "",
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of a foreign server.")] = "default",
    whole: Annotated[
        bool, typer.Option("--whole", help="Take answers of a KServe server whole, not streamed.")
    ] = False,
    rungs: Annotated[
        str, typer.Option(metavar="N,N,…", help="Clients; with --open, requests a second.")
    ] = "1,2,4,8,16,32,64,128,256,512,1024,2000",
    open_loop: Annotated[
        bool, typer.Option("--open", help="Send at random times, whether or not earlier requests have ended.")
    ] = False,
    rung_s: Annotated[float, typer.Option("--rung-s", min=0.05, max=3600, help="Seconds measured a rung.")] = 10.0,
    warmup_s: Annotated[float, typer.Option("--warmup-s", min=0, max=3600, help="Seconds before it.")] = 2.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens a request.")] = 32,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with `prompt`; random words where absent.")
    ] = None,
    resident: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Climb again with this engine loaded on the same machine.")
    ] = None,
    resident_clients: Annotated[
        int,
        typer.Option(
            "--resident-clients",
            metavar="N",
            min=0,
            max=_CLIENTS_MAX,
            help="Clients that keep the resident engine busy meanwhile; idle where absent.",
        ),
    ] = 0,
    error_share: Annotated[
        float, typer.Option("--error-share", min=0, max=1, help="Share of failed requests that ends the climb.")
    ] = 0.05,
    first_token_s: Annotated[
        float, typer.Option("--first-token-s", min=0, help="p99 of the wait for a first token that ends the climb.")
    ] = 60.0,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0, max=3600, help="Seconds for what is in flight after a rung.")
    ] = 30.0,
    request_s: Annotated[
        float, typer.Option("--request-s", min=0.1, max=3600, help="Deadline of one request.")
    ] = 120.0,
    html: suites.Html = None,
    evidence: suites.Keep = True,
    start_limit: suites.StartLimit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Measure first-token time, time between tokens, throughput and errors from one client up to two thousand.

    The climb ends by itself where too many requests fail or wait too long; nothing stays in flight. Of an engine
    directory the result is kept as evidence.

    Example: ifab engine ladder build/engines/smollm2-135m --rungs 1,4,16,64 --html ladder.html
    """
    # Here and not above: the judging packages need what no other command does (`engines` in pyproject.toml).
    from engines.ladder.plan import CLOSED, OPEN, LadderPlan

    try:
        levels = tuple(float(word) for word in rungs.split(","))
    except ValueError:
        raise typer.BadParameter(f"{rungs!r} is no list of numbers", param_hint="--rungs") from None
    plan = LadderPlan(
        levels,
        OPEN if open_loop else CLOSED,
        rung_s,
        warmup_s,
        max_tokens,
        drain_s=drain_s,
        error_share_max=error_share,
        first_token_max_s=first_token_s,
    )
    named = {
        "DIR": str(engine or ""), "--broker": broker, "--openai": openai, "--kserve": kserve,
    }  # fmt: skip
    if sum(bool(each) for each in named.values()) != 1:
        raise typer.BadParameter(f"name one thing to measure: one of {', '.join(named)}")
    if resident_clients and resident is None:
        raise typer.BadParameter("there is no --resident engine to keep busy", param_hint="--resident-clients")
    words = ["ifab", "engine", "ladder", *(str(engine),) * bool(engine)]
    for flag, value in (("--broker", broker), ("--openai", openai), ("--kserve", kserve), ("--resident", resident)):
        words += [flag, str(value)] if value else []
    words += ["--resident-clients", str(resident_clients)] if resident_clients else []
    words += ["--model", model] if openai or kserve else []
    words += ["--whole"] if kserve and whole else []
    words += ["--rungs", rungs, *(["--open"] if open_loop else []), "--max-tokens", str(max_tokens)]
    words += [
        "--rung-s",
        f"{rung_s:g}",
        "--warmup-s",
        f"{warmup_s:g}",
        *(["--prompts", str(prompts)] if prompts else []),
    ]
    for flag, limit, usual in (
        ("--error-share", error_share, 0.05),
        ("--first-token-s", first_token_s, 60.0),
        ("--drain-s", drain_s, 30.0),
        ("--request-s", request_s, 120.0),
    ):
        words += [flag, f"{limit:g}"] if limit != usual else []
    command = _Command(
        engine,
        broker,
        openai,
        kserve,
        model,
        not whole,
        resident,
        resident_clients,
        prompts,
        request_s,
        start_limit,
        tuple(words),
    )
    run(_measure(command, plan, html, evidence, as_json), as_json=as_json)


async def _measure(command: _Command, plan: LadderPlan, html: Path | None, keep: bool, as_json: bool) -> None:
    from engines.ladder import report
    from engines.wording import command_line

    plan.check()
    ladders = {_ALONE: await _climb(command, plan, _ALONE, resident=False, quiet=as_json)}
    if command.resident is not None:
        name = _BUSY if command.resident_clients else _SHARED
        ladders[name] = await _climb(command, plan, name, resident=True, quiet=as_json)
    line = command_line(command.words)
    page = report.page(ladders, line)
    if html is not None:
        await asyncio.to_thread(html.write_bytes, page)
    kept = report.write_evidence(ladders, command.engine, page, line) if keep and command.engine else None
    if as_json:
        write_json({**report.document(ladders), "evidence": str(kept) if kept else None})
    else:
        sys.stdout.write(report.summary(ladders) + "\n")


async def _climb(command: _Command, plan: LadderPlan, name: str, *, resident: bool, quiet: bool) -> Ladder:
    from engines.ladder import report, workload
    from engines.ladder.climbing import climb
    from engines.ladder.company import Company

    prompts = workload.read_prompts(command.prompts) if command.prompts else workload.synthetic(512)
    told = False

    def tell(rung: Rung) -> None:
        nonlocal told
        cells = report.row(rung)
        if not told and not quiet:
            told = True
            sys.stdout.write(f"{name}\n" + _aligned(report.COLUMNS) + "\n")
        (sys.stderr if quiet else sys.stdout).write(_aligned(cells) + "\n")
        sys.stdout.flush()

    async with AsyncExitStack() as stack:
        target, other = await _targets(command, plan, stack, resident=resident)
        company = None
        if other is not None and command.resident_clients:
            company = await stack.enter_async_context(
                Company(other, prompts, clients=command.resident_clients, max_tokens=plan.max_tokens)
            )
        try:
            return await climb(target, prompts, plan, on_rung=tell, company=company)
        except UnavailableError as error:
            if not command.foreign:
                raise
            raise CommandError(f"{command.foreign} gives no answer: {error.message}") from error


async def _targets(
    command: _Command, plan: LadderPlan, stack: AsyncExitStack, *, resident: bool
) -> tuple[Target, BrokerTarget | None]:
    """What is measured, and the resident engine where there is to be one."""
    from engines.targets.broker import BrokerTarget
    from engines.targets.kserve import KServeTarget
    from engines.targets.openai import OpenAiTarget

    other = command.resident if resident else None
    loaded = [each for each in (command.engine, other) if each is not None]
    others: BrokerTarget | None = None
    channels: tuple[grpc.aio.Channel, ...] = ()
    if loaded:
        clients = (plan.connections if command.engine else 0) + command.resident_clients
        suite = await stack.enter_async_context(
            suites.running(loaded, start_limit_s=command.start_limit_s, clients=max(1, clients))
        )
        channels = suite.channels
        for directory in loaded:
            idle = directory == other and not command.resident_clients
            if not idle and not suite.engines[engine_digest(directory)].contract.limits.max_output_tokens:
                raise CommandError(f"{directory} generates nothing, so there are no tokens to count")
        if other is not None:
            others = BrokerTarget(channels, engine_digest=engine_digest(other), limit_s=command.request_s)
    if command.engine is not None:
        return BrokerTarget(channels, engine_digest=engine_digest(command.engine), limit_s=command.request_s), others
    if command.broker:
        there = await suites.connected(stack, command.broker, plan.connections)
        return BrokerTarget(there, limit_s=command.request_s), others
    if command.openai:
        return OpenAiTarget(command.openai, model=command.model, limit_s=command.request_s), others
    count = -(-plan.connections // 256)
    foreign = [await stack.enter_async_context(plain_channel(command.kserve)) for _ in range(count)]
    return KServeTarget(foreign, model=command.model, streams=command.streams, limit_s=command.request_s), others


def _aligned(cells: tuple[str, ...]) -> str:
    widths = (8, 10, 11, 16, 10, 20, 10, 8, 6, 6, 8, 10)
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
