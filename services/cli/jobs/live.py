# SPDX-License-Identifier: Apache-2.0
"""`ifab jobs`: what every job costs while it runs, and the verbs that an operator needs meanwhile."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli import options
from services.cli.connection import channel
from services.cli.jobs import verbs
from services.cli.jobs.calls import ENDED, Jobs
from services.cli.jobs.document import state_of
from services.cli.progress import Pace, reading_of
from services.cli.running import run, write_columns, write_json

if TYPE_CHECKING:
    import grpc

_EVERY_S = 2.0
_COLUMNS = ("job", "state", "priority", "rows", "failed", "sent", "computed", "saved", "generated", "tokens/s", "left")
_CLEAR = "\x1b[H\x1b[2J"
app = typer.Typer(invoke_without_command=True)


@app.callback()
def jobs(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Jobs that have ended, too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until Ctrl-C.")] = False,
    tenant: verbs.Tenant = "",
    broker: options.Broker = options.BROKER_ADDRESS,
    as_json: options.AsJson = False,
) -> None:
    """Show what the jobs of a tenant have cost so far: tokens sent, computed, saved, made; with --json a line each.

    Example: ifab jobs --watch
    """
    if context.invoked_subcommand is None:
        run(_show(broker, tenant, everything, watch, as_json), as_json=as_json, signal_ends_well=watch)


@app.command()
def pause(
    job: verbs.JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: verbs.Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Stop giving out rows of a job; those on a worker finish.

    Example: ifab jobs pause prompts-0123456789abcdef
    """
    verbs.pause(job, broker, tenant, as_json)


@app.command()
def resume(
    job: verbs.JobArgument,
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: verbs.Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Let a paused job go on.

    Example: ifab jobs resume prompts-0123456789abcdef
    """
    verbs.resume(job, broker, tenant, as_json)


@app.command()
def priority(
    job: verbs.JobArgument,
    value: Annotated[int, typer.Argument(min=-100, max=100, metavar="N", help="-100 to 100, higher first.")],
    broker: options.Broker = options.BROKER_ADDRESS,
    tenant: verbs.Tenant = "",
    as_json: options.AsJson = False,
) -> None:
    """Change the priority of a job.

    Example: ifab jobs priority prompts-0123456789abcdef 50
    """
    verbs.priority(job, value, broker, tenant, as_json)


async def _show(broker: str, tenant: str, everything: bool, watch: bool, as_json: bool) -> None:
    async with channel(broker) as to_broker:
        paces: dict[str, Pace] = {}
        while True:
            listed = await _listed(to_broker, tenant, everything)
            documents = [_document(job, paces) for job in listed]
            if as_json:
                for document in documents:
                    write_json(document)
            else:
                if watch and sys.stdout.isatty():
                    sys.stdout.write(_CLEAR)
                write_columns([_COLUMNS, *map(_row, documents)])
            if not watch:
                return
            await asyncio.sleep(_EVERY_S)


async def _listed(to_broker: grpc.aio.Channel, tenant: str, everything: bool) -> list[pb.Job]:
    return [job async for job in Jobs(to_broker, tenant).listed() if everything or job.state not in ENDED]


def _document(job: pb.Job, paces: dict[str, Pace]) -> dict[str, Any]:
    """What a job has cost; its speed over the last half minute where it was seen before, else since it was made."""
    report, reading = job.report, reading_of(job, job.durable_rows)
    done = reading.rows
    pace = paces.get(job.spec.job_id)
    if pace is None:
        paces[job.spec.job_id] = pace = Pace()
        pace.take(reading)
        age_s = max(0.001, (report.wall_ms / 1000) or (time.time() - job.create_time.seconds))
        tokens_per_s, eta_s = (
            report.generated_tokens / age_s,
            (job.durable_rows - done) * age_s / done if done else None,
        )
    else:
        said = pace.take(reading)
        tokens_per_s, eta_s = said["tokens_per_s"], said["eta_s"]
    over = job.state in ENDED
    return {
        "job_id": job.spec.job_id,
        "tenant": job.spec.tenant,
        "state": state_of(job),
        "state_reason": job.state_reason,
        "priority": job.spec.priority,
        "rows": job.durable_rows,
        "finished": job.finished_rows,
        "failed": job.failed_rows,
        "prompt_tokens_logical": report.prompt_tokens_logical,
        "prompt_tokens_computed": report.prompt_tokens_computed,
        "prefix_saving": reading.prefix_saving,
        "generated_tokens": report.generated_tokens,
        "tokens_per_s": round(tokens_per_s, 1),
        "eta_s": None if over or eta_s is None else round(eta_s, 1),
    }


def _row(document: dict[str, Any]) -> tuple[str, ...]:
    done, saving, eta = document["finished"] + document["failed"], document["prefix_saving"], document["eta_s"]
    return (
        document["job_id"],
        document["state"],
        str(document["priority"]),
        f"{done:,}/{document['rows']:,}",
        f"{document['failed']:,}",
        f"{document['prompt_tokens_logical']:,}",
        f"{document['prompt_tokens_computed']:,}",
        "-" if saving is None else f"{100 * saving:.0f} %",
        f"{document['generated_tokens']:,}",
        f"{document['tokens_per_s']:,.1f}",
        "-" if eta is None else f"{eta:,.0f} s",
    )
