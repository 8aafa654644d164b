# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

from ifabric.engine.v1 import contract_pb2
from ifabric.worker.v1 import worker_service_pb2 as wire
from services.common.errors import ResourceExhaustedError, UnavailableError
from services.worker.items import PayloadPart
from services.worker.outbox import MESSAGE_BYTES, Outbox
from tests.worker.made import item, packed, unpacked

if TYPE_CHECKING:
    from services.worker.items import Item

FORM = contract_pb2.PayloadForm(shape=[4], dtype=contract_pb2.PAYLOAD_DTYPE_FLOAT32, layers=[-1])


def outbox(ended: list[Item] | None = None) -> Outbox:
    return Outbox(FORM, (ended if ended is not None else []).append)


def add(box: Outbox, handle: int, ids: list[int], *, sample: int = 0, logprobs: list[float] | None = None) -> None:
    scores = None if logprobs is None else memoryview(array("f", logprobs)).cast("B")
    box.tokens(item(handle, box, samples=sample + 1), sample, memoryview(packed(ids)), scores)


async def test_nothing_to_say_is_no_message() -> None:
    box = outbox()
    assert not box.ready.is_set()
    assert list(box.messages()) == []


async def test_tokens_leave_as_columns_in_the_order_in_which_they_came() -> None:
    box = outbox()
    add(box, 1, [5, 6])
    add(box, 2, [7])
    add(box, 1, [8])
    (message,) = box.messages()
    assert list(message.tokens.handles) == [1, 2, 1]
    assert list(message.tokens.counts) == [2, 1, 1]
    assert unpacked(message.tokens.token_ids) == [5, 6, 7, 8]
    assert not message.tokens.samples
    assert not message.tokens.logprobs
    assert not box.ready.is_set()


async def test_samples_and_logprobs_appear_once_somebody_has_them() -> None:
    box = outbox()
    add(box, 1, [5, 6])
    add(box, 2, [7], sample=1, logprobs=[-0.25])
    add(box, 1, [8])
    (message,) = box.messages()
    assert list(message.tokens.samples) == [0, 1, 0]
    scores = list(array("f", message.tokens.logprobs))
    assert scores[2] == -0.25
    assert [math.isnan(score) for score in scores] == [True, True, False, True]


async def test_a_long_backlog_is_cut_into_messages_and_ends_follow_all_tokens() -> None:
    box = outbox()
    count = 3 * MESSAGE_BYTES // (4 * 1000)
    for _ in range(count):
        add(box, 1, list(range(1000)))
    box.finished(item(1, box))
    messages = list(box.messages())
    assert len(messages) >= 3
    assert all(len(message.tokens.token_ids) <= MESSAGE_BYTES for message in messages)
    assert sum(len(message.tokens.token_ids) for message in messages) == count * 4000
    assert [len(message.finished) for message in messages[:-1]] == [0] * (len(messages) - 1)
    assert len(messages[-1].finished) == 1


async def test_an_end_carries_samples_usage_and_payload() -> None:
    box = outbox()
    ended = item(3, box, samples=2)
    ended.count_prompt(10, 4, 6)
    ended.samples[1].token_ids += packed([1, 2])
    ended.samples[1].finish_reason, ended.samples[1].stop_token_id, ended.samples[1].generated_tokens = 1, 2, 3
    ended.payload = PayloadPart(b"\0" * 16, 1, 99, "")
    box.finished(ended)
    (message,) = box.messages()
    (end,) = message.finished
    assert unpacked(end.samples[1].token_ids) == [1, 2]
    assert (end.samples[1].finish_reason, end.samples[1].stop_token_id) == (1, 2)
    assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.computed_tokens) == (10, 4, 6)
    assert end.usage.generated_tokens == 3
    payload = end.payload
    assert (payload.data, list(payload.shape), list(payload.layers)) == (b"\0" * 16, [4], [-1])
    assert (payload.position, payload.crc32, payload.failure) == (9, 99, "")


async def test_an_item_counts_as_outstanding_until_its_end_is_about_to_be_sent() -> None:
    ended: list[Item] = []
    box = outbox(ended)
    size = MESSAGE_BYTES // 2 + 1
    items = [item(handle, box) for handle in range(3)]
    for one in items:
        one.payload = PayloadPart(bytes(size), 1, 0, "")
        box.finished(one)
    messages = box.messages()
    next(messages)
    assert [one.handle for one in ended] == [0], "a reader that takes one message frees one message's worth"
    assert len(list(messages)) == 2
    assert [one.handle for one in ended] == [0, 1, 2]


async def test_failures_are_typed_items() -> None:
    box = outbox()
    box.failed(item(1, box), UnavailableError("gone"))
    box.refuse(2, ResourceExhaustedError("too much", retry_after_s=0.0))
    (message,) = box.messages()
    assert [(failed.handle, failed.status.code, failed.status.message) for failed in message.failed] == [
        (1, 14, "gone"),
        (2, 8, "too much"),
    ]


async def test_only_the_newest_credit_is_sent() -> None:
    box = outbox()
    box.credit(wire.Credit(tokens=1))
    box.credit(wire.Credit(tokens=2))
    (message,) = box.messages()
    assert message.credit.tokens == 2
