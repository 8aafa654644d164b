# SPDX-License-Identifier: Apache-2.0
"""`ifab bulk submit`, `status`, `watch`, `results`, `list`, and what changes a job."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli import options, progress
from services.cli.connection import channel
from services.cli.files.formats import Format, Layout, layout
from services.cli.files.opening import look
from services.cli.jobs import whole
from services.cli.jobs.calls import FIRST_S, Jobs, Patience
from services.cli.jobs.collect import check_continues, collect
from services.cli.jobs.document import COLUMNS, job_columns, job_document, job_row
from services.cli.jobs.output import Output, check_writable, errors_beside
from services.cli.jobs.spec import Wishes
from services.cli.running import CommandError, run, write_columns, write_json

File = Annotated[str, typer.Argument(metavar="FILE", help="Rows: JSON lines, an OpenAI batch file, CSV, Parquet.")]
FormatOption = Annotated[Format, typer.Option("--format", help="Format of FILE; `auto` looks at what it holds.")]
JobName = Annotated[str, typer.Option("--job", help="Name of the job; made of what FILE holds if absent.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]
Tenant = Annotated[str, typer.Option(help="Owner of the job.")]
Priority = Annotated[int | None, typer.Option(min=-100, max=100, help="Order among the tenant's jobs, higher first.")]
Deadline = Annotated[float | None, typer.Option(min=1, help="Seconds from now after which the job is given up.")]
AnyDigest = Annotated[bool, typer.Option("--any-digest", help="Whether rows may run on different builds of an engine.")]
Defaults = Annotated[str, typer.Option(metavar="JSON", help="Fields for rows that set none: '{\"max_tokens\": 8}'.")]
Silence = Annotated[float, typer.Option(min=1, help="Seconds without an answer of the broker that end the command.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands to `ifab bulk`."""
    for command in (submit, status, watch, results, pause, resume, priority, cancel, delete):
        app.command(command.__name__)(command)
    app.command("list")(list_)


def say(sentence: str) -> None:
    """One line on stderr, if there is anything to say."""
    if sentence:
        sys.stderr.write(f"ifab: {sentence}\n")
        sys.stderr.flush()


def first_patience(silence_s: float) -> Patience:
    """For the first calls of a command, whose broker may be about to start."""
    return Patience(silence_s, lambda why: say(f"waiting for the broker: {why}"), first_s=FIRST_S)


def check_none_failed(failed: int, rows: int, errors: Path, *, early: str = "") -> None:
    """What ends a command whose rows have all been written; its last words on stdout carry the counts already.

    Raises:
        CommandError: A row failed, or the job ended `early`.
    """
    if failed or early:
        raise CommandError(f"{early}{failed:,} of {rows:,} rows failed; see {errors}", reported=True)


def submit(
    file: File,
    format_: FormatOption = Format.AUTO,
    broker: options.Broker = options.BROKER_ADDRESS,
    provisioner: options.Provisioner = options.PROVISIONER_ADDRESS,
    job_id: JobName = "",
    tenant: Tenant = "",
    priority: Priority = None,
    deadline: Deadline = None,
    engine_id: options.EngineId = "",
    engine_digest: options.EngineDigest = "",
    any_digest: AnyDigest = False,
    defaults: Defaults = "",
    silence: Silence = 300.0,
    as_json: options.AsJson = False,
) -> None:
    """Send every row of FILE as a job that the broker keeps, and print its name.

    Killed at any moment, the same command sends what is missing.

    Example: ifab bulk submit examples/prompts.jsonl --priority 10
    """
    wishes = Wishes(job_id, tenant, priority, deadline, engine_id, engine_digest, any_digest, defaults)

    async def work() -> None:
        async with channel(broker) as to_broker:
            jobs, patience = Jobs(to_broker, tenant), first_patience(silence)
            given = await whole.open_input(file, format_, wishes, to_broker, provisioner, patience)
            say(given.source.note)
            with progress.shown(as_json=as_json) as tell:
                job = await whole.submit(jobs, given, tell, silence, patience)
        _show(job, as_json)

    run(work(), as_json=as_json)


def status(
    job: JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Show a job: its state, its rows, what it has cost so far.

    Example: ifab bulk status prompts-0123456789abcdef
    """
    _once(lambda jobs: jobs.get(job), broker, tenant, as_json)


def watch(
    job: JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    silence: Silence = 300.0,
    as_json: options.AsJson = False,
) -> None:
    """Follow a job until it has ended; with --json one line on stdout for each change.

    Example: ifab bulk watch prompts-0123456789abcdef
    """

    async def work() -> None:
        async with channel(broker) as to_broker:
            jobs, last = Jobs(to_broker, tenant), pb.Job()
            with progress.shown(as_json=False) as tell:
                told = progress.Told(tell, progress.Reading("unknown", 0, 0))
                async for last in whole.watch(jobs, job, silence, say if as_json else told.hindered):
                    if as_json:
                        write_json(job_document(last))
                    else:
                        told(progress.reading_of(last, last.durable_rows))
            if not as_json:
                _show(last, as_json)

    run(work(), as_json=as_json)


def results(
    job: JobArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where results go, one a row.")],
    errors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where rows go that failed; OUTPUT.errors.jsonl if absent.")
    ] = None,
    like: Annotated[
        str, typer.Option(metavar="FILE", help="The job's batch request file: results take its format's shape.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Wait for rows that have not ended.")] = False,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    silence: Silence = 300.0,
    as_json: options.AsJson = False,
) -> None:
    """Write the results of a job, in the order of its rows, after those that OUTPUT holds already.

    The exit status is 0 where no row that OUTPUT and the file of errors hold failed, else 1.

    Example: ifab bulk results prompts-0123456789abcdef -o results.jsonl --follow
    """

    async def work() -> None:
        failures = errors or errors_beside(output)
        check_writable(output, failures)
        form = layout(look(like)) if like else Layout(Format.ROWS, None)
        async with channel(broker) as to_broker:
            jobs = Jobs(to_broker, tenant)
            found = await jobs.get(job)
            shape = form.shape(found.create_time.seconds)
            with Output(output, failures, shape, fresh=False) as files:
                await check_continues(jobs, found, files)
                await collect(jobs, job, files, Patience(silence, say), follow=follow)
                files.flush()
                counted = {"job_id": job, "rows": files.rows, "failed": files.failed, "total": found.durable_rows}
        if as_json:
            write_json(counted)
        else:
            said = f"{counted['rows']:,} of {counted['total']:,} rows, {counted['failed']:,} failed"
            sys.stdout.write(f"{output}: {said}\n")
        check_none_failed(files.failed, files.rows, failures)

    run(work(), as_json=as_json)


def list_(
    broker: options.Broker = options.BROKER_ADDRESS, tenant: Tenant = "", as_json: options.AsJson = False
) -> None:
    """List the jobs of a tenant, newest first; with --json a line each.

    Example: ifab bulk list --tenant research
    """

    async def work() -> None:
        rows: list[tuple[str, ...]] = [COLUMNS]
        async with channel(broker) as to_broker:
            async for job in Jobs(to_broker, tenant).listed():
                if as_json:
                    write_json(job_document(job))
                else:
                    rows.append(job_row(job))
        if not as_json:
            write_columns(rows)

    run(work(), as_json=as_json)


def pause(
    job: JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Stop giving out rows of a job; those on a worker finish.

    Example: ifab bulk pause prompts-0123456789abcdef
    """
    _once(lambda jobs: jobs.pause(job), broker, tenant, as_json)


def resume(
    job: JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Let a paused job go on.

    Example: ifab bulk resume prompts-0123456789abcdef
    """
    _once(lambda jobs: jobs.resume(job), broker, tenant, as_json)


def priority(
    job: JobArgument,
    value: Annotated[int, typer.Argument(min=-100, max=100, metavar="N", help="-100 to 100, higher first.")],
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Change the priority of a job.

    Example: ifab bulk priority prompts-0123456789abcdef 50
    """
    _once(lambda jobs: jobs.set_priority(job, value), broker, tenant, as_json)


def cancel(
    job: JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """End a job; results that are there stay.

    Example: ifab bulk cancel prompts-0123456789abcdef
    """
    _once(lambda jobs: jobs.cancel(job), broker, tenant, as_json)


def delete(
    job: JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Remove a job that has ended, with its rows and results; none of that name is no error.

    Example: ifab bulk delete prompts-0123456789abcdef
    """

    async def work() -> None:
        async with channel(broker) as to_broker:
            await Jobs(to_broker, tenant).delete(job)
        if as_json:
            write_json({"deleted": job})

    run(work(), as_json=as_json)


def _once(call: Callable[[Jobs], Awaitable[pb.Job]], broker: str, tenant: str, as_json: bool) -> None:
    async def work() -> None:
        async with channel(broker) as to_broker:
            job = await call(Jobs(to_broker, tenant))
        _show(job, as_json)

    run(work(), as_json=as_json)


def _show(job: pb.Job, as_json: bool) -> None:
    if as_json:
        write_json(job_document(job))
    else:
        write_columns(job_columns(job))
