# SPDX-License-Identifier: Apache-2.0
"""Calls of the JobService, for one tenant. Every one may be repeated, so what a broker's absence ended is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from google.rpc import code_pb2

from ifabric.broker.v1 import job_service_pb2 as pb
from ifabric.broker.v1 import job_service_pb2_grpc
from services.cli.running import is_mistaken, sentence
from services.common import reasons
from services.common.backoff import Backoff
from services.common.errors import (
    CancelledError_,
    FabricError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.rpc import translated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc

T = TypeVar("T")

_CALL_S = 10.0
_SEAL_S = 600.0
_PAGE = 1000
_QUIET_S = 60.0
"""A stream that stood for so long was well, even where nothing came over it."""
FIRST_S = 30.0
"""How long a command waits for a broker that it has never reached: as long as one needs that is started anew."""
_MISTAKEN_S = 3.0
"""How long where something answers that is not to be reached in this way, by TLS or without."""
ENDED = frozenset({pb.JOB_STATE_COMPLETED, pb.JOB_STATE_CANCELLED})
"""States in which nothing happens any more."""


class Jobs:
    """The jobs of one tenant.

    Every method raises the FabricError that the broker answers with.
    """

    def __init__(self, channel: grpc.aio.Channel, tenant: str = "") -> None:
        self.tenant = tenant
        self.stub = job_service_pb2_grpc.JobServiceStub(channel)

    async def served(self) -> bool:
        """Whether this broker keeps jobs."""
        try:
            await self._call(self.stub.ListJobs, pb.ListJobsRequest(tenant=self.tenant, page_size=1))
        except FabricError as error:
            if error.code == code_pb2.UNIMPLEMENTED:
                return False
            raise
        return True

    async def get(self, job_id: str) -> pb.Job:
        """The job as it is."""
        return await self._job(self.stub.GetJob, pb.GetJobRequest(job_id=job_id, tenant=self.tenant))

    async def find(self, job_id: str) -> pb.Job | None:
        """The job as it is, or None where there is none."""
        try:
            return await self.get(job_id)
        except NotFoundError:
            return None

    async def create(self, spec: pb.JobSpec) -> pb.Job:
        """Makes a job, or finds that it is there."""
        return await self._job(self.stub.CreateJob, pb.CreateJobRequest(spec=spec))

    async def seal(self, job_id: str, row_count: int) -> pb.Job:
        """Lets a job run that has all its rows."""
        request = pb.SealJobRequest(job_id=job_id, tenant=self.tenant, row_count=row_count)
        return await self._job(self.stub.SealJob, request, timeout_s=_SEAL_S)

    async def pause(self, job_id: str) -> pb.Job:
        """Stops dispatching a job."""
        return await self._job(self.stub.PauseJob, pb.PauseJobRequest(job_id=job_id, tenant=self.tenant))

    async def resume(self, job_id: str) -> pb.Job:
        """Lets a paused job go on."""
        return await self._job(self.stub.ResumeJob, pb.ResumeJobRequest(job_id=job_id, tenant=self.tenant))

    async def set_priority(self, job_id: str, priority: int) -> pb.Job:
        """Changes the priority of a job."""
        request = pb.UpdateJobRequest(job_id=job_id, tenant=self.tenant, priority=priority)
        return await self._job(self.stub.UpdateJob, request)

    async def cancel(self, job_id: str) -> pb.Job:
        """Ends a job."""
        return await self._job(self.stub.CancelJob, pb.CancelJobRequest(job_id=job_id, tenant=self.tenant))

    async def delete(self, job_id: str) -> None:
        """Removes an ended job."""
        await self._call(self.stub.DeleteJob, pb.DeleteJobRequest(job_id=job_id, tenant=self.tenant))

    async def listed(self) -> AsyncIterator[pb.Job]:
        """Yields all jobs, newest first."""
        token = ""
        while True:
            request = pb.ListJobsRequest(tenant=self.tenant, page_size=_PAGE, page_token=token)
            reply = await self._call(self.stub.ListJobs, request)
            for job in reply.jobs:
                yield job
            token = reply.next_page_token
            if not token:
                return

    async def _job(self, method: Callable[..., Awaitable[Any]], request: Any, *, timeout_s: float = _CALL_S) -> pb.Job:
        reply = await self._call(method, request, timeout_s=timeout_s)
        job: pb.Job = reply.job
        return job

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, *, timeout_s: float = _CALL_S) -> Any:
        with translated():
            return await method(request, timeout=timeout_s)


class Patience:
    """How long a command puts up with a broker that does not answer, or has no room.

        while True:
            try:
                … patience.progress() …
            except FabricError as error:
                await patience.wait(error)

    Args:
        limit_s: Time of failing without any progress after which the command gives up, in seconds.
        hindered: Told why the command waits, once until there is progress or another reason.
        first_s: The time at most as long as nobody has answered, since the address may be wrong, in seconds; 3 s where
            what is there is not to be reached in this way. Absent where the broker has answered before.
    """

    def __init__(
        self, limit_s: float, hindered: Callable[[str], None] = lambda _why: None, *, first_s: float | None = None
    ) -> None:
        self._limit_s = limit_s
        self._first_s = first_s
        self._hindered = hindered
        self._said = ""
        self._backoff = Backoff()
        self._since: float | None = None
        self._last = 0.0

    def progress(self) -> None:
        """Something came: the time starts over."""
        self._first_s = None
        self._since, self._said = None, ""
        self._backoff.reset()

    async def wait(self, error: FabricError) -> None:
        """Waits before the next attempt.

        Raises:
            FabricError: `error`, where trying again does not help or the time is up.
        """
        # A broker that ends takes calls with it that came too late to be told: gRPC calls them cancelled. Nobody here
        # cancels what he waits for.
        passing = isinstance(error, UnavailableError | CancelledError_) or (
            isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None
        )
        now = time.monotonic()
        if self._since is None or now - self._last > _QUIET_S:
            self._since = now
        self._last = now
        if error.reason != reasons.PEER_UNREACHABLE:
            self._first_s = None
        limit_s = self._limit_s
        if self._first_s is not None:
            limit_s = min(limit_s, self._first_s, _MISTAKEN_S if is_mistaken(error) else self._first_s)
        if not passing or now - self._since > limit_s:
            raise error
        if (why := sentence(error)) != self._said:
            self._said = why
            self._hindered(why)
        await self._backoff.wait()


async def outlasted(patience: Patience, call: Callable[[], Awaitable[T]]) -> T:
    """Makes a call that may be repeated until the broker answers it.

    Raises:
        FabricError: It refuses, or did not answer for too long.
    """
    while True:
        try:
            answer = await call()
        except FabricError as error:
            await patience.wait(error)
        else:
            patience.progress()
            return answer
