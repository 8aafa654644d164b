# SPDX-License-Identifier: Apache-2.0
"""`ifab bulk run`: a job from file to results."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import orjson
import typer

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli import options, progress
from services.cli.connection import channel, in_the_clear
from services.cli.files.formats import Format, rows_of
from services.cli.files.opening import look
from services.cli.job import JobOutcome, run_job
from services.cli.jobs import analysis, verbs, whole
from services.cli.jobs.calls import Jobs, Patience, outlasted
from services.cli.jobs.document import job_report
from services.cli.jobs.output import check_writable, errors_beside
from services.cli.jobs.spec import Wishes
from services.cli.ready import serving_engines
from services.cli.results import report_document
from services.cli.running import CommandError, run, sentence, write_columns, write_json
from services.cli.suite import Plan, Suite

_HELP = """Run jobs of many rows: send them, follow them, collect their results.

Example: ifab bulk run examples/prompts.jsonl -o results.jsonl
"""
app = typer.Typer(no_args_is_help=True, help=_HELP)
verbs.add_to(app)


@app.command("run")
def run_command(
    file: verbs.File,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where results go, one a row.")],
    errors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where rows go that failed; OUTPUT.errors.jsonl if absent.")
    ] = None,
    format_: verbs.FormatOption = Format.AUTO,
    broker: options.Broker = options.BROKER_ADDRESS,
    provisioner: options.Provisioner = options.PROVISIONER_ADDRESS,
    up: Annotated[bool, typer.Option("--up", help="Start a suite for this job, and stop it afterwards.")] = False,
    engine: options.Engines = [options.ENGINE_DIRECTORY],  # noqa: B006 -- typer reads it, nobody writes to it
    fresh: Annotated[bool, typer.Option("--fresh", help="Run everything again, whatever an earlier run left.")] = False,
    job_id: verbs.JobName = "",
    tenant: verbs.Tenant = "",
    priority: verbs.Priority = None,
    deadline: verbs.Deadline = None,
    engine_id: options.EngineId = "",
    engine_digest: options.EngineDigest = "",
    any_digest: verbs.AnyDigest = False,
    defaults: verbs.Defaults = "",
    predict: Annotated[
        bool, typer.Option("--predict", help="Analyze FILE first, and hold the run to what that predicts.")
    ] = False,
    prediction: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hold the run to this prediction, which `bulk analyze --json` wrote."),
    ] = None,
    window: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Most rows open at a broker that keeps no jobs.")
    ] = 4096,
    silence: verbs.Silence = 300.0,
    logs: options.Logs = options.LOG_DIRECTORY,
    grace: options.Grace = 10.0,
    start_limit: options.StartLimit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Run every row of FILE, write one result each, and print what the job cost.

    A row is {"id": "a", "prompt": "The capital of France is", "max_tokens": 8}; docs/bulk.md has its other fields and
    the other formats. One that is wrong becomes an error and stops nothing; the exit status is 0 where no row failed,
    else 1. Killed at any moment, the same command goes on where it was.

    Example: ifab bulk run examples/prompts.jsonl -o results.jsonl
    """
    plan = Plan(tuple(engine), logs, grace_s=grace, start_limit_s=start_limit) if up else None
    wishes = Wishes(job_id, tenant, priority, deadline, engine_id, engine_digest, any_digest, defaults)
    command = _Command(
        str(file), format_, output, errors or errors_beside(output), wishes, broker, provisioner, plan, fresh, window,
        silence, predict, prediction,
    )  # fmt: skip
    run(_run(command, as_json), as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Command:
    file: str
    format: Format
    output: Path
    errors: Path
    wishes: Wishes
    broker: str
    provisioner: str
    suite: Plan | None
    fresh: bool
    window: int
    silence_s: float
    predict: bool
    prediction: Path | None


@app.command("analyze")
def analyze_command(
    file: verbs.File,
    format_: verbs.FormatOption = Format.AUTO,
    broker: options.Broker = options.BROKER_ADDRESS,
    provisioner: options.Provisioner = options.PROVISIONER_ADDRESS,
    job_id: verbs.JobName = "",
    tenant: verbs.Tenant = "",
    engine_id: options.EngineId = "",
    engine_digest: options.EngineDigest = "",
    any_digest: verbs.AnyDigest = False,
    defaults: verbs.Defaults = "",
    silence: verbs.Silence = 600.0,
    as_json: options.AsJson = False,
) -> None:
    """Say what the shared prompts of FILE are worth and what a run would take; no engine is asked, nothing is kept.

    Example: ifab bulk analyze examples/prompts.jsonl --json > prediction.json
    """
    wishes = Wishes(job_id, tenant, None, None, engine_id, engine_digest, any_digest, defaults)

    async def work() -> None:
        async with channel(broker) as to_broker:
            patience = verbs.first_patience(silence)
            given = await whole.open_input(file, format_, wishes, to_broker, provisioner, patience)
            verbs.say(given.source.note)
            said = await analysis.analyze(to_broker, given, silence_s=silence)
        if as_json:
            write_json(said)
            return
        write_columns(analysis.columns(said))
        if said["heads"]:
            sys.stdout.write("\n")
            write_columns(analysis.head_rows(said))

    run(work(), as_json=as_json)


async def _run(command: _Command, as_json: bool) -> None:
    try:
        _check_files(command)
        async with AsyncExitStack() as stack:
            broker, provisioner = command.broker, command.provisioner
            if command.suite is not None:
                suite = await stack.enter_async_context(Suite(command.suite))
                await serving_engines(suite, limit_s=command.suite.start_limit_s)
                stack.enter_context(in_the_clear())
                broker, provisioner = suite.broker.address, suite.provisioner.address
            to_broker = await stack.enter_async_context(channel(broker))
            jobs = Jobs(to_broker, command.wishes.tenant)
            patience = verbs.first_patience(command.silence_s)
            kept = await outlasted(patience, jobs.served)  # before older results are overwritten
            given = await whole.open_input(
                command.file, command.format, command.wishes, to_broker, provisioner, patience
            )
            verbs.say(given.source.note)
            said, early = await _predicted(to_broker, given, command), ""
            tell = stack.enter_context(progress.shown(as_json=as_json))
            if kept:
                job = await _kept(jobs, given, command, tell, patience)
                report = job_report(job)
                if job.state == pb.JOB_STATE_CANCELLED:
                    early = f"the job {job.spec.job_id} ended early ({job.state_reason}), --fresh runs it again: "
            else:
                report = await _streamed(to_broker, given, command, tell)
            if said is not None:
                report["prediction"] = analysis.compared(said, report)
    except OSError as error:
        raise CommandError(f"{error.filename or command.output}: {error.strerror}") from error
    _print_report(report, command, as_json=as_json)
    verbs.check_none_failed(report["failed"], report["requests"], command.errors, early=early)


def _check_files(command: _Command) -> None:
    """Finds out what can be known before anything is started."""
    look(command.file)
    for path in (command.output, command.errors):
        if path.exists() and os.path.exists(command.file) and path.samefile(command.file):
            raise CommandError(f"{path} is the input; name another file for the results")
    check_writable(command.output, command.errors)


async def _predicted(to_broker: Any, given: whole.Input, command: _Command) -> dict[str, Any] | None:
    """The prediction that the run is held to; None where nobody wants one."""
    if command.prediction is not None:
        said = analysis.parse(await asyncio.to_thread(command.prediction.read_bytes), str(command.prediction))
        analysis.check_job(said, given.spec.job_id)
        return said
    if not command.predict:
        return None
    return await analysis.analyze(to_broker, given, silence_s=command.silence_s)


async def _kept(jobs: Jobs, given: whole.Input, command: _Command, tell: whole.Tell, patience: Patience) -> pb.Job:
    """Runs the file as a job that the broker keeps."""
    files = command.output, command.errors
    try:
        return await whole.run_whole(jobs, given, files, tell, command.silence_s, patience, fresh=command.fresh)
    except asyncio.CancelledError:
        again = "the same command, without --fresh," if command.fresh else "the same command"
        verbs.say(f"the job {given.spec.job_id} is kept; {again} goes on where it was")
        raise


async def _streamed(to_broker: Any, given: whole.Input, command: _Command, tell: whole.Tell) -> dict[str, Any]:
    """Runs the file over one stream, for a broker that keeps no jobs: nothing outlives this process then."""
    if given.layout.batch is not None:
        raise CommandError("batch files are run as jobs, and this broker keeps none: its setting `journal` is empty")
    job_id = given.spec.job_id
    with (
        rows_of(given.source, given.layout) as rows,
        command.output.open("wb") as results,
        command.errors.open("wb") as errors,
    ):
        deliver = _writer(results, errors, tell, given.survey.lines)
        outcome = await run_job(
            to_broker, rows, deliver, job_id=job_id, window=command.window, silence_s=command.silence_s
        )
    if not outcome.failed:
        command.errors.unlink()
    if outcome.broken_by is not None:
        raise _broken(outcome, command)
    return report_document(job_id, outcome)


def _broken(outcome: JobOutcome, command: _Command) -> CommandError:
    why = sentence(outcome.broken_by) if outcome.broken_by else ""
    done = outcome.rows - outcome.failed
    return CommandError(
        f"the job broke off: {why}; {done} of {outcome.rows} rows are done, the others stand in {command.errors}"
    )


def _writer(results: BinaryIO, errors: BinaryIO, tell: whole.Tell, total: int) -> Any:
    done = failed = generated = prompt = computed = 0

    def deliver(document: dict[str, Any]) -> None:
        nonlocal done, failed, generated, prompt, computed
        wrong = "error" in document
        (errors if wrong else results).write(orjson.dumps(document) + b"\n")
        done += 1
        failed += wrong
        usage = document.get("usage", {})
        generated += usage.get("generated_tokens", 0)
        prompt += usage.get("prompt_tokens", 0)
        computed += usage.get("computed_tokens", 0)
        tell(progress.Reading("running", done, total, failed, generated, prompt, computed))

    return deliver


def _print_report(report: dict[str, Any], command: _Command, *, as_json: bool) -> None:
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
                *analysis.compared_columns(report.get("prediction")),
                ("results", str(command.output)),
                *([("errors", str(command.errors))] if report["failed"] else []),
            ]
        )
        sys.stdout.flush()
    write_json(report)
