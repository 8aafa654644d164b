# SPDX-License-Identifier: Apache-2.0
"""Collects the results of a job into files, from the first row that they lack, as often as it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.running import CommandError
from services.common.errors import FabricError
from services.common.rpc import translated

if TYPE_CHECKING:
    from services.cli.jobs.calls import Jobs, Patience
    from services.cli.jobs.output import Output


async def check_continues(jobs: Jobs, job: pb.Job, output: Output, *, otherwise: str = "name another file") -> None:
    """Makes sure that what the files hold is the beginning of this job's output.

    The first row and the last one are compared, word for word: other jobs of the same rows have the same ids.

    Args:
        jobs: Where the job is.
        job: The job.
        output: What is there.
        otherwise: What to do where it is not, for the sentence.

    Raises:
        CommandError: It is not.
    """
    if output.rows == 0:
        return
    first = last = None
    if output.rows <= job.durable_rows:
        first, last = await _result(jobs, job, 0), await _result(jobs, job, output.rows - 1)
    if first is None or last is None or not (output.begins_with(first) and output.ends_with(last)):
        raise CommandError(
            f"the output's {output.rows:,} rows are not the beginning of what the job {job.spec.job_id} brings; "
            f"{otherwise}"
        )


async def _result(jobs: Jobs, job: pb.Job, row: int) -> pb.RowResult | None:
    """A row's result, or None where it has not ended."""
    request = pb.FetchResultsRequest(job_id=job.spec.job_id, tenant=jobs.tenant, first_row=row)
    call = jobs.stub.FetchResults(request)
    try:
        with translated():
            async for message in call:
                if message.results:
                    found: pb.RowResult = message.results[0]
                    return found
    finally:
        call.cancel()
    return None


async def collect(jobs: Jobs, job_id: str, output: Output, patience: Patience, *, follow: bool) -> None:
    """Appends results until the last row, or without `follow` until the first that has not ended.

    Args:
        jobs: Where the job is.
        job_id: The job.
        output: Where results go.
        patience: With breaks.
        follow: Whether rows that have not ended are waited for.

    Raises:
        FabricError: The broker refuses, or did not answer for too long.
        CommandError: What the broker sent does not follow what the files hold.
    """
    while True:
        request = pb.FetchResultsRequest(job_id=job_id, tenant=jobs.tenant, first_row=output.rows, follow=follow)
        call = jobs.stub.FetchResults(request)
        try:
            with translated():
                async for message in call:
                    patience.progress()
                    output.append(message.results)
            return
        except FabricError as error:
            await patience.wait(error)
        finally:
            call.cancel()
