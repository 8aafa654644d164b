# SPDX-License-Identifier: Apache-2.0
"""Frames of the worker stream, to and from what the core works with. Token ids are never touched one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ifabric.worker.v1 import worker_service_pb2 as wire
from services.broker.core.workers import Amount
from services.broker.work import Lane, SampleEnd
from services.common.errors import from_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.broker.core.attempts import Attempt
    from services.broker.core.decision import Decision
    from services.broker.core.workers import Worker

MESSAGE_BYTES = 1024 * 1024
"""A message of work is cut once its prompts reach this size."""
MESSAGE_ITEMS = 256
"""And at this many items."""
HEAD_ENDS_MAX = 16
"""Head ends that an item may name."""


def dispatch_messages(attempts: Sequence[Attempt]) -> Iterator[wire.ExecuteRequest]:
    """Makes the messages that send attempts, in order.

    Must run before anything else happens to the attempts: prompts are put together from the tree as it is now.
    """
    message, size = wire.ExecuteRequest(), 0
    items = message.dispatch.items
    for attempt in attempts:
        if size >= MESSAGE_BYTES or len(items) >= MESSAGE_ITEMS:
            yield message
            message, size = wire.ExecuteRequest(), 0
            items = message.dispatch.items
        size += _fill(items.add(), attempt)
    if items:
        yield message


def cancel_message(handles: Sequence[int]) -> wire.ExecuteRequest:
    """Makes the message that ends items."""
    return wire.ExecuteRequest(cancel=wire.CancelItems(handles=handles))


def amount(credit: wire.Credit) -> Amount:
    """Reads a credit."""
    return Amount(credit.tokens, credit.sequences, credit.payload_bytes)


def apply(message: wire.ExecuteResponse, decision: Decision, worker: Worker, now: float) -> None:
    """Tells the core everything that a message of a worker says, in the order in which its parts apply."""
    for done in message.context_done:
        decision.context_done(worker, done.handle, done.cached_tokens, done.computed_tokens)
    if message.HasField("tokens"):
        _apply_tokens(message.tokens, decision, worker)
    for item in message.finished:
        decision.finished(
            worker,
            item.handle,
            [_sample(sample) for sample in item.samples],
            item.usage,
            item.payload if item.HasField("payload") else None,
            np.frombuffer(item.prompt_logprobs, "<f4") if item.prompt_logprobs else None,
            now,
        )
    for failure in message.failed:
        decision.failed(worker, failure.handle, from_status(failure.status), failure.usage, now)
    if message.HasField("credit"):
        decision.credit(worker, amount(message.credit))
    if message.HasField("stats"):
        decision.stats(worker, message.stats, now)


def _apply_tokens(deltas: wire.TokenDeltas, decision: Decision, worker: Worker) -> None:
    """Hands tokens on, all of one sample's in one piece: a message often holds several steps' worth."""
    handles, counts = np.array(deltas.handles, np.uint64), np.array(deltas.counts, np.int64)
    samples = np.array(deltas.samples or (0,) * len(handles), np.int64)
    ids = np.frombuffer(deltas.token_ids, "<i4")
    logprobs = np.frombuffer(deltas.logprobs, "<f4") if deltas.logprobs else None
    order = np.lexsort((samples, handles))  # stable: the tokens of a sample keep their order
    if (order[1:] < order[:-1]).any():
        starts = np.cumsum(counts) - counts
        handles, counts, samples = handles[order], counts[order], samples[order]
        at = np.repeat(starts[order] - np.cumsum(counts) + counts, counts) + np.arange(len(ids))
        ids = ids[at]
        logprobs = None if logprobs is None else logprobs[at]
    first = np.flatnonzero(np.diff(handles, prepend=handles[:1] + 1) | np.diff(samples, prepend=-1).astype(bool))
    bounds = np.append(np.cumsum(counts)[first] - counts[first], len(ids)).tolist()
    for index, (handle, sample) in enumerate(zip(handles[first].tolist(), samples[first].tolist(), strict=True)):
        begin, end = bounds[index], bounds[index + 1]
        decision.tokens(worker, handle, sample, ids[begin:end], None if logprobs is None else logprobs[begin:end])


def _sample(sample: wire.SampleResult) -> SampleEnd:
    return SampleEnd(
        np.frombuffer(sample.token_ids, "<i4"),
        np.frombuffer(sample.logprobs, "<f4") if sample.logprobs else None,
        sample.finish_reason,
        sample.stop_token_id,
    )


def _fill(item: wire.WorkItem, attempt: Attempt) -> int:
    """Fills an item in; returns the size of its prompt."""
    entry = attempt.entry
    work, flow = entry.work, entry.flow
    prompt = flow.prompt(entry)
    item.handle = attempt.handle
    item.request_id = work.key[1]
    item.attempt = attempt.number
    item.token_ids = prompt
    item.max_tokens = work.max_tokens
    item.samples = work.samples
    item.sampling.CopyFrom(work.sampling)
    if work.stop_token_ids:
        item.stop_token_ids.extend(work.stop_token_ids)
    if work.guide is not None:
        item.guide.CopyFrom(work.guide)
    item.ignore_end = work.ignore_end
    item.logprobs = work.logprobs
    item.prompt_logprobs = work.prompt_logprobs
    item.salt = work.salt
    # Within a lane the order of dispatch is the order that was decided; only the lanes differ.
    item.priority = 1 if work.lane is Lane.INTERACTIVE else 0
    item.stream_tokens = work.stream_tokens
    item.report_context_done = attempt.reports_context
    item.return_payload = work.payload_bytes > 0
    item.traceparent = attempt.traceparent
    item.head_ends.extend(_head_ends(attempt))
    return len(prompt)


def _head_ends(attempt: Attempt) -> list[int]:
    """Where siblings part, as far as the worker's own blocks reach; of too many, the deepest and the shallowest."""
    block = attempt.worker.facts.block_tokens
    if not block or attempt.apart:
        return []
    ends = attempt.entry.flow.head_ends(attempt.entry)
    # Where equal prompts end with a block there is nothing behind it in which they could part.
    whole = sorted({end // block * block for end in ends if end // block * block < attempt.entry.prompt_tokens} - {0})
    return whole if len(whole) <= HEAD_ENDS_MAX else [*whole[: HEAD_ENDS_MAX - 1], whole[-1]]
