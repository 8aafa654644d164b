# SPDX-License-Identifier: Apache-2.0
"""One worker's stream: dispatches out, events in, many a message each way.

A link connects, says hello, and serves until the stream ends or the worker counts as lost; then all that was out there
is lost, and it connects again as long as the node is accepted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

import grpc

from ifabric.worker.v1 import worker_service_pb2 as wire
from ifabric.worker.v1 import worker_service_pb2_grpc
from services.broker.core.loss import Loss
from services.broker.core.wire import amount
from services.common import logs, reasons
from services.common.backoff import Backoff
from services.common.errors import FabricError, FailedPreconditionError, InternalError, UnavailableError
from services.common.protocol import PROTOCOL_REVISION
from services.common.rpc import call_error
from services.common.rpc.ending import Ending
from services.common.security.needs import WORKER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ifabric.provisioner.v1 import provisioner_service_pb2
    from services.broker.core.workers import Amount
    from services.common.rpc import Dialer

    Call = grpc.aio.StreamStreamCall[wire.ExecuteRequest, wire.ExecuteResponse]

HELLO_WITHIN_S = 5.0
"""How long a worker may take to answer a hello."""
PROVEN_S = 5.0
"""How long a stream has to last before the next one, should it break, is opened without delay."""

_log = logs.get("broker.link")


class LinkOwner(Protocol):
    """Whoever decides what the link carries. Called on the event loop; must not block."""

    def link_up(self, link: WorkerLink, credit: Amount) -> None:
        """The worker has answered: it takes work now."""

    def link_heard(self, link: WorkerLink, message: wire.ExecuteResponse) -> None:
        """The worker says something."""

    def link_down(self, link: WorkerLink, loss: Loss) -> None:
        """The stream is over."""


class WorkerLink:
    """A link to one incarnation of one node.

    Args:
        node: The node.
        broker_id: What this broker calls itself.
        dialer: Opens the channel.
        owner: Who decides.
    """

    def __init__(self, node: provisioner_service_pb2.Node, *, broker_id: str, dialer: Dialer, owner: LinkOwner) -> None:
        self.node = node
        self.node_id: str = node.description.node_id
        self.incarnation: str = node.description.incarnation
        self.channel = dialer.channel(node.description.address, role=WORKER)
        self._broker_id = broker_id
        self._owner = owner
        self._out: deque[wire.ExecuteRequest] = deque()
        self._wanted = asyncio.Event()
        self._call: Call | None = None
        self._given_up: FabricError | None = None
        self._loss = Loss.DIED
        self.silences = 0
        """Times in a row that it was given up for its silence while nobody else could take its work."""
        self.stood_at: int | None = None
        """Progress of its engine when it was given up for standing still; None where something has ended since."""

    def send(self, message: wire.ExecuteRequest) -> None:
        """Sends a message once those before it are sent. Credit bounds how much can wait here."""
        self._out.append(message)
        self._wanted.set()

    def give_up(self, error: FabricError, loss: Loss) -> None:
        """Ends the stream from this side: the worker counts as lost.

        Args:
            error: Why.
            loss: How it counts.
        """
        if self._given_up is None:
            self._given_up, self._loss = error, loss
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Connects and serves, again and again, until cancelled."""
        backoff = Backoff()
        try:
            while True:
                await self._serve(backoff)
                await backoff.wait()
        finally:
            await self.channel.close()

    async def _serve(self, backoff: Backoff) -> None:
        """One stream, from hello to end."""
        self._out.clear()
        self._given_up, self._loss = None, Loss.DIED
        stub = worker_service_pb2_grpc.WorkerServiceStub(self.channel)
        call: Call = stub.Execute()
        self._call = call
        try:
            why = await self._talk(call, backoff)
        except grpc.aio.AioRpcError as error:
            why = call_error(error)
        except FabricError as error:
            why = error
        except Exception as error:
            # Whatever a worker sends, or a fault of ours does with it, ends this stream and nothing else.
            _log.exception("link.failed", node_id=self.node_id)
            why = InternalError(f"the link failed: {type(error).__name__}")
        finally:
            self._call = None
            call.cancel()
        _log.warning("link.down", node_id=self.node_id, why=why.message)

    async def _talk(self, call: Call, backoff: Backoff) -> FabricError:
        """Everything from hello on; returns why it ended. Before the hello is answered, errors are raised."""
        # Not `call.read()`, which stops where a write has met the end of the stream: what came before would be lost.
        messages, ending = aiter(call), Ending(call)
        credit = await self._greet(call, messages)
        writer = asyncio.get_running_loop().create_task(self._write(call), name=f"link-writer-{self.node_id}")
        proven = asyncio.get_running_loop().call_later(PROVEN_S, backoff.reset)
        why: FabricError = UnavailableError("the worker closed the stream")
        try:
            self._owner.link_up(self, credit)
            _log.info("link.up", node_id=self.node_id, incarnation=self.incarnation)
            async for message in messages:
                self._owner.link_heard(self, message)
        except grpc.aio.AioRpcError as error:
            why = call_error(await ending.of(error))
        except asyncio.CancelledError:
            if self._given_up is None:
                raise  # the link is being ended; else it is the call, which was given up
        finally:
            writer.cancel()
            proven.cancel()
            why = self._given_up or why
            self._owner.link_down(self, Loss.LEFT if why.reason == reasons.DRAINING else self._loss)
        return why

    async def _greet(self, call: Call, messages: AsyncIterator[wire.ExecuteResponse]) -> Amount:
        hello = wire.BrokerHello(
            broker_id=self._broker_id,
            protocol_revision=PROTOCOL_REVISION,
            engine_digest=self.node.description.engine_digest,
        )
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                await call.write(wire.ExecuteRequest(hello=hello))
                first = await anext(messages, None)
        except TimeoutError as error:
            raise UnavailableError(f"the worker has not answered the hello within {HELLO_WITHIN_S:g} s") from error
        if first is None or not first.HasField("hello"):
            raise FailedPreconditionError("the worker's first message is not a hello", reason=reasons.HELLO_MISSING)
        if first.hello.incarnation != self.incarnation:
            raise UnavailableError("another process answers at the worker's address")
        return amount(first.hello.credit)

    async def _write(self, call: Call) -> None:
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                while self._out:
                    await call.write(self._out.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if not call.done():  # else the reader hears the reason
                self.give_up(UnavailableError("the stream is broken"), Loss.DIED)
        except Exception as error:
            _log.exception("link.failed", node_id=self.node_id)
            self.give_up(InternalError(f"a message could not be sent: {type(error).__name__}"), Loss.DIED)
