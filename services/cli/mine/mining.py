# SPDX-License-Identifier: Apache-2.0
"""Runs rows until the payload of each is in a shard, or its error in the index.

Payloads go from the stream to the disk; what is held is a window of open rows and the ids of two shards: the one that
is written, and the one before, which a thread makes whole meanwhile. Nothing of them stays at the broker: rows whose
shard does not count yet run again after a crash of either side.
"""

from __future__ import annotations

import os
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from services.cli.files.formats import rows_of
from services.cli.files.rows import BadRow, Row
from services.cli.job import stream_rows
from services.cli.jobs.calls import Patience
from services.cli.jobs.output import lock
from services.cli.mine.index import Counts, FailedRow, Index, MinedRow
from services.cli.mine.shards import Form, ShardWriter, sweep
from services.cli.progress import Reading, Told
from services.cli.running import CommandError, error_document
from services.common.errors import InternalError, InvalidArgumentError, UnavailableError, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    import grpc

    from ifabric.broker.v1 import broker_service_pb2
    from services.cli.files.formats import Layout
    from services.cli.files.opening import Source
    from services.cli.mine.shards import Shard
    from services.common.errors import FabricError

ERRORS_FILE = "errors.jsonl"
SHARD_ROWS_MAX = 65_536
_FAILURES_HELD = 1000
_TELL_EVERY_S = 0.05
"""Rows come faster than anybody reads."""


@dataclass(frozen=True, slots=True)
class Mine:
    """A mining run."""

    source: Source
    layout: Layout
    lines: int
    """Rows of the file, for progress."""
    sha256: str
    """Digest of the file."""
    engine_id: str
    engine_digest: str
    form: Form
    shard_rows: int
    """Rows of a full shard."""
    window: int
    """Most rows sent and not yet answered."""
    silence_s: float

    @property
    def facts(self) -> dict[str, str]:
        """What a folder's shards are made of; a run goes on only where it is made of the same."""
        return {
            "source_sha256": self.sha256,
            "engine_id": self.engine_id,
            "engine_digest": self.engine_digest,
            "shape": ",".join(map(str, self.form.shape)),
            "dtype": str(self.form.dtype),
        }


async def mine(to_broker: grpc.aio.Channel, run: Mine, folder: Path, tell: Callable[[Reading], None]) -> Counts:
    """Runs what is missing in a folder, and returns what is there then.

    Raises:
        CommandError: The folder is another's, the file is not what it should be, or payloads are damaged.
        FabricError: The broker refuses, or did not answer for too long.
        OSError: The disk is full, or the like.
    """
    with _opened(folder, run) as index:
        told = Told(tell, Reading("running", 0, run.lines))
        patience = Patience(run.silence_s, told.hindered)
        with _collector(index, folder, run, told, patience) as collector:
            while True:
                with rows_of(run.source, run.layout) as rows:
                    outcome, _ = await stream_rows(
                        to_broker,
                        collector.missing(rows),
                        collector,
                        job_id=f"mine-{run.sha256[:16]}",
                        window=run.window,
                        silence_s=run.silence_s,
                    )
                error = outcome.broken_by or collector.put_off()
                if error is None:
                    break
                await patience.wait(error)
            collector.commit()
            collector.settle()
        with (folder / ERRORS_FILE).open("wb") as errors:
            errors.writelines(orjson.dumps(document) + b"\n" for document in index.failures())
        return index.counts()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other commands out: what one of them writes, another would take for what a crash left."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
        yield
    finally:
        os.close(handle)


@contextmanager
def _opened(folder: Path, run: Mine) -> Iterator[Index]:
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder), Index(folder) as index:
        _check(index, run, folder)
        sweep(folder, index.files())
        yield index


def _check(index: Index, run: Mine, folder: Path) -> None:
    known = index.facts()
    if not known:
        if any(folder.glob("shard-*")):
            raise CommandError(f"{folder} holds shards that no index knows; name another folder")
        index.begin(run.facts)
        return
    for name, value in run.facts.items():
        if known.get(name) != value:
            raise CommandError(
                f"{folder} was begun with another {name} ({known.get(name)}, now {value}); name another folder"
            )


@contextmanager
def _collector(
    index: Index, folder: Path, run: Mine, tell: Callable[[Reading], None], patience: Patience
) -> Iterator[_Collector]:
    collector = _Collector(index, folder, run, tell, patience)
    try:
        yield collector
    finally:
        collector.abandon()


@dataclass(frozen=True, slots=True)
class _Closing:
    """A shard that is being made whole, and what counts with it."""

    shard: Future[Shard]
    rows: list[MinedRow]
    failures: list[FailedRow]


class _Collector:
    """Takes results as they come, many shards' worth."""

    def __init__(
        self, index: Index, folder: Path, run: Mine, tell: Callable[[Reading], None], patience: Patience
    ) -> None:
        self._index = index
        self._folder = folder
        self._run = run
        self._tell = tell
        self._patience = patience
        self._names: dict[int, str] = {}
        self._rows: list[MinedRow] = []
        self._failures: list[FailedRow] = []
        self._held: set[int] = set()
        """Lines whose end is not in the index yet."""
        self._writer: ShardWriter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shard")
        self._closing: _Closing | None = None
        self._put_off: UnavailableError | None = None
        counts = index.counts()
        self._done, self._failed = counts.rows + counts.failed, counts.failed
        self._prompt_tokens = self._computed_tokens = 0
        self._tell_at = 0.0

    def missing(self, rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The rows that have not ended, under request ids that no other run has, nor an earlier stream of this one."""
        self._names.clear()
        stream = uuid.uuid4().hex[:16]
        again = self._done > 0
        for row in rows:
            if again and (row.line in self._held or self._index.has(row.line)):
                continue
            if isinstance(row, Row) and row.request.omit_payload:
                violation = Violation("omit_payload", "is true; the payload is what a mining run is for")
                yield BadRow(row.line, row.row_id, InvalidArgumentError.of([violation]))
            elif isinstance(row, Row):
                self._names[row.line] = row.row_id
                row.request.request_id = f"{stream}-{row.line}"
                row.request.engine.engine_digest = self._run.engine_digest
                yield row
            else:
                yield row

    def finished(self, row: Row, result: broker_service_pb2.GenerationResult) -> None:
        """See services.cli.job.Sink."""
        row_id, payload, form = self._names.pop(row.line), result.payload, self._run.form
        data = payload.data  # each reading of a field of bytes copies it
        if payload.failure or not data:
            error = InternalError(f"no hidden state was extracted: {payload.failure or 'the engine sent none'}")
            self._fail(row_id, row.line, error)
            return
        if (payload.dtype, tuple(payload.shape)) != (form.dtype, form.shape) or len(data) != form.row_bytes:
            raise CommandError(f"the payload of {row_id!r} is not of the form that the engine's contract states")
        if zlib.crc32(data) != payload.crc32:
            raise CommandError(f"the payload of {row_id!r} was damaged on its way: its checksum differs")
        self._writer = self._writer or self._next_shard()
        self._writer.append(data)
        self._rows.append(MinedRow(row.line, row_id, result.usage.prompt_tokens))
        self._prompt_tokens += result.usage.prompt_tokens
        self._computed_tokens += result.usage.computed_tokens
        self._ended(row.line)
        if len(self._rows) >= self._run.shard_rows:
            self.commit()

    def failed(self, row_id: str, line: int, error: FabricError) -> None:
        """See services.cli.job.Sink."""
        name = self._names.pop(line, row_id)
        if isinstance(error, UnavailableError):
            self._put_off = error  # nothing is wrong with the row
        else:
            self._fail(name, line, error)

    def put_off(self) -> UnavailableError | None:
        """Why rows of the last stream have to run again; None where none have."""
        error, self._put_off = self._put_off, None
        return error

    def commit(self) -> None:
        """Lets everything that has ended count, as soon as its shard is whole; waits for the shard before."""
        self.settle()
        if self._writer is not None:
            shard = self._thread.submit(self._writer.close)
            self._closing = _Closing(shard, self._rows, self._failures)
            self._writer = None
        else:
            self._count(None, self._rows, self._failures)
        self._rows, self._failures = [], []

    def settle(self) -> None:
        """Waits for the shard that is being made whole, and lets it count.

        Raises:
            OSError: The disk is full, or the like.
        """
        if self._closing is not None:
            closing, self._closing = self._closing, None
            self._count(closing.shard.result(), closing.rows, closing.failures)

    def abandon(self) -> None:
        """Leaves shards that do not count."""
        self._thread.shutdown(wait=True)
        if self._writer is not None:
            self._writer.abandon()

    def _next_shard(self) -> ShardWriter:
        number = self._index.next_shard() + (self._closing is not None)
        return ShardWriter(self._folder, number, self._run.form, self._run.engine_digest)

    def _count(self, shard: Shard | None, rows: list[MinedRow], failures: list[FailedRow]) -> None:
        self._index.add(shard, rows, failures)
        for ended in (rows, failures):
            self._held.difference_update(each.line for each in ended)

    def _fail(self, row_id: str, line: int, error: FabricError) -> None:
        document: dict[str, Any] = error_document(error)
        self._failures.append(FailedRow(line, row_id, document))
        self._failed += 1
        self._ended(line)
        if len(self._failures) >= _FAILURES_HELD:
            self._count(None, [], self._failures)
            self._failures = []

    def _ended(self, line: int) -> None:
        self._held.add(line)
        self._done += 1
        if self._closing is not None and self._closing.shard.done():
            self.settle()
        self._patience.progress()
        now = time.monotonic()
        if now >= self._tell_at or self._done == self._run.lines:
            self._tell_at = now + _TELL_EVERY_S
            self._tell(
                Reading(
                    "running", self._done, self._run.lines, self._failed, 0, self._prompt_tokens, self._computed_tokens
                )
            )


def shard_rows_for(form: Form, shard_bytes: int) -> int:
    """Rows of a shard of about so many bytes: at most so many that what is held of them until it counts stays small."""
    return min(max(1, shard_bytes // form.row_bytes), SHARD_ROWS_MAX)


def summary(run: Mine, counts: Counts, began: float) -> dict[str, Any]:
    """What a finished run says."""
    wall_s = time.monotonic() - began
    return {
        "rows": counts.rows,
        "failed": counts.failed,
        "shards": counts.shards,
        "bytes": counts.bytes,
        "wall_s": round(wall_s, 3),
        "engine_id": run.engine_id,
        "engine_digest": run.engine_digest,
    }
