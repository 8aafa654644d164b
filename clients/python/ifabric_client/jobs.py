# SPDX-License-Identifier: Apache-2.0
"""A bulk job: made, filled, run and read, each step from wherever it stands.

Every step may be repeated, by this process or by the next one with the same rows: the broker keeps the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc

from ifabric.broker.v1 import job_service_pb2 as pb
from ifabric_client import wire
from ifabric_client.ending import Ending
from ifabric_client.errors import CallError, of_call
from ifabric_client.retries import Patience

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from ifabric.broker.v1 import job_service_pb2_grpc
    from ifabric_client.retries import RetryPolicy
    from ifabric_client.values import Job, Outcome, Request

_CALL_S = 10.0
_SEAL_S = 600.0
_ROWS_A_MESSAGE = 512
_BYTES_A_MESSAGE = 1024 * 1024


class Jobs:
    """The jobs of one tenant.

    Args:
        stub: The broker's JobService.
        metadata: Made for each call.
        tenant: Owner; empty for the caller's own.
        policy: How long to put up with breaks.
    """

    def __init__(
        self,
        stub: job_service_pb2_grpc.JobServiceAsyncStub,
        metadata: Callable[[], tuple[tuple[str, str], ...]],
        tenant: str,
        policy: RetryPolicy,
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._tenant = tenant
        self._policy = policy

    async def get(self, job_id: str) -> Job:
        """Returns a job as it is.

        Raises:
            CallError: NOT_FOUND where there is none, or the broker was away for too long.
        """
        request = pb.GetJobRequest(job_id=job_id, tenant=self._tenant)
        return wire.job((await self._call(self._stub.GetJob, request)).job)

    async def cancel(self, job_id: str) -> Job:
        """Ends a job; results that are there stay.

        Raises:
            CallError: as for `get`.
        """
        request = pb.CancelJobRequest(job_id=job_id, tenant=self._tenant)
        return wire.job((await self._call(self._stub.CancelJob, request)).job)

    async def submit(self, job_id: str, rows: Sequence[Request], engine_id: str) -> Job:
        """Makes a job of rows and lets it run; goes on where an earlier call with the same arguments ended.

        Raises:
            CallError: ALREADY_EXISTS where a job of this id has other rows; other refusals of the broker.
            TypeError: `rows` is no sequence of Requests.
        """
        if not isinstance(rows, Sequence):
            raise TypeError(
                f"rows are a {type(rows).__name__}; a sequence such as a list is wanted, since rows may be sent again"
            )
        for position, row in enumerate(rows):
            wire.check_row(row, position)
        spec = pb.JobSpec(job_id=job_id, tenant=self._tenant)
        spec.engine.engine_id = engine_id
        job = (await self._call(self._stub.CreateJob, pb.CreateJobRequest(spec=spec))).job
        if job.durable_rows > len(rows) or (job.state != pb.JOB_STATE_UPLOADING and job.durable_rows < len(rows)):
            raise CallError(
                "ALREADY_EXISTS", f"job_id {job_id!r} is a job of {job.durable_rows} rows, not of these {len(rows)}",
                reason="ID_IN_USE",
            )  # fmt: skip
        # Rows that the broker has go there again: it compares them, and refuses others under this id.
        patience, done = Patience(self._policy), 0
        while done < len(rows):
            sent: deque[int] = deque()
            uploads = self._uploads(job_id, rows, done, sent)
            call = self._stub.UploadRows(uploads, metadata=self._metadata())
            ending = Ending(call)
            try:
                async for _ in call:
                    patience.progress()
                    done = sent.popleft()
            except grpc.aio.AioRpcError as error:
                told = await ending.error(error)
                if not told.passing:
                    raise told from error
                await patience.wait(told, told.retry_after_s)
        if job.state != pb.JOB_STATE_UPLOADING:
            return wire.job(job)
        seal = pb.SealJobRequest(job_id=job_id, tenant=self._tenant, row_count=len(rows))
        return wire.job((await self._call(self._stub.SealJob, seal, timeout_s=_SEAL_S)).job)

    async def results(self, job_id: str, *, first_row: int = 0) -> AsyncGenerator[Outcome]:
        """Yields how rows ended, in their order, and waits for those that have not; ends with the job's last row.

        Raises:
            CallError: NOT_FOUND where there is no such job, or the broker was away for too long.
        """
        patience = Patience(self._policy)
        while True:
            request = pb.FetchResultsRequest(job_id=job_id, tenant=self._tenant, first_row=first_row, follow=True)
            call = self._stub.FetchResults(request, metadata=self._metadata())
            try:
                async for message in call:
                    patience.progress()
                    for row in message.results:
                        yield wire.outcome(row.row_id, row)
                        first_row = row.row + 1
                return
            except grpc.aio.AioRpcError as error:
                told = of_call(error)
                if not told.passing:
                    raise told from error
                await patience.wait(told, told.retry_after_s)
            finally:
                call.cancel()

    def _uploads(
        self, job_id: str, rows: Sequence[Request], first: int, sent: deque[int]
    ) -> Iterator[pb.UploadRowsRequest]:
        """Messages of rows from the first on; `sent` is given where each ends, for the reply that answers it."""
        opening = {"job_id": job_id, "tenant": self._tenant}
        at = first
        while at < len(rows):
            message = pb.UploadRowsRequest(first_row=at, **opening)  # type: ignore[arg-type]
            opening, size = {}, 0
            for row in rows[at : at + _ROWS_A_MESSAGE]:
                made = wire.job_row(row, at)
                message.rows.append(made)
                at, size = at + 1, size + made.ByteSize()
                if size >= _BYTES_A_MESSAGE:
                    break
            sent.append(at)
            yield message

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, *, timeout_s: float = _CALL_S) -> Any:
        """Makes an idempotent call until it gets through."""
        patience = Patience(self._policy)
        while True:
            try:
                return await method(request, timeout=timeout_s, metadata=self._metadata())
            except grpc.aio.AioRpcError as error:
                told: CallError = of_call(error)
                if not told.passing:
                    raise told from error
                await patience.wait(told, told.retry_after_s)
