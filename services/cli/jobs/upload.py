# SPDX-License-Identifier: Apache-2.0
"""Sends the rows of a file to a job, from the first one that is not durable, as often as it takes.

Rows are read as the broker takes them. After a break the file is read again from its start: no row is held for that.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.files.rows import BadRow, Row
from services.cli.jobs.calls import Jobs, Patience
from services.common.errors import FabricError, InvalidArgumentError, UnavailableError, Violation, to_status
from services.common.rpc import call_error
from services.common.rpc.ending import hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Rows = Callable[[], AbstractContextManager[Iterator[Row | BadRow]]]

_ROWS_A_MESSAGE = 512
_BYTES_A_MESSAGE = 1024 * 1024
_WINDOW_ROWS = 64 * 1024
"""Rows that are sent and not yet durable."""
_OF_THE_JOB = ("tenant", "engine")


async def upload(jobs: Jobs, job: pb.Job, rows: Rows, tell: Callable[[int], None], patience: Patience) -> int:
    """Sends what a job lacks, and returns how many rows the file has.

    Args:
        jobs: Where the job is.
        job: The job as it is.
        rows: Opens the file and gives its rows, the same every time.
        tell: Called with the number of durable rows.
        patience: With breaks.

    Raises:
        FabricError: The broker refuses: the job has other rows, say.
        CommandError: The file cannot be read to its end, or changed.
    """
    durable = job.durable_rows
    while True:
        try:
            return await _Upload(jobs, job.spec.job_id, durable, tell, patience).run(rows)
        except FabricError as error:
            await patience.wait(error)
            try:
                durable = (await jobs.get(job.spec.job_id)).durable_rows
            except FabricError as again:
                await patience.wait(again)


class _Upload:
    """One call of UploadRows."""

    def __init__(self, jobs: Jobs, job_id: str, durable: int, tell: Callable[[int], None], patience: Patience) -> None:
        self._opening: pb.UploadRowsRequest | None = pb.UploadRowsRequest(job_id=job_id, tenant=jobs.tenant)
        self._open = jobs.stub.UploadRows
        self._call: Any = None
        self._begun = asyncio.Event()
        self._durable = durable
        self._sent = durable
        self._answered = False
        self._tell = tell
        self._patience = patience
        self._room = asyncio.Condition()

    async def run(self, rows: Rows) -> int:
        sender = asyncio.create_task(self._send(rows))
        receiver = asyncio.create_task(self._receive())
        try:
            await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_EXCEPTION)
            if receiver.done():
                await receiver  # why the stream ended is what the receiver hears
            return await sender
        except grpc.aio.AioRpcError as error:
            if hidden(error):
                raise UnavailableError("the broker ended the upload while rows were being sent") from None
            raise call_error(error) from error
        finally:
            if self._call is not None:
                self._call.cancel()
            for task in (sender, receiver):
                task.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)

    async def _send(self, rows: Rows) -> int:
        with rows() as found:
            for number, _ in enumerate(islice(found, self._durable)):
                if number % _ROWS_A_MESSAGE == 0:
                    await asyncio.sleep(0)  # of many rows that are there, this takes long: Ctrl-C is heard meanwhile
            self._call = self._open()
            self._begun.set()
            while await self._send_some(found):
                pass
        try:
            await self._call.done_writing()
            async with self._room:
                await self._room.wait_for(lambda: self._durable >= self._sent)
        except asyncio.InvalidStateError:
            await asyncio.Event().wait()  # the stream has ended, and the receiver hears why
        return self._sent

    async def _send_some(self, found: Iterator[Row | BadRow]) -> bool:
        message = self._opening or pb.UploadRowsRequest()
        message.first_row = self._sent
        size = 0
        for row in islice(found, _ROWS_A_MESSAGE):
            made = job_row(row)
            message.rows.append(made)
            size += made.ByteSize()
            if size >= _BYTES_A_MESSAGE:
                break
        if not message.rows:
            return False
        async with self._room:
            # The first message goes alone: a broker that refuses the upload says why, and a write that meets the end of
            # the stream would hide it.
            await self._room.wait_for(
                lambda: self._opening is not None or (self._answered and self._sent - self._durable < _WINDOW_ROWS)
            )
        self._opening = None
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:
            await asyncio.Event().wait()  # the stream has ended, and the receiver hears why
        self._sent += len(message.rows)
        return True

    async def _receive(self) -> None:
        await self._begun.wait()
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self._patience.progress()
            async with self._room:
                self._durable = message.durable_rows
                self._answered = True
                self._room.notify_all()
            self._tell(self._durable)
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
            )
        if self._durable < self._sent:
            raise UnavailableError("the broker ended the upload before all rows were durable")


def job_row(row: Row | BadRow) -> pb.JobRow:
    """A row in the form that a job takes; one that cannot be sent goes as its error, so that it keeps its place."""
    if isinstance(row, BadRow):
        return pb.JobRow(row_id=row.row_id, unreadable=to_status(row.error))
    made = pb.JobRow(row_id=row.row_id)
    theirs = [name for name in _OF_THE_JOB if name in {field.name for field, _ in row.request.ListFields()}]
    if theirs:
        violations = [Violation(name, "is the job's; say it to the command, not in a row") for name in theirs]
        made.unreadable.CopyFrom(to_status(InvalidArgumentError.of(violations)))
    else:
        made.request.CopyFrom(row.request)
        made.request.ClearField("request_id")
    return made
