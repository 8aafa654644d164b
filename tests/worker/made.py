# SPDX-License-Identifier: Apache-2.0
"""Values that several tests of the worker make."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from ifabric.worker.v1 import worker_service_pb2 as wire
from services.worker.credit import Amount
from services.worker.items import Item
from services.worker.native import EventKind, Options, PollBuffers, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.common.errors import FabricError


def packed(ids: Iterable[int]) -> bytes:
    """Token ids as they travel: little-endian int32."""
    return np.array(list(ids), dtype="<i4").tobytes()


def unpacked(data: bytes) -> list[int]:
    """Token ids from their packed form."""
    return [int(token) for token in np.frombuffer(data, dtype="<i4")]


def work(handle: int, token_ids: Iterable[int] = range(8), **fields: Any) -> wire.WorkItem:
    """One dispatched item; a greedy request for 4 tokens unless told otherwise."""
    defaults: dict[str, Any] = {
        "request_id": f"request-{handle}", "attempt": 1, "max_tokens": 4, "samples": 1, "return_payload": True,
    }  # fmt: skip
    return wire.WorkItem(handle=handle, token_ids=packed(token_ids), **{**defaults, **fields})


class Heard:
    """An `Outlet` that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def context_done(self, item: Item) -> None:
        """Remembers."""
        self.calls.append(("context_done", item.handle))

    def tokens(self, item: Item, sample: int, ids: memoryview, logprobs: memoryview | None) -> None:
        """Remembers."""
        scores = None if logprobs is None else list(array("f", bytes(logprobs)))
        self.calls.append(("tokens", item.handle, sample, unpacked(bytes(ids)), scores))

    def finished(self, item: Item) -> None:
        """Remembers."""
        self.calls.append(("finished", item.handle))

    def failed(self, item: Item, error: FabricError) -> None:
        """Remembers."""
        self.calls.append(("failed", item.handle, error))


def item(handle: int, outlet: Any, *, samples: int = 1, streams: bool = False, reports: bool = False) -> Item:
    """An item whose native id is its handle plus 1000."""
    return Item(
        handle=handle,
        request=Request(handle + 1000, packed([1, 2, 3]), Options(max_tokens=4, samples=samples)),
        outlet=outlet,
        cost=Amount(7, samples, 0),
        stream_tokens=streams,
        report_context_done=reports,
    )


class Batch:
    """Events of one poll, written as the library writes them."""

    def __init__(self) -> None:
        self.buffers = PollBuffers(events=64, tokens=1024, payload_bytes=4096, text_bytes=1024)
        self._events = self._tokens = self._payload = self._text = 0

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """The events written so far."""
        return self.buffers.events[: self._events]

    def tokens(self, native_id: int, ids: list[int], *, sample: int = 0, logprobs: list[float] | None = None) -> Batch:
        """New tokens of a sample."""
        return self._add(EventKind.TOKENS, native_id, sample=sample, **self._put(ids, logprobs))

    def context_done(
        self, native_id: int, *, cached: int = 0, computed: int = 3, logprobs: list[float] | None = None
    ) -> Batch:
        """A prompt that is computed."""
        scores = self._put([0] * len(logprobs), logprobs) if logprobs else {}
        return self._add(
            EventKind.CONTEXT_DONE, native_id,
            prompt_tokens=cached + computed, cached_tokens=cached, computed_tokens=computed, **scores,
        )  # fmt: skip

    def finished(
        self, native_id: int, *, sample: int = 0, reason: int = 2, stop_id: int = -1, generated: int = 4,
        payload: bytes = b"", missing: str = "",
    ) -> Batch:  # fmt: skip
        """A sample that ended well."""
        start = -(-self._payload // 64) * 64
        self.buffers.payload[start : start + len(payload)] = np.frombuffer(payload, np.uint8)
        self._payload = start + len(payload)
        return self._add(
            EventKind.FINISHED, native_id,
            sample=sample, reason=reason, stop_id=stop_id, generated_tokens=generated,
            prompt_tokens=3, cached_tokens=0, computed_tokens=3,
            payload_offset=start if payload else 0, payload_size=len(payload), payload_dtype=1 if payload else 0,
            payload_crc32=77 if payload else 0, payload_missing=1 if missing else 0, **self._say(missing),
        )  # fmt: skip

    def failed(self, native_id: int, status: int, text: str) -> Batch:
        """A request that ended with an error."""
        return self._add(EventKind.FAILED, native_id, status=status, prompt_tokens=3, **self._say(text))

    def _add(self, kind: EventKind, native_id: int, **fields: int) -> Batch:
        row = self.buffers.events[self._events]
        row["kind"], row["request_id"] = kind, native_id
        for name, value in fields.items():
            row[name] = value
        self._events += 1
        return self

    def _put(self, ids: list[int], logprobs: list[float] | None) -> dict[str, int]:
        start, end = self._tokens, self._tokens + len(ids)
        self.buffers.tokens[start:end] = ids
        if logprobs is not None:
            self.buffers.logprobs[start:end] = logprobs
        self._tokens = end
        return {"token_offset": start, "token_count": len(ids), "has_logprobs": int(logprobs is not None)}

    def _say(self, text: str) -> dict[str, int]:
        said, start = text.encode(), self._text
        self.buffers.text[start : start + len(said)] = np.frombuffer(said, np.uint8)
        self._text += len(said)
        return {"text_offset": start, "text_size": len(said)}
