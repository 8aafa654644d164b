# SPDX-License-Identifier: Apache-2.0
"""Collects the results of a job into files, from the first row that they lack, as often as it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.running import CommandError
from services.common.errors import FabricError
from services.common.rpc import translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.cli.jobs.calls import Jobs, Patience
    from services.cli.jobs.output import Output


async def check_continues(jobs: Jobs, job: pb.Job, output: Output) -> None:
    """Makes sure that what the files hold is the beginning of this job's output.

    Raises:
        CommandError: It is not.
    """
    if output.rows == 0:
        return
    last = None
    if output.rows <= job.durable_rows:
        request = pb.FetchResultsRequest(job_id=job.spec.job_id, tenant=jobs.tenant, first_row=output.rows - 1)
        call = jobs.stub.FetchResults(request)
        try:
            with translated():
                async for message in call:
                    if message.results:
                        last = message.results[0]
                        break
        finally:
            call.cancel()
    if last is None or last.row_id not in output.last_ids():
        raise CommandError(
            f"the output's {output.rows:,} rows are not the beginning of what the job {job.spec.job_id} brings; name "
            "another file, or give --fresh to run everything again"
        )


async def collect(
    jobs: Jobs, job_id: str, output: Output, tell: Callable[[], None], patience: Patience, *, follow: bool
) -> None:
    """Appends results until the last row, or without `follow` until the first that has not ended.

    Args:
        jobs: Where the job is.
        job_id: The job.
        output: Where results go.
        tell: Called after each message.
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
                    tell()
            return
        except FabricError as error:
            await patience.wait(error)
        finally:
            call.cancel()
