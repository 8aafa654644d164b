# SPDX-License-Identifier: Apache-2.0
"""`ifab mine`."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.cli import options, progress
from services.cli.connection import channel
from services.cli.files.formats import Format, layout
from services.cli.files.opening import look, survey
from services.cli.jobs import verbs
from services.cli.jobs.output import check_writable
from services.cli.mine.index import FILE as INDEX_FILE
from services.cli.mine.mining import ERRORS_FILE, Mine, shard_rows_for, summary
from services.cli.mine.mining import mine as mine_rows
from services.cli.mine.shards import Form
from services.cli.running import CommandError, run, write_columns, write_json
from services.common.rpc import translated

_CALL_S = 5.0


def mine(
    file: verbs.File,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where shards and their index go.")],
    format_: verbs.FormatOption = Format.AUTO,
    broker: options.Broker = options.BROKER_ADDRESS,
    engine_id: options.EngineId = "",
    engine_digest: options.EngineDigest = "",
    shard_mb: Annotated[int, typer.Option("--shard-mb", min=1, max=65536, help="Size of a shard, in MiB.")] = 256,
    window: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most rows sent and not yet answered.")] = 4096,
    silence: verbs.Silence = 300.0,
    as_json: options.AsJson = False,
) -> None:
    """Write the hidden state of every row of FILE into shards (safetensors) in DIR, and where each row lies.

    The exit status is 0 where every row has its hidden state, else 1. Killed at any moment, the same command goes on
    after the last shard that is whole. docs/bulk.md describes the files.

    Example: ifab mine examples/texts.jsonl -o states
    """

    async def work() -> None:
        began = time.monotonic()
        if output.exists() and not output.is_dir():
            raise CommandError(f"{output} is not a folder; shards and their index go into one, so name another")
        check_writable(output / INDEX_FILE, output / ERRORS_FILE)
        source = look(file)
        form = layout(source, format_)
        if form.batch is not None:
            raise CommandError(f"{file} is a batch request file; hidden states are mined from plain rows")
        async with channel(broker) as to_broker:
            engine = await _engine(to_broker, engine_id, engine_digest)
            verbs.say(source.note)
            surveyed = await asyncio.to_thread(survey, source)
            value = engine.contract.capabilities.payload.value
            payload = Form(value.dtype, tuple(value.shape))
            described = Mine(
                source,
                form,
                surveyed.lines,
                surveyed.sha256,
                engine.contract.engine_id,
                engine.engine_digest,
                payload,
                shard_rows_for(payload, shard_mb << 20),
                window,
                silence,
            )
            try:
                with progress.shown(as_json=as_json) as tell:
                    counts = await mine_rows(to_broker, described, output, tell)
            except sqlite3.Error as error:
                raise CommandError(f"{output}: the index cannot be used: {error}") from error
            except OSError as error:
                raise CommandError(f"{error.filename or output}: {error.strerror}") from error
            except asyncio.CancelledError:
                verbs.say(f"the shards in {output} that are whole are kept; the same command goes on after them")
                raise
        _show(summary(described, counts, began), output, as_json=as_json)
        verbs.check_none_failed(counts.failed, counts.rows + counts.failed, output / ERRORS_FILE)

    run(work(), as_json=as_json)


async def _engine(to_broker: grpc.aio.Channel, engine_id: str, engine_digest: str) -> broker_service_pb2.Engine:
    """The engine that makes hidden states: the one that is named, or the only one."""
    stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
    with translated():
        listed = await stub.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=_CALL_S)
    able = [each for each in listed.engines if each.contract.capabilities.payload.HasField("value")]
    meant = [
        each
        for each in able
        if engine_id in ("", each.contract.engine_id) and engine_digest in ("", each.engine_digest)
    ]
    if len(meant) == 1:
        return meant[0]
    if not able:
        raise CommandError("no engine that makes hidden states serves now; `ifab nodes` says which engines do")
    if not meant and (engine_id or engine_digest):
        named = " of digest ".join(filter(None, (repr(engine_id) if engine_id else "", engine_digest)))
        wanted = f"no engine {named} makes hidden states"
    else:
        wanted = "name one with --engine-id, or --engine-digest where several builds have one name"
    builds = sorted(f"{each.contract.engine_id} ({each.engine_digest})" for each in able)
    raise CommandError(f"{wanted}; engines that make hidden states: {', '.join(builds)}")


def _show(said: dict[str, Any], output: Path, *, as_json: bool) -> None:
    if as_json:
        write_json(said)
        return
    write_columns(
        [
            ("rows", f"{said['rows']:,} ({said['failed']:,} failed)"),
            ("shards", f"{said['shards']:,}, {said['bytes']:,} bytes"),
            ("time", f"{said['wall_s']:,.1f} s"),
            ("in", str(output)),
            *([("errors", str(output / ERRORS_FILE))] if said["failed"] else []),
        ]
    )
