# SPDX-License-Identifier: Apache-2.0
"""The RPCs of `ifabric.broker.v1.JobService`. Errors are raised; the server's interceptor gives them their form."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from google.rpc import code_pb2

from ifabric.broker.v1 import job_service_pb2, job_service_pb2_grpc
from services.broker.costs import JobCosts
from services.broker.frontdoor.exchange import draining
from services.broker.jobs import rules
from services.broker.jobs.export import Export
from services.broker.jobs.messages import job_message
from services.broker.jobs.upload import upload
from services.broker.journal.values import ENDED
from services.common.errors import InvalidArgumentError, NotFoundError, Violation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from services.broker.jobs.housekeeping import Housekeeper, Keeping
    from services.broker.jobs.runner import Runner
    from services.broker.jobs.shards import ShardStore
    from services.broker.journal import Journal
    from services.broker.journal.values import JobRecord

    Context = grpc.aio.ServicerContext[Any, Any]
    Named = (
        job_service_pb2.GetJobRequest | job_service_pb2.WatchJobRequest | job_service_pb2.FetchResultsRequest
        | job_service_pb2.PauseJobRequest | job_service_pb2.ResumeJobRequest | job_service_pb2.UpdateJobRequest
        | job_service_pb2.CancelJobRequest | job_service_pb2.DeleteJobRequest | job_service_pb2.SealJobRequest
    )  # fmt: skip

FULL_NAME = "ifabric.broker.v1.JobService"
PAGE_MOST = 1000
PAGE_USUAL = 100
WATCH_S = 0.25
"""How often a watched job is looked at."""


class JobServicer(job_service_pb2_grpc.JobServiceServicer):
    """See the proto.

    Args:
        journal: Where jobs are.
        runner: Works on them.
        shards: Where payloads are.
        keeper: Frees what was deleted.
        keeping: Quotas.
        reach: Told named points, for tests that end the process there.
    """

    def __init__(
        self,
        journal: Journal,
        runner: Runner,
        shards: ShardStore,
        keeper: Housekeeper,
        keeping: Keeping,
        reach: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._runner = runner
        self._shards = shards
        self._keeper = keeper
        self._keeping = keeping
        self._reach = reach
        self._draining = asyncio.Event()

    async def drain(self) -> None:
        """Ends what would wait for ever; everything that is kept is there for the next broker."""
        self._draining.set()

    async def CreateJob(
        self, request: job_service_pb2.CreateJobRequest, context: Context
    ) -> job_service_pb2.CreateJobResponse:
        """See the proto."""
        spec = request.spec
        rules.check_spec(spec)
        # Priority and deadline may be changed later; they are kept beside what is compared.
        fixed = job_service_pb2.JobSpec()
        fixed.CopyFrom(spec)
        fixed.ClearField("priority")
        fixed.ClearField("deadline_time")
        job = await self._journal.create(
            spec.tenant,
            spec.job_id,
            fixed.SerializeToString(deterministic=True),
            priority=spec.priority,
            deadline=rules.deadline_of(spec),
            admit=self._keeping.admit_job,
        )
        return job_service_pb2.CreateJobResponse(job=await self._message(job))

    async def UploadRows(
        self, request_iterator: AsyncIterator[job_service_pb2.UploadRowsRequest], context: Context
    ) -> AsyncIterator[job_service_pb2.UploadRowsResponse]:
        """See the proto."""
        async with aclosing(
            upload(self._journal, request_iterator, self._keeping.admit_rows, self._reach)
        ) as responses:
            async for response in responses:
                yield response

    async def SealJob(
        self, request: job_service_pb2.SealJobRequest, context: Context
    ) -> job_service_pb2.SealJobResponse:
        """See the proto."""
        rules.check_job_id(request.job_id, request.tenant)
        job = await self._journal.seal(request.tenant, request.job_id, request.row_count, rules.repeated)
        self._runner.kick()
        return job_service_pb2.SealJobResponse(job=await self._message(job))

    async def GetJob(self, request: job_service_pb2.GetJobRequest, context: Context) -> job_service_pb2.GetJobResponse:
        """See the proto."""
        return job_service_pb2.GetJobResponse(job=await self._message(await self._named(request)))

    async def ListJobs(
        self, request: job_service_pb2.ListJobsRequest, context: Context
    ) -> job_service_pb2.ListJobsResponse:
        """See the proto."""
        size, token = request.page_size or PAGE_USUAL, request.page_token
        violations: list[Violation] = []
        if not 0 <= request.page_size <= PAGE_MOST:
            violations.append(Violation("page_size", f"is {request.page_size}; allowed is 0 to {PAGE_MOST}"))
        if token and not (token.isascii() and token.isdigit() and len(token) < 19):
            violations.append(Violation("page_token", "is none that a response carried"))
        if violations:
            raise InvalidArgumentError.of(violations)
        before = int(token) if token else 2**62
        jobs = await self._journal.jobs(request.tenant, before=before, count=size + 1)
        return job_service_pb2.ListJobsResponse(
            jobs=[await self._message(job) for job in jobs[:size]],
            next_page_token=str(jobs[size - 1].number) if len(jobs) > size else "",
        )

    async def WatchJob(
        self, request: job_service_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[job_service_pb2.WatchJobResponse]:
        """See the proto."""
        job = await self._named(request)
        told: tuple[JobRecord, str] | None = None
        while True:
            now = job, self._runner.stalled(job.number)
            if now != told:
                told = now
                yield job_service_pb2.WatchJobResponse(job=await self._message(job))
            if job.state in ENDED:
                return
            await self._pause(WATCH_S)
            found = await self._journal.job_by_number(job.number)
            if found is None:
                raise NotFoundError(f"job_id {request.job_id!r} was deleted")
            job = found

    async def FetchResults(
        self, request: job_service_pb2.FetchResultsRequest, context: Context
    ) -> AsyncIterator[job_service_pb2.FetchResultsResponse]:
        """See the proto."""
        job = await self._named(request)
        if not 0 <= request.first_row <= job.rows:
            raise InvalidArgumentError.of(
                [Violation("first_row", f"is {request.first_row}; the job has {job.rows} rows")]
            )
        export = Export(self._journal, self._shards, job, self._reach, self._pause)
        async with aclosing(export.responses(request.first_row, follow=request.follow)) as responses:
            async for response in responses:
                yield response

    async def PauseJob(
        self, request: job_service_pb2.PauseJobRequest, context: Context
    ) -> job_service_pb2.PauseJobResponse:
        """See the proto."""
        return job_service_pb2.PauseJobResponse(job=await self._set_paused(request, paused=True))

    async def ResumeJob(
        self, request: job_service_pb2.ResumeJobRequest, context: Context
    ) -> job_service_pb2.ResumeJobResponse:
        """See the proto."""
        return job_service_pb2.ResumeJobResponse(job=await self._set_paused(request, paused=False))

    async def UpdateJob(
        self, request: job_service_pb2.UpdateJobRequest, context: Context
    ) -> job_service_pb2.UpdateJobResponse:
        """See the proto."""
        rules.check_job_id(request.job_id, request.tenant)
        violations = rules.check_changes(request)
        if violations:
            raise InvalidArgumentError.of(violations)
        job = await self._journal.update(
            request.tenant,
            request.job_id,
            priority=request.priority if request.HasField("priority") else None,
            deadline=rules.deadline_of(request),
        )
        self._runner.kick()
        return job_service_pb2.UpdateJobResponse(job=await self._message(job))

    async def CancelJob(
        self, request: job_service_pb2.CancelJobRequest, context: Context
    ) -> job_service_pb2.CancelJobResponse:
        """See the proto."""
        rules.check_job_id(request.job_id, request.tenant)
        job = await self._journal.cancel(
            request.tenant, request.job_id, why="cancelled by a client", code=code_pb2.CANCELLED
        )
        self._runner.kick()
        return job_service_pb2.CancelJobResponse(job=await self._message(job))

    async def DeleteJob(
        self, request: job_service_pb2.DeleteJobRequest, context: Context
    ) -> job_service_pb2.DeleteJobResponse:
        """See the proto."""
        rules.check_job_id(request.job_id, request.tenant)
        try:
            await self._journal.delete(request.tenant, request.job_id)
        except NotFoundError:
            return job_service_pb2.DeleteJobResponse()
        self._keeper.kick()
        return job_service_pb2.DeleteJobResponse()

    async def _named(self, request: Named) -> JobRecord:
        rules.check_job_id(request.job_id, request.tenant)
        return await self._journal.job(request.tenant, request.job_id)

    async def _set_paused(self, request: Named, *, paused: bool) -> job_service_pb2.Job:
        rules.check_job_id(request.job_id, request.tenant)
        job = await self._journal.set_paused(request.tenant, request.job_id, paused=paused)
        self._runner.kick()
        return await self._message(job)

    async def _message(self, job: JobRecord) -> job_service_pb2.Job:
        number = job.number
        shares, kept = await self._journal.shares(number), await self._journal.costs(number)
        costs = sum(map(JobCosts.from_json, kept), JobCosts())
        return job_message(job, shares, costs, stalled=self._runner.stalled(number), now=time.time())

    async def _pause(self, seconds: float) -> None:
        """Waits before the journal is asked again.

        Raises:
            UnavailableError: the broker is going away; another one, or the next, answers.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            return
        raise draining()
