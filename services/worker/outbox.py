# SPDX-License-Identifier: Apache-2.0
"""What one stream has to send: gathered as it comes, sent as columns when the connection takes more.

Nothing here grows beyond what the broker may have outstanding: an item's cost is given back when its end leaves, so a
broker that does not read gets no new work and holds back only itself. Refusals cost no credit; when many of them wait,
the stream's frames are left unread until they have gone.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import contract_pb2, generation_pb2
from ifabric.worker.v1 import worker_service_pb2
from services.common.errors import to_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ifabric.engine.v1 import node_pb2
    from services.common.errors import FabricError
    from services.worker.items import Item

MESSAGE_BYTES = 1024 * 1024
"""A message is cut once its tokens or its ends reach this size; one larger end goes alone."""
REFUSALS_MAX = 4096
"""Refusals, which no credit bounds, that may wait before no more frames are read."""

_NAN = np.float32(np.nan).tobytes()


class _Tokens:
    """Columns of `TokenDeltas`."""

    __slots__ = ("counts", "handles", "logprobs", "samples", "token_ids")

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.counts: list[int] = []
        self.samples: list[int] = []
        self.token_ids = bytearray()
        self.logprobs = bytearray()

    def add(self, handle: int, sample: int, ids: memoryview, logprobs: memoryview | None) -> None:
        before = len(self.token_ids)
        self.handles.append(handle)
        self.counts.append(len(ids) // 4)
        self.samples.append(sample)
        self.token_ids += ids
        if logprobs is not None:
            # The column begins with the first item that wants it: what came before has none.
            self.logprobs += _NAN * ((before - len(self.logprobs)) // 4)
            self.logprobs += logprobs

    def messages(self) -> Iterator[worker_service_pb2.TokenDeltas]:
        """Yields the columns, cut so that no message has more than about MESSAGE_BYTES of tokens."""
        if self.logprobs:
            self.logprobs += _NAN * ((len(self.token_ids) - len(self.logprobs)) // 4)
        ends = np.cumsum(array("Q", self.counts), dtype=np.int64) * 4
        first, sent = 0, 0
        while first < len(self.handles):
            last = max(first + 1, int(np.searchsorted(ends, sent + MESSAGE_BYTES, side="right")))
            until = int(ends[last - 1])
            samples = self.samples[first:last]
            yield worker_service_pb2.TokenDeltas(
                handles=self.handles[first:last],
                counts=self.counts[first:last],
                samples=samples if any(samples) else (),
                token_ids=bytes(self.token_ids[sent:until]),
                logprobs=bytes(self.logprobs[sent:until]),
            )
            first, sent = last, until


class Outbox:
    """An `Outlet` for one stream, and the messages that it makes of what it hears."""

    def __init__(self, payload_form: contract_pb2.PayloadForm | None, ended: Callable[[Item], None]) -> None:
        """An empty one.

        Args:
            payload_form: Form of the engine's payloads; None where it has none.
            ended: Called with each item whose end is about to be sent.
        """
        self.ready = asyncio.Event()
        """Set while there is something to send."""
        self.room = asyncio.Event()
        """Cleared while so many refusals wait that no more frames should be read."""
        self.room.set()
        self._payload_form = payload_form
        self._ended = ended
        self._contexts: list[Item] = []
        self._tokens = _Tokens()
        self._finished: list[Item] = []
        self._failed: list[tuple[Item, FabricError]] = []
        self._refused: list[tuple[int, FabricError]] = []
        self._credit: worker_service_pb2.Credit | None = None
        self._stats: node_pb2.EngineStats | None = None

    def context_done(self, item: Item) -> None:
        """See `Outlet`."""
        self._contexts.append(item)
        self.ready.set()

    def tokens(self, item: Item, sample: int, ids: memoryview, logprobs: memoryview | None) -> None:
        """See `Outlet`."""
        self._tokens.add(item.handle, sample, ids, logprobs)
        self.ready.set()

    def finished(self, item: Item) -> None:
        """See `Outlet`."""
        self._finished.append(item)
        self.ready.set()

    def failed(self, item: Item, error: FabricError) -> None:
        """See `Outlet`."""
        self._failed.append((item, error))
        self.ready.set()

    def refuse(self, handle: int, error: FabricError) -> None:
        """Reports an item that was never taken."""
        self._refused.append((handle, error))
        if len(self._refused) >= REFUSALS_MAX:
            self.room.clear()
        self.ready.set()

    def credit(self, credit: worker_service_pb2.Credit) -> None:
        """Reports a new credit; only the newest is sent."""
        self._credit = credit
        self.ready.set()

    def stats(self, stats: node_pb2.EngineStats) -> None:
        """Reports counters; only the newest are sent."""
        self._stats = stats
        self.ready.set()

    def messages(self) -> Iterator[worker_service_pb2.ExecuteResponse]:
        """Takes everything out that is here now, as messages to send in order.

        What arrives while the caller sends them is for its next call.
        """
        self.ready.clear()
        self.room.set()
        contexts, self._contexts = self._contexts, []
        tokens, self._tokens = self._tokens, _Tokens()
        finished, self._finished = self._finished, []
        failed, self._failed = self._failed, []
        refused, self._refused = self._refused, []
        credit, self._credit = self._credit, None
        stats, self._stats = self._stats, None

        response = worker_service_pb2.ExecuteResponse(credit=credit, stats=stats)
        for item in contexts:
            response.context_done.add(
                handle=item.handle, cached_tokens=item.cached_tokens, computed_tokens=item.computed_tokens
            )
        for deltas in tokens.messages():
            if response.HasField("tokens"):
                yield response
                response = worker_service_pb2.ExecuteResponse()
            response.tokens.CopyFrom(deltas)
        size = 0
        for item in finished:
            cost = _end_size(item)
            if size and size + cost > MESSAGE_BYTES:
                yield response
                response, size = worker_service_pb2.ExecuteResponse(), 0
            self._fill(response.finished.add(), item)
            self._ended(item)
            size += cost
        for item, error in failed:
            response.failed.add(handle=item.handle, status=to_status(error), usage=item.usage())
            self._ended(item)
        for handle, error in refused:
            response.failed.add(handle=handle, status=to_status(error))
        if response.ByteSize():
            yield response

    def _fill(self, message: worker_service_pb2.ItemFinished, item: Item) -> None:
        message.handle = item.handle
        for sample in item.samples:
            message.samples.add(
                token_ids=bytes(sample.token_ids),
                logprobs=bytes(sample.logprobs),
                finish_reason=generation_pb2.FinishReason.ValueType(sample.finish_reason),
                stop_token_id=sample.stop_token_id,
            )
        message.usage.CopyFrom(item.usage())
        message.prompt_logprobs = item.prompt_logprobs
        part = item.payload
        if part is not None and self._payload_form is not None:
            payload = message.payload
            payload.data = part.data
            payload.dtype = contract_pb2.PayloadDtype.ValueType(part.dtype) if part.data else self._payload_form.dtype
            payload.shape.extend(self._payload_form.shape)
            payload.layers.extend(self._payload_form.layers)
            payload.position = item.prompt_tokens - 1
            payload.crc32 = part.crc32
            payload.failure = part.failure


def _end_size(item: Item) -> int:
    """About how many bytes the end of an item takes on the wire."""
    samples = sum(len(sample.token_ids) + len(sample.logprobs) + 16 for sample in item.samples)
    return 64 + samples + len(item.prompt_logprobs) + (len(item.payload.data) if item.payload else 0)
