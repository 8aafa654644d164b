# SPDX-License-Identifier: Apache-2.0
"""Events of the engine, a batch at a time, to the items that they belong to.

Within one item the order of kinds is fixed: context done, tokens, then the end. So a batch is gone through kind by kind
and column by column, which costs a fraction of going through it row by row.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from services.worker.items import PayloadPart
from services.worker.native import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from services.common.errors import FabricError
    from services.worker.items import Item
    from services.worker.native import PollBuffers

    Rows = npt.NDArray[np.void]


def deliver(
    buffers: PollBuffers, rows: Rows, items: dict[int, Item], failure_of: Callable[[int, str], FabricError]
) -> None:
    """Tells every item of a batch what became of it, and takes those that ended out of `items`.

    Args:
        buffers: Where the events' tokens, payloads and texts lie.
        rows: The events, oldest first.
        items: Items by the engine's name for them; what is not among them belongs to nobody any more.
        failure_of: Makes the error of an item that failed, from the engine's status and text.
    """
    kinds = rows["kind"]
    _context_done(buffers, rows[kinds == EventKind.CONTEXT_DONE], items)
    _tokens(buffers, rows[kinds == EventKind.TOKENS], items)
    _finished(buffers, rows[kinds == EventKind.FINISHED], items)
    _failed(buffers, rows[kinds == EventKind.FAILED], items, failure_of)


def _columns(rows: Rows, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].tolist() for name in names), strict=True)


def _context_done(buffers: PollBuffers, rows: Rows, items: dict[int, Item]) -> None:
    for native_id, offset, count, has_logprobs, prompt, cached, computed in _columns(
        rows, "request_id", "token_offset", "token_count", "has_logprobs",
        "prompt_tokens", "cached_tokens", "computed_tokens",
    ):  # fmt: skip
        item = items.get(native_id)
        if item is None:
            continue
        item.count_prompt(prompt, cached, computed)
        if has_logprobs:
            item.prompt_logprobs = buffers.logprobs[offset : offset + count].tobytes()
        if item.traceparent:
            item.context_done_ns = time.time_ns()
        if item.report_context_done:
            item.outlet.context_done(item)


def _tokens(buffers: PollBuffers, rows: Rows, items: dict[int, Item]) -> None:
    ids, logprobs = buffers.tokens.data.cast("B"), buffers.logprobs.data.cast("B")
    for native_id, sample, offset, count, has_logprobs in _columns(
        rows, "request_id", "sample", "token_offset", "token_count", "has_logprobs"
    ):
        item = items.get(native_id)
        if item is not None:
            start, end = 4 * offset, 4 * (offset + count)
            item.add_tokens(sample, ids[start:end], logprobs[start:end] if has_logprobs else None)


def _finished(buffers: PollBuffers, rows: Rows, items: dict[int, Item]) -> None:
    for native_id, index, reason, stop_id, generated, prompt, cached, computed, size, missing, row in zip(
        *(
            rows[name].tolist()
            for name in (
                "request_id", "sample", "reason", "stop_id", "generated_tokens",
                "prompt_tokens", "cached_tokens", "computed_tokens", "payload_size", "payload_missing",
            )
        ),
        rows,
        strict=True,
    ):  # fmt: skip
        item = items.get(native_id)
        if item is None:
            continue
        item.count_prompt(prompt, cached, computed)
        sample = item.samples[index]
        sample.finish_reason, sample.stop_token_id, sample.generated_tokens = reason, stop_id, generated
        if size or missing:
            item.payload = _payload(buffers, row)
        item.samples_left -= 1
        if not item.samples_left:
            del items[native_id]
            item.outlet.finished(item)


def _payload(buffers: PollBuffers, event: Any) -> PayloadPart:
    offset, size = int(event["payload_offset"]), int(event["payload_size"])
    failure = ""
    if event["payload_missing"]:
        reason = buffers.message(int(event["text_offset"]), int(event["text_size"]))
        failure = reason or "the engine could not extract it and gave no reason"
    return PayloadPart(
        data=buffers.payload[offset : offset + size].tobytes(),
        dtype=int(event["payload_dtype"]),
        crc32=int(event["payload_crc32"]),
        failure=failure,
    )


def _failed(
    buffers: PollBuffers, rows: Rows, items: dict[int, Item], failure_of: Callable[[int, str], FabricError]
) -> None:
    for native_id, status, offset, size, prompt, cached, computed in _columns(
        rows, "request_id", "status", "text_offset", "text_size", "prompt_tokens", "cached_tokens", "computed_tokens"
    ):
        item = items.pop(native_id, None)
        if item is not None:
            item.count_prompt(prompt, cached, computed)
            item.outlet.failed(item, failure_of(status, buffers.message(offset, size)))
