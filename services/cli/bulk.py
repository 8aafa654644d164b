# SPDX-License-Identifier: Apache-2.0
"""`ifab bulk`: jobs of many rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import grpc
import orjson
import typer

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.cli import options, progress
from services.cli.files.rows import read_rows
from services.cli.job import JobOutcome, run_job
from services.cli.ready import serving_engines
from services.cli.results import report_document
from services.cli.running import CommandError, run, sentence, write_columns, write_json
from services.cli.suite import Plan, Suite
from services.common.rpc import channel, translated

_CALL_S = 5.0

app = typer.Typer(no_args_is_help=True, help="Run jobs of many rows.")


@app.command("run")
def run_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Rows, one JSON object a line.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where results go, one a row.")],
    broker: options.Broker = options.BROKER_ADDRESS,
    up: Annotated[bool, typer.Option("--up", help="Start a suite for this job, and stop it afterwards.")] = False,
    engine: options.Engines = [options.ENGINE_DIRECTORY],  # noqa: B006 -- typer reads it, nobody writes to it
    job_id: Annotated[str, typer.Option("--job", help="Name of the job in logs and the report.")] = "",
    window: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most rows sent and not yet answered.")] = 4096,
    silence: Annotated[float, typer.Option(min=1, help="Seconds without any result that end the job.")] = 300.0,
    logs: options.Logs = options.LOG_DIRECTORY,
    grace: options.Grace = 10.0,
    start_limit: options.StartLimit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Run every row of FILE, write one result each, and print what the job cost.

    A row is {"id": "a", "prompt": "The capital of France is", "max_tokens": 8}; docs/bulk.md has its other fields. One
    that is wrong becomes a result with an error and stops nothing. Results come in the order in which rows end.

    Example: ifab bulk run examples/prompts.jsonl -o results.jsonl
    """
    job_id = job_id or f"{file.stem}-{time.strftime('%Y%m%dT%H%M%S')}"
    plan = Plan(tuple(engine), logs, grace_s=grace, start_limit_s=start_limit) if up else None
    run(_run(_Job(file, output, broker, plan, job_id, window, silence), as_json), as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Job:
    file: Path
    output: Path
    broker: str
    suite: Plan | None
    job_id: str
    window: int
    silence_s: float


async def _run(job: _Job, as_json: bool) -> None:
    try:
        outcome = await _outcome(job)
    except OSError as error:
        raise CommandError(f"{error.filename or job.output}: {error.strerror}") from error
    if outcome.broken_by is not None:
        raise CommandError(
            f"the job broke off: {sentence(outcome.broken_by)}; {outcome.rows - outcome.failed} of {outcome.rows} rows "
            f"are done, the others stand in {job.output} with an error"
        )
    _print_report(report_document(job.job_id, outcome), job.output, as_json=as_json)


async def _outcome(job: _Job) -> JobOutcome:
    total = _count_rows(job.file, not_=job.output)
    async with AsyncExitStack() as stack:
        broker = job.broker
        if job.suite is not None:
            suite = await stack.enter_async_context(Suite(job.suite))
            await serving_engines(suite, limit_s=job.suite.start_limit_s)
            broker = suite.broker.address
        to_broker = await stack.enter_async_context(channel(broker))
        await _check_reachable(to_broker)  # before older results are overwritten
        source = stack.enter_context(job.file.open("rb"))
        sink = stack.enter_context(job.output.open("wb"))
        deliver = _writer(sink, stack.enter_context(progress.shown(total)))
        return await run_job(
            to_broker, read_rows(source), deliver, job_id=job.job_id, window=job.window, silence_s=job.silence_s
        )


async def _check_reachable(to_broker: grpc.aio.Channel) -> None:
    stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
    with translated():
        await stub.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=_CALL_S)


def _writer(sink: BinaryIO, tell: Callable[[int, int], None]) -> Callable[[dict[str, Any]], None]:
    done = failed = 0

    def deliver(document: dict[str, Any]) -> None:
        nonlocal done, failed
        sink.write(orjson.dumps(document) + b"\n")
        done += 1
        failed += "error" in document
        tell(done, failed)

    return deliver


def _count_rows(file: Path, *, not_: Path) -> int:
    if not_.exists() and not_.samefile(file):
        raise CommandError(f"{not_} is the input; name another file for the results")
    with file.open("rb") as source:
        return sum(1 for line in source if line.strip())


def _print_report(report: dict[str, Any], output: Path, *, as_json: bool) -> None:
    if not as_json:
        write_columns(
            [
                ("rows", f"{report['requests']:,} ({report['failed']:,} failed)"),
                ("prompt tokens as sent", f"{report['prompt_tokens_logical']:,}"),
                ("prompt tokens computed", f"{report['prompt_tokens_computed']:,}"),
                ("  least possible", f"{report['prompt_tokens_bound']:,}"),
                ("tokens generated", f"{report['generated_tokens']:,}"),
                ("time", f"{report['wall_s']:,.1f} s"),
                ("tokens generated a second", f"{report['tokens_per_s']:,.1f}"),
                ("results", str(output)),
            ]
        )
    write_json(report)
