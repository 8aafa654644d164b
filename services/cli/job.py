# SPDX-License-Identifier: Apache-2.0
"""Runs rows over one Exchange stream.

Rows go out in messages of up to 64, and no more than a window of them is unanswered at any time, so that neither side
holds a large file in memory. Rows that cannot be sent end here. `stream_rows` leaves rows that were still open when the
stream broke without a result; `run_job` ends them with the stream's error, so that every row has exactly one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.cli.files.rows import BadRow, Row
from services.cli.results import failed_row, finished_row
from services.common.errors import DeadlineExceededError, FabricError, UnavailableError, from_status
from services.common.rpc import call_error
from services.common.rpc.ending import Ending, hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Deliver = Callable[[dict[str, Any]], None]

_ROWS_A_MESSAGE = 64
_BYTES_A_MESSAGE = 1024 * 1024


@dataclass(slots=True)
class JobOutcome:
    """What became of a job."""

    rows: int = 0
    """Rows read."""
    failed: int = 0
    """Of these, rows that ended with an error."""
    wall_s: float = 0.0
    """From the first message to the last result, in seconds."""
    report: broker_service_pb2.JobReport | None = None
    """The broker's accounting; absent where the stream broke."""
    broken_by: FabricError | None = None
    """Why the stream broke."""


class Sink(Protocol):
    """Takes what rows end with, in the order in which they end."""

    def finished(self, row: Row, result: broker_service_pb2.GenerationResult) -> None:
        """A row ended well."""
        ...

    def failed(self, row_id: str, line: int, error: FabricError) -> None:
        """A row ended with an error."""
        ...


async def run_job(
    channel: grpc.aio.Channel,
    rows: Iterator[Row | BadRow],
    deliver: Deliver,
    *,
    job_id: str,
    window: int,
    silence_s: float,
) -> JobOutcome:
    """Sends all rows and delivers one result document each.

    To the broker they go under request ids that no other command's rows have; documents carry the rows' own.

    Args:
        channel: To the broker.
        rows: The rows; read as the broker takes them.
        deliver: Called with each result, in the order in which rows end.
        job_id: Name of the job, for logs and the report.
        window: Most rows sent and not yet answered.
        silence_s: Time without any result after which the job is given up, in seconds.
    """
    sink = _Documents(deliver)
    outcome, left = await stream_rows(
        channel, sink.renamed(rows), sink, job_id=job_id, window=window, silence_s=silence_s
    )
    if outcome.broken_by is not None:
        for row in left:
            outcome.failed += 1
            sink.failed(row.row_id, row.line, outcome.broken_by)
        for unsent in rows:
            outcome.rows += 1
            outcome.failed += 1
            sink.failed(unsent.row_id, unsent.line, unsent.error if isinstance(unsent, BadRow) else outcome.broken_by)
    return outcome


async def stream_rows(
    channel: grpc.aio.Channel,
    rows: Iterator[Row | BadRow],
    sink: Sink,
    *,
    job_id: str,
    window: int,
    silence_s: float,
) -> tuple[JobOutcome, list[Row]]:
    """As `run_job`, but what becomes of rows goes to a sink, and those that a broken stream left come back."""
    job = _Job(sink, window)
    call = broker_service_pb2_grpc.BrokerServiceStub(channel).Exchange()
    ending = Ending(call)
    started = time.perf_counter()
    tasks = [asyncio.create_task(job.send(call, rows, job_id)), asyncio.create_task(job.receive(call, silence_s))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            await task
    except FabricError as error:
        job.outcome.broken_by = error
    except grpc.aio.AioRpcError as error:
        job.outcome.broken_by = _why(await ending.of(error))
    finally:
        call.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    job.outcome.wall_s = time.perf_counter() - started
    return job.outcome, job.left


def _why(error: grpc.aio.AioRpcError) -> FabricError:
    """Why the stream broke."""
    if hidden(error):
        return UnavailableError("the broker ended the stream while rows were being sent")
    return call_error(error)


class _Documents:
    """Makes a document of every result, under the row's own id."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._names: dict[int, str] = {}
        """Ids of rows under way, by line."""

    def renamed(self, rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The rows under request ids of this run's own: files often have the same ids, such as those of lines."""
        stream = uuid.uuid4().hex[:16]
        for row in rows:
            if isinstance(row, Row):
                self._names[row.line] = row.row_id
                row.request.request_id = f"{stream}-{row.line}"
            yield row

    def finished(self, row: Row, result: broker_service_pb2.GenerationResult) -> None:
        result.request_id = self._names.pop(row.line)
        self._deliver(finished_row(result))

    def failed(self, row_id: str, line: int, error: FabricError) -> None:
        self._deliver(failed_row(self._names.pop(line, row_id), line, error))


class _Job:
    def __init__(self, sink: Sink, window: int) -> None:
        self.outcome = JobOutcome()
        self._sink = sink
        self._open: dict[str, Row] = {}
        self._window = window
        self._room = asyncio.Condition()

    @property
    def left(self) -> list[Row]:
        """Rows that were sent and have no result."""
        return list(self._open.values())

    async def send(self, call: Any, rows: Iterator[Row | BadRow], job_id: str) -> None:
        """Sends all rows, waiting for room in the window, and half-closes."""
        try:
            await self._send(call, rows, job_id)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended, and the receiver hears why

    async def _send(self, call: Any, rows: Iterator[Row | BadRow], job_id: str) -> None:
        opening = broker_service_pb2.ExchangeOpen(lane=broker_service_pb2.LANE_BULK, job_id=job_id)
        await call.write(broker_service_pb2.ExchangeRequest(open=opening))
        # With room for a whole message, not for the next row: results that come one by one would be answered by rows
        # one by one, each in a message of its own.
        room = min(_ROWS_A_MESSAGE, max(self._window // 2, 1))
        while True:
            async with self._room:
                await self._room.wait_for(lambda: self._window - len(self._open) >= room)
            message, taken, size = broker_service_pb2.ExchangeRequest(), 0, 0
            for row in islice(rows, min(_ROWS_A_MESSAGE, self._window - len(self._open))):
                taken += 1
                self.outcome.rows += 1
                if isinstance(row, BadRow):
                    self._fail(row.row_id, row.line, row.error)
                    continue
                self._open[row.row_id] = row
                message.requests.append(row.request)
                size += row.request.ByteSize()
                if size >= _BYTES_A_MESSAGE:
                    break
            if taken == 0:
                break
            await call.write(message)
        await call.done_writing()

    async def receive(self, call: Any, silence_s: float) -> None:
        """Delivers results until the broker ends the stream with its report.

        Raises:
            FabricError: The stream ended early, or nothing came for `silence_s`.
            grpc.aio.AioRpcError: The stream failed.
        """
        # Not `call.read()`, which stops where a write has met the end of the stream: what has come by then would never
        # be taken, and gRPC tells why a stream ended once all of it is.
        messages = aiter(call)
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    message = await anext(messages, None)
            except TimeoutError:
                raise DeadlineExceededError(f"no result came for {silence_s:g} s") from None
            if message is None:
                break
            for outcome in message.outcomes:
                self._take(outcome)
            if message.HasField("report"):
                self.outcome.report = message.report
            async with self._room:
                self._room.notify_all()
        if self.outcome.report is None or self._open:
            raise UnavailableError("the broker ended the stream before the job's report")

    def _take(self, outcome: broker_service_pb2.RequestOutcome) -> None:
        row = self._open.pop(outcome.request_id, None)
        if row is None:
            return  # not ours any more: each row has one result
        if outcome.HasField("failed"):
            self._fail(row.row_id, row.line, from_status(outcome.failed))
        else:
            self._sink.finished(row, outcome.finished)

    def _fail(self, row_id: str, line: int, error: FabricError) -> None:
        self.outcome.failed += 1
        self._sink.failed(row_id, line, error)
