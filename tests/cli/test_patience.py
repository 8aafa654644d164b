# SPDX-License-Identifier: Apache-2.0
"""A command that waits for a job outlasts brokers that end, whatever gRPC makes of their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ifabric.broker.v1 import job_service_pb2 as pb
from ifabric.broker.v1 import job_service_pb2_grpc
from services.cli.jobs.calls import Jobs
from services.cli.jobs.whole import watch
from services.common.errors import FabricError
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class _Ending(job_service_pb2_grpc.JobServiceServicer):
    """Ends the first call as a server does that stops, and answers the next."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.calls = 0
        self._code = code

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchJobResponse]:
        self.calls += 1
        if self.calls == 1:
            await context.abort(self._code, "gone")
        yield pb.WatchJobResponse(job=pb.Job(state=pb.JOB_STATE_COMPLETED))


async def _states(code: grpc.StatusCode) -> tuple[list[int], int]:
    server = grpc.aio.server()
    servicer = _Ending(code)  # type: ignore[abstract]
    job_service_pb2_grpc.add_JobServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return [job.state async for job in watch(Jobs(channel), "job", PATIENCE_S)], servicer.calls
    finally:
        await server.stop(0)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_call_that_ends_with_its_broker_is_made_again(code: grpc.StatusCode) -> None:
    assert await _states(code) == ([pb.JOB_STATE_COMPLETED], 2)


async def test_a_refusal_is_not_asked_again() -> None:
    with pytest.raises(FabricError, match="gone"):
        await _states(grpc.StatusCode.PERMISSION_DENIED)
