# SPDX-License-Identifier: Apache-2.0
"""The Python client against a broker whose streams end while messages are being written, as they do where it dies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc, job_service_pb2, job_service_pb2_grpc
from ifabric_client import AsyncClient, CallError, Request, RetryPolicy
from services.common import reasons
from services.common.errors import AlreadyExistsError, FabricError, UnavailableError, to_status
from tests.support.servers import serving
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POLICY = RetryPolicy(limit_s=PATIENCE_S, first_s=0.01)
LONG = "x" * 600_000
"""Two fill a message, and a few messages what gRPC sends ahead: then a write waits until the stream ends."""
ROWS = [Request(LONG, 2) for _ in range(40)]


class Breaking:
    """A broker whose streams end after their first message, so many times; then it serves."""

    def __init__(self, error: FabricError, times: int, *, in_flight: int = 0) -> None:
        self.error = error
        self.times = times
        self.in_flight = in_flight
        """Requests that are refused because their id is in flight, once no stream breaks any more."""
        self.rows: dict[int, int] = {}

    async def CreateJob(self, request: Any, context: Any) -> Any:
        job = job_service_pb2.Job(spec=request.spec, state=job_service_pb2.JOB_STATE_UPLOADING)
        return job_service_pb2.CreateJobResponse(job=job)

    async def UploadRows(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for message in requests:
            first = message.first_row
            self.rows |= {first + place: len(row.request.prompt.text) for place, row in enumerate(message.rows)}
            self._break()
            yield job_service_pb2.UploadRowsResponse(durable_rows=first + len(message.rows))

    async def SealJob(self, request: Any, context: Any) -> Any:
        job = job_service_pb2.Job(state=job_service_pb2.JOB_STATE_RUNNING, durable_rows=request.row_count)
        return job_service_pb2.SealJobResponse(job=job)

    async def Exchange(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for message in requests:
            for request in message.requests:
                self._break()
                response = broker_service_pb2.ExchangeResponse()
                outcome = response.outcomes.add(request_id=request.request_id)
                if self.in_flight:
                    self.in_flight -= 1
                    outcome.failed.CopyFrom(to_status(AlreadyExistsError("in flight", reason=reasons.ID_IN_FLIGHT)))
                else:
                    outcome.finished.engine_digest = "d"
                yield response

    def __getattr__(self, name: str) -> Any:
        return None  # methods that no test calls

    def _break(self) -> None:
        if self.times:
            self.times -= 1
            raise self.error


def add(broker: Any, server: Any) -> None:
    broker_service_pb2_grpc.add_BrokerServiceServicer_to_server(broker, server)
    job_service_pb2_grpc.add_JobServiceServicer_to_server(broker, server)


async def test_an_upload_whose_stream_breaks_goes_on() -> None:
    broker = Breaking(UnavailableError("away"), times=5)
    async with (
        serving(add, broker, "ifabric.broker.v1.JobService") as server,
        AsyncClient(server.address, retries=POLICY) as client,
    ):
        job = await client.submit("breaks", ROWS)
    assert job.durable_rows == len(ROWS)
    assert broker.rows == dict.fromkeys(range(len(ROWS)), len(LONG))


async def test_an_upload_that_is_refused_while_it_writes_says_why() -> None:
    broker = Breaking(AlreadyExistsError("row 0 is another"), times=100)
    async with (
        serving(add, broker, "ifabric.broker.v1.JobService") as server,
        AsyncClient(server.address, retries=POLICY) as client,
    ):
        with pytest.raises(CallError) as told:
            await client.submit("refused", ROWS)
    assert (told.value.code, broker.times) == ("ALREADY_EXISTS", 99)


async def test_a_run_whose_stream_breaks_goes_on() -> None:
    broker = Breaking(UnavailableError("away"), times=5)
    async with (
        serving(add, broker, "ifabric.broker.v1.BrokerService") as server,
        AsyncClient(server.address, retries=POLICY) as client,
    ):
        ended = [outcome.id async for outcome in client.run(ROWS)]
    assert sorted(map(int, ended)) == list(range(len(ROWS)))


async def test_rows_that_meet_themselves_after_a_break_run_again() -> None:
    """The broker may take a moment to hear that the stream is gone which brought them first."""
    broker = Breaking(UnavailableError("away"), times=1, in_flight=3)
    rows = [Request("x", 2, id=f"r{number}") for number in range(8)]
    async with (
        serving(add, broker, "ifabric.broker.v1.BrokerService") as server,
        AsyncClient(server.address, retries=POLICY) as client,
    ):
        ended = {outcome.id: outcome.error async for outcome in client.run(rows)}
    assert ended == {row.id: None for row in rows}
    assert broker.in_flight == 0


class Ending(Breaking):
    """A broker that ends as calls come in, so many times: gRPC calls them cancelled."""

    async def Exchange(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        if self.times:
            self.times -= 1
            await context.abort(grpc.StatusCode.CANCELLED, "")
        async for response in super().Exchange(requests, context):
            yield response


async def test_a_run_that_came_as_the_broker_ended_goes_on() -> None:
    broker = Ending(UnavailableError("never said"), times=2)
    server = grpc.aio.server()
    add(broker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", retries=POLICY) as client:
            ended = [outcome.error async for outcome in client.run([Request("x", 2), Request("y", 2)])]
    finally:
        await server.stop(0)
    assert (ended, broker.times) == ([None, None], 0)
