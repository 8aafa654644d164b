# SPDX-License-Identifier: Apache-2.0
"""One FetchResults call: results in row order, from any row."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from google.rpc import status_pb2

from ifabric.broker.v1 import job_service_pb2
from services.broker.jobs.messages import results_message
from services.broker.journal.values import State

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from services.broker.jobs.shards import ShardStore
    from services.broker.journal import Journal
    from services.broker.journal.values import JobRecord, Result

MESSAGE_ROWS = 2048
MESSAGE_BYTES = 2 * 1024 * 1024
"""A message ends before it is larger, unless it carries one result only."""
POLL_S = 0.1
"""How often the journal is asked for rows that have not ended."""


class Export:
    """One call.

    Args:
        journal: Where results are.
        shards: Where payloads are.
        job: The job.
        reach: Told the point `export.middle` after each message.
        pause: Waits so many seconds; raises where the broker goes away meanwhile.
    """

    def __init__(
        self,
        journal: Journal,
        shards: ShardStore,
        job: JobRecord,
        reach: Callable[[str], None],
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._journal = journal
        self._shards = shards
        self._job = job
        self._reach = reach
        self._pause = pause

    async def responses(self, first_row: int, *, follow: bool) -> AsyncGenerator[job_service_pb2.FetchResultsResponse]:
        """Yields results from a row on, until the first that has not ended, or with `follow` until the last."""
        row = first_row
        while True:
            found = await self._found(row)
            while found:
                # The next piece is read while this one is on its way.
                ahead = asyncio.create_task(self._found(row + len(found)))
                try:
                    row += len(found)
                    yield await self._message(found, row)
                    self._reach("export.middle")
                    found = await ahead
                finally:
                    ahead.cancel()
            job = await self._journal.job_by_number(self._job.number)
            if job is None:
                return
            if job.state is State.CANCELLED and row < job.rows:
                message = await self._never_ran(job, row)
                row = message.next_row
                yield message
            elif (row >= job.rows and job.state is not State.UPLOADING) or not follow:
                return
            else:
                await self._pause(POLL_S)

    async def _found(self, row: int) -> list[Result]:
        return await self._journal.results(self._job.number, row, count=MESSAGE_ROWS, bytes_max=MESSAGE_BYTES)

    async def _message(self, found: list[Result], next_row: int) -> job_service_pb2.FetchResultsResponse:
        if all(result.payload is None for result in found):
            return results_message([result.body for result in found], next_row)
        bodies = await asyncio.to_thread(lambda: [self._with_payload(result) for result in found])
        return results_message(bodies, next_row)

    def _with_payload(self, result: Result) -> bytes:
        if result.payload is None:
            return result.body
        made = job_service_pb2.RowResult.FromString(result.body)
        made.finished.payload.data = self._shards.read(result.payload)
        return made.SerializeToString()

    async def _never_ran(self, job: JobRecord, row: int) -> job_service_pb2.FetchResultsResponse:
        """The rows of a job that was cancelled up to the next one that has a result."""
        until = await self._journal.next_result(job.number, row)
        count = min(MESSAGE_ROWS, (job.rows if until is None else until) - row)
        status = status_pb2.Status(code=job.end_code, message=f"the job was ended before this row: {job.state_reason}")
        row_ids = await self._journal.row_ids(job.number, row, count)
        return job_service_pb2.FetchResultsResponse(
            results=[
                job_service_pb2.RowResult(row=number, row_id=row_id.decode("utf-8", "ignore"), failed=status)
                for number, row_id in enumerate(row_ids, row)
            ],
            next_row=row + len(row_ids),
        )
