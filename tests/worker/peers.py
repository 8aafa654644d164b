# SPDX-License-Identifier: Apache-2.0
"""The other ends of a worker in tests: a broker that speaks the wire by hand, and health."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ifabric.worker.v1 import worker_service_pb2 as wire
from ifabric.worker.v1 import worker_service_pb2_grpc
from services.common.errors import CancelledError_
from services.common.protocol import PROTOCOL_REVISION
from services.common.rpc import call_error, channel
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker.made import unpacked

if TYPE_CHECKING:
    from types import TracebackType

    from services.common.errors import FabricError


class Broker:
    """One Execute stream, driven by the test.

    async with Broker(address, digest) as broker:
        await broker.dispatch(work(1), work(2))
        end = await broker.end_of(1)
    """

    def __init__(
        self,
        address: str,
        digest: str,
        *,
        revision: int = PROTOCOL_REVISION,
        reading: bool = True,
        first: wire.ExecuteRequest | None = None,
    ) -> None:
        """A broker that has not connected.

        Args:
            address: The worker's.
            digest: Engine digest that its hello expects.
            revision: Protocol revision of its hello.
            reading: Whether it reads by itself what comes after the worker's hello.
            first: What it sends in place of a hello.
        """
        hello = wire.BrokerHello(broker_id="broker-1", protocol_revision=revision, engine_digest=digest)
        self._first = first or wire.ExecuteRequest(hello=hello)
        self.channel = channel(address)
        self._reading = reading
        self.hello: wire.WorkerHello | None = None
        self.credit = wire.Credit()
        self.finished: dict[int, wire.ItemFinished] = {}
        self.failed: dict[int, wire.ItemFailed] = {}
        self.contexts: dict[int, wire.ContextDone] = {}
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.order: list[tuple[str, int]] = []
        self.stats: list[Any] = []
        self.error: FabricError | None = None
        self.over = False
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.call = worker_service_pb2_grpc.WorkerServiceStub(self.channel).Execute()
        try:
            await self.call.write(self._first)
            first: Any = await self.call.read()
            self._take(first)
        except grpc.aio.AioRpcError as error:
            self.over, self.error = True, call_error(error)
            return self
        if self._reading:
            self.read_on()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call.cancel()
        if self._reader is not None:
            await asyncio.wait({self._reader})
        await self.channel.close()

    def read_on(self) -> None:
        """Begins to read, for a broker that was made not to."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def dispatch(self, *items: wire.WorkItem) -> None:
        """Sends items in one message."""
        await self.call.write(wire.ExecuteRequest(dispatch=wire.Dispatch(items=items)))

    async def cancel(self, *handles: int) -> None:
        """Cancels items."""
        await self.call.write(wire.ExecuteRequest(cancel=wire.CancelItems(handles=handles)))

    async def end_of(self, handle: int, *, within_s: float = PATIENCE_S) -> wire.ItemFinished | wire.ItemFailed:
        """Waits for the end of an item."""

        def ended() -> wire.ItemFinished | wire.ItemFailed | None:
            if self.error is not None and handle not in self.finished and handle not in self.failed:
                raise AssertionError(f"the stream ended before item {handle}: {self.error!r}")
            return self.finished.get(handle) or self.failed.get(handle)

        end: wire.ItemFinished | wire.ItemFailed = await wait_until(
            ended, within_s=within_s, what=f"the end of item {handle}"
        )
        return end

    async def finish_of(self, handle: int, *, within_s: float = PATIENCE_S) -> wire.ItemFinished:
        """Waits for the good end of an item."""
        end = await self.end_of(handle, within_s=within_s)
        assert isinstance(end, wire.ItemFinished), end
        return end

    async def failure_of(self, handle: int, *, within_s: float = PATIENCE_S) -> wire.ItemFailed:
        """Waits for the bad end of an item."""
        end = await self.end_of(handle, within_s=within_s)
        assert isinstance(end, wire.ItemFailed), end
        return end

    async def end(self, *, within_s: float = PATIENCE_S) -> FabricError | None:
        """Waits for the end of the stream and returns its error."""
        await wait_until(lambda: self.over, within_s=within_s, what="the end of the stream")
        return self.error

    async def _read(self) -> None:
        try:
            while True:
                message: Any = await self.call.read()
                if message is grpc.aio.EOF:
                    break
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = call_error(error)
        except asyncio.CancelledError:
            self.error = CancelledError_("the test left the stream")
        self.over = True

    def _take(self, message: wire.ExecuteResponse) -> None:
        if message.HasField("hello"):
            self.hello = message.hello
            self.credit = message.hello.credit
        for context in message.context_done:
            self.contexts[context.handle] = context
            self.order.append(("context", context.handle))
        tokens, taken = unpacked(message.tokens.token_ids), 0
        samples = message.tokens.samples or [0] * len(message.tokens.handles)
        for handle, count, sample in zip(message.tokens.handles, message.tokens.counts, samples, strict=True):
            self.tokens[handle, sample] += tokens[taken : taken + count]
            taken += count
            self.order.append(("tokens", handle))
        for finished in message.finished:
            assert finished.handle not in self.finished, "an item ended twice"
            self.finished[finished.handle] = finished
            self.order.append(("end", finished.handle))
        for failed in message.failed:
            self.failed[failed.handle] = failed
            self.order.append(("end", failed.handle))
        if message.HasField("credit"):
            self.credit = message.credit
        if message.HasField("stats"):
            self.stats.append(message.stats)


async def health(address: str, name: str = "") -> str:
    """Asks for one health name: SERVING, NOT_SERVING, or the code of the failure."""
    async with channel(address) as made:
        return await health_over(made, name)


async def health_over(made: grpc.aio.Channel, name: str) -> str:
    """The same over a channel that is there."""
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        stub: Any = health_pb2_grpc.HealthStub(made)
        reply = await stub.Check(request, timeout=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
