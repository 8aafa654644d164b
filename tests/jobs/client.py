# SPDX-License-Identifier: Apache-2.0
"""A client of JobService as tests need it: every call may be repeated, and is, while the broker is away."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
from grpc_status import rpc_status

from ifabric.broker.v1 import job_service_pb2 as wire
from ifabric.broker.v1 import job_service_pb2_grpc
from services.common.errors import FabricError, InternalError, UnavailableError, from_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ifabric.broker.v1 import broker_service_pb2

ENDED = (wire.JOB_STATE_COMPLETED, wire.JOB_STATE_CANCELLED)
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class JobClient:
    """One job.

    Args:
        addresses: Brokers; the next one is asked when one does not answer.
        job_id: The job.
        tenant: Its owner.
        patience_s: How long a call is repeated.
    """

    def __init__(self, *addresses: str, job_id: str = "job", tenant: str = "t", patience_s: float = 60.0) -> None:
        self._channels = [grpc.insecure_channel(address, options=_OPTIONS) for address in addresses]
        self._stubs: list[Any] = [job_service_pb2_grpc.JobServiceStub(channel) for channel in self._channels]
        self.name = {"job_id": job_id, "tenant": tenant}
        self._patience_s = patience_s
        self.repeats = 0

    def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> JobClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stub(self) -> Any:
        """The broker that is asked now."""
        return self._stubs[0]

    def call(self, method: str, request: Any, *, timeout: float = 30.0) -> Any:
        """One unary call, repeated while nobody answers."""
        return self.insist(lambda: getattr(self.stub, method)(request, timeout=timeout))

    def insist(self, call: Callable[[], Any], progress: Callable[[], int] = lambda: 0) -> Any:
        """Does something again for as long as the broker is away; patience begins anew with each progress."""
        deadline, reached = time.monotonic() + self._patience_s, progress()
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                told = typed(error)
                if progress() > reached:
                    deadline, reached = time.monotonic() + self._patience_s, progress()
                if not isinstance(told, UnavailableError) or time.monotonic() > deadline:
                    raise told from error
                self.repeats += 1
                self._stubs.append(self._stubs.pop(0))
                time.sleep(0.05)

    def create(self, **spec: Any) -> Any:
        """Makes the job."""
        request = wire.CreateJobRequest(
            spec=wire.JobSpec(job_id=self.name["job_id"], tenant=self.name["tenant"], **spec)
        )
        return self.call("CreateJob", request).job

    def upload(self, rows: Sequence[wire.JobRow], *, message_rows: int = 500) -> int:
        """Uploads rows from wherever the broker has got to, until all are durable."""

        def messages(start: int) -> Iterator[wire.UploadRowsRequest]:
            for first in range(start, len(rows), message_rows):
                named = self.name if first == start else {}
                yield wire.UploadRowsRequest(first_row=first, rows=rows[first : first + message_rows], **named)

        def once() -> int:
            start = self.get().durable_rows
            for answer in self.stub.UploadRows(messages(start), timeout=120) if start < len(rows) else ():
                start = answer.durable_rows
            return int(start)

        return int(self.insist(once))

    def seal(self, count: int) -> Any:
        """Lets it run."""
        return self.call("SealJob", wire.SealJobRequest(row_count=count, **self.name), timeout=60).job

    def get(self) -> Any:
        """The job as it is."""
        return self.call("GetJob", wire.GetJobRequest(**self.name)).job

    def pause(self) -> Any:
        return self.call("PauseJob", wire.PauseJobRequest(**self.name)).job

    def resume(self) -> Any:
        return self.call("ResumeJob", wire.ResumeJobRequest(**self.name)).job

    def cancel(self) -> Any:
        return self.call("CancelJob", wire.CancelJobRequest(**self.name)).job

    def delete(self) -> None:
        self.call("DeleteJob", wire.DeleteJobRequest(**self.name))

    def results(self, first: int = 0, *, follow: bool = True) -> list[wire.RowResult]:
        """Results from a row on; the call goes on where it was when the broker goes away."""
        found: list[wire.RowResult] = []

        def once() -> None:
            request = wire.FetchResultsRequest(first_row=first + len(found), follow=follow, **self.name)
            for message in self.stub.FetchResults(request, timeout=120):
                found.extend(message.results)
                assert message.next_row == first + len(found)

        self.insist(once, lambda: len(found))
        return found


def typed(error: grpc.RpcError) -> FabricError:
    """The error that the broker raised."""
    call: Any = error
    status = rpc_status.from_call(call)
    if status is not None:
        return from_status(status)
    # A broker that ends takes calls with it that came too late to be told: gRPC calls them cancelled.
    if call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return UnavailableError(call.details())
    return InternalError(f"{call.code()}: {call.details()}")


def row(row_id: str, request: broker_service_pb2.GenerationRequest) -> wire.JobRow:
    """One row."""
    return wire.JobRow(row_id=row_id, request=request)
