# SPDX-License-Identifier: Apache-2.0
"""One Execute stream: hello, work in, events out, and the end.

A reader task takes frames in while the stream's own task sends what the outbox holds. However the stream ends, what it
still has in flight is cancelled at the engine, and nobody hears of it any more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ifabric.worker.v1 import worker_service_pb2
from services.common import logs, reasons
from services.common.errors import (
    AlreadyExistsError,
    FabricError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)
from services.common.protocol import PROTOCOL_REVISION
from services.worker.credit import NOTHING, Amount
from services.worker.items import item_from_wire
from services.worker.outbox import Outbox
from services.worker.tracing import record_spans

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from opentelemetry.trace import Tracer

    from ifabric.engine.v1 import contract_pb2, node_pb2
    from services.worker.credit import CreditBook
    from services.worker.engine_host import EngineHost
    from services.worker.items import Item

    Frames = AsyncIterator[worker_service_pb2.ExecuteRequest]

HELLO_WITHIN_S = 10.0
"""A broker that has not said hello by then is not one."""

_log = logs.get("worker.stream")


class ExecuteStream:
    """The worker's end of one stream."""

    def __init__(
        self,
        host: EngineHost,
        book: CreditBook,
        tracer: Tracer,
        node: node_pb2.NodeDescription,
        payload_form: contract_pb2.PayloadForm | None,
    ) -> None:
        """A stream that has not begun.

        Args:
            host: The loaded engine.
            book: Where the broker's credit is accounted.
            tracer: Where traced items leave their spans.
            node: What the hello says of this worker.
            payload_form: Form of the engine's payloads; None where it has none.
        """
        self._host = host
        self._book = book
        self._tracer = tracer
        self._node = node
        self._account = book.open()
        self._outbox = Outbox(payload_form, self._on_end_sent)
        self._items: dict[int, Item] = {}
        self._refusal: FabricError | None = None
        self._end: FabricError | None = None
        self._half_closed = False
        self.broker_id = ""
        self.idle = asyncio.Event()
        """Set while every end has been sent."""
        self.idle.set()

    @property
    def in_flight(self) -> int:
        """Items whose end has not been sent."""
        return len(self._items)

    def refuse_new(self, error: FabricError) -> None:
        """From now on new items are refused with `error`; what is in flight goes on."""
        self._refusal = self._refusal or error

    def end(self, error: FabricError) -> None:
        """Ends the stream with `error` once what the outbox holds now has been sent."""
        self._end = self._end or error
        self._outbox.ready.set()

    def refresh(self, stats: node_pb2.EngineStats) -> None:
        """Sends the engine's counters, and the credit where it has changed."""
        self._outbox.stats(stats)
        if self._account.grant(self._book.due(self._account)):
            self._outbox.credit(_credit(self._account.granted))

    async def run(self, frames: Frames) -> AsyncGenerator[worker_service_pb2.ExecuteResponse]:
        """Serves the stream: yields what goes to the broker.

        Raises:
            FailedPreconditionError: the hello is missing, late, of another protocol revision or for another engine.
            InvalidArgumentError: a frame says hello again, or nothing.
            UnavailableError: the worker drains and its grace has ended, or its engine has failed.
        """
        reader: asyncio.Task[None] | None = None
        try:
            await self._hello(frames)
            yield self._greeting()
            _log.info("stream.opened", broker_id=self.broker_id)
            reader = asyncio.get_running_loop().create_task(self._read(frames), name="execute-reader")
            while True:
                await self._outbox.ready.wait()
                end = self._end
                for message in self._outbox.messages():
                    yield message
                if end is not None:
                    raise end
                if self._half_closed and not self._items:
                    return
        finally:
            if reader is not None:
                reader.cancel()
            self._abandon()

    async def _hello(self, frames: Frames) -> None:
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                first = await anext(frames)
        except (TimeoutError, StopAsyncIteration) as error:
            raise FailedPreconditionError("no hello came", reason=reasons.HELLO_MISSING) from error
        if first.WhichOneof("frame") != "hello":
            raise FailedPreconditionError("the first message is not a hello", reason=reasons.HELLO_MISSING)
        hello = first.hello
        if hello.protocol_revision != PROTOCOL_REVISION:
            raise FailedPreconditionError(
                f"the broker speaks protocol revision {hello.protocol_revision}, this worker {PROTOCOL_REVISION}",
                reason=reasons.PROTOCOL_REVISION,
            )
        if hello.engine_digest != self._node.engine_digest:
            raise FailedPreconditionError(
                f"the broker expects engine {hello.engine_digest or 'without digest'}, "
                f"this worker has {self._node.engine_digest}",
                reason=reasons.ENGINE_DIFFERS,
            )
        self.broker_id = hello.broker_id

    def _greeting(self) -> worker_service_pb2.ExecuteResponse:
        return worker_service_pb2.ExecuteResponse(
            hello=worker_service_pb2.WorkerHello(
                node_id=self._node.node_id,
                incarnation=self._node.incarnation,
                protocol_revision=PROTOCOL_REVISION,
                engine_digest=self._node.engine_digest,
                credit=_credit(self._account.granted),
            )
        )

    async def _read(self, frames: Frames) -> None:
        """Takes frames in until the broker says no more, or says something that no broker says."""
        try:
            async for frame in frames:
                await self._outbox.room.wait()
                kind = frame.WhichOneof("frame")
                if kind == "dispatch":
                    self._dispatch(frame.dispatch)
                elif kind == "cancel":
                    self._cancel(frame.cancel)
                else:
                    self.end(_malformed(kind))
                    return
            self._half_closed = True
            self._outbox.ready.set()
        except Exception as error:
            # Whatever it is, the stream's own task has to hear of it: nobody waits for this one.
            _log.error("stream.reader_failed", broker_id=self.broker_id, exc_info=error)
            self.end(error if isinstance(error, FabricError) else UnavailableError("the stream could not be read"))

    def _dispatch(self, dispatch: worker_service_pb2.Dispatch) -> None:
        taken: list[Item] = []
        for work in dispatch.items:
            try:
                taken.append(self._take(work))
            except FabricError as error:
                self._outbox.refuse(work.handle, error)
        for item, refusal in zip(taken, self._host.submit(taken), strict=True):
            if refusal is not None:
                self._outbox.failed(item, refusal)

    def _take(self, work: worker_service_pb2.WorkItem) -> Item:
        if self._refusal is not None:
            raise self._refusal
        if work.handle in self._items:
            raise AlreadyExistsError(f"handle {work.handle} is in flight on this stream")
        item = item_from_wire(work, self._host.next_id(), self._outbox, self._book.capacity.payload_bytes)
        if not item.cost.within(self._book.capacity.largest_item):
            item.cost = NOTHING  # no engine takes it: the library refuses it and says why, which credit could not
        elif not self._account.take(item.cost):
            raise _beyond_credit(item.cost, self._account.outstanding, self._account.granted)
        self._items[item.handle] = item
        self.idle.clear()
        return item

    def _cancel(self, cancel: worker_service_pb2.CancelItems) -> None:
        self._host.cancel([item for handle in cancel.handles if (item := self._items.get(handle)) is not None])

    def _on_end_sent(self, item: Item) -> None:
        record_spans(self._tracer, item)
        self._account.give_back(item.cost)
        del self._items[item.handle]
        if not self._items:
            self.idle.set()

    def _abandon(self) -> None:
        """Gives up what is in flight: the stream is gone, and with it everybody who would hear of it."""
        self._book.close(self._account)
        if self._items:
            _log.info("stream.abandoned", broker_id=self.broker_id, in_flight=len(self._items))
            self._host.cancel(list(self._items.values()))
            for item in self._items.values():
                record_spans(self._tracer, item)
            self._items.clear()
            self.idle.set()


def _credit(amount: Amount) -> worker_service_pb2.Credit:
    return worker_service_pb2.Credit(
        tokens=amount.tokens, sequences=amount.sequences, payload_bytes=amount.payload_bytes
    )


def _beyond_credit(cost: Amount, outstanding: Amount, granted: Amount) -> ResourceExhaustedError:
    parts = [
        f"{name}: {getattr(outstanding, name)} outstanding and {getattr(cost, name)} more exceed the credit of "
        f"{getattr(granted, name)}"
        for name in Amount.__dataclass_fields__
        if getattr(outstanding, name) + getattr(cost, name) > getattr(granted, name)
    ]
    return ResourceExhaustedError("; ".join(parts), reason=reasons.CREDIT_EXCEEDED, retry_after_s=0.0)


def _malformed(kind: str | None) -> FabricError:
    found = "a second hello" if kind == "hello" else "a message without content"
    return InvalidArgumentError.of([Violation("frame", f"{found}; after the hello come dispatch and cancel")])
