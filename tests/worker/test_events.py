# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from array import array

import pytest

from services.common.errors import InternalError, InvalidArgumentError
from services.worker.events import deliver
from services.worker.native import native_error
from tests.worker.made import Batch, Heard, item, unpacked


def test_streamed_tokens_go_straight_to_the_outlet_with_their_samples_and_scores() -> None:
    heard = Heard()
    items = {1001: item(1, heard, samples=2, streams=True), 1002: item(2, heard, streams=True)}
    batch = Batch().tokens(1001, [5, 6]).tokens(1002, [9], logprobs=[-0.5]).tokens(1001, [7], sample=1)
    deliver(batch.buffers, batch.rows, items, native_error)
    assert heard.calls == [
        ("tokens", 1, 0, [5, 6], None),
        ("tokens", 2, 0, [9], [-0.5]),
        ("tokens", 1, 1, [7], None),
    ]


def test_tokens_of_an_item_that_does_not_stream_gather_on_it_over_batches() -> None:
    heard = Heard()
    kept = item(1, heard)
    items = {1001: kept}
    for tokens in ([5, 6], [7]):
        batch = Batch().tokens(1001, tokens, logprobs=[-1.0] * len(tokens))
        deliver(batch.buffers, batch.rows, items, native_error)
    batch = Batch().finished(1001, reason=1, stop_id=2, generated=4)
    deliver(batch.buffers, batch.rows, items, native_error)
    assert heard.calls == [("finished", 1)]
    assert unpacked(bytes(kept.samples[0].token_ids)) == [5, 6, 7]
    assert list(array("f", bytes(kept.samples[0].logprobs))) == [-1.0, -1.0, -1.0]
    assert (kept.samples[0].finish_reason, kept.samples[0].stop_token_id) == (1, 2)
    assert kept.usage().generated_tokens == 4
    assert items == {}


def test_context_done_is_reported_only_where_it_is_wanted_but_always_counted() -> None:
    heard = Heard()
    silent, reporting = item(1, heard), item(2, heard, reports=True)
    batch = (
        Batch().context_done(1001, cached=1, computed=2).context_done(1002, cached=0, computed=3, logprobs=[-2.0] * 3)
    )
    deliver(batch.buffers, batch.rows, {1001: silent, 1002: reporting}, native_error)
    assert heard.calls == [("context_done", 2)]
    assert (silent.cached_tokens, silent.computed_tokens) == (1, 2)
    assert list(array("f", reporting.prompt_logprobs)) == [-2.0] * 3


def test_everything_of_one_request_in_one_batch_arrives_in_order() -> None:
    heard = Heard()
    items = {1001: item(1, heard, streams=True, reports=True)}
    batch = Batch().context_done(1001).tokens(1001, [5]).finished(1001)
    deliver(batch.buffers, batch.rows, items, native_error)
    assert [call[0] for call in heard.calls] == ["context_done", "tokens", "finished"]


def test_an_item_ends_with_its_last_sample() -> None:
    heard = Heard()
    items = {1001: item(1, heard, samples=3)}
    for sample in (2, 0):
        batch = Batch().finished(1001, sample=sample)
        deliver(batch.buffers, batch.rows, items, native_error)
        assert heard.calls == []
    batch = Batch().finished(1001, sample=1)
    deliver(batch.buffers, batch.rows, items, native_error)
    assert heard.calls == [("finished", 1)]


def test_a_payload_is_copied_out_of_the_buffers() -> None:
    kept = item(1, Heard())
    batch = Batch().finished(1001, payload=b"\x01\x02\x03\x04" * 8, reason=4, generated=0)
    deliver(batch.buffers, batch.rows, {1001: kept}, native_error)
    batch.buffers.payload[:] = 0
    assert kept.payload is not None
    assert (kept.payload.data, kept.payload.crc32, kept.payload.failure) == (b"\x01\x02\x03\x04" * 8, 77, "")


def test_a_failed_extraction_ends_its_item_well_with_the_reason_and_touches_no_neighbour() -> None:
    heard = Heard()
    poor, good = item(1, heard), item(2, heard)
    batch = Batch().finished(1001, missing="row 3 is out of range").finished(1002, payload=b"data" * 16)
    deliver(batch.buffers, batch.rows, {1001: poor, 1002: good}, native_error)
    assert [call[0] for call in heard.calls] == ["finished", "finished"]
    assert poor.payload is not None
    assert (poor.payload.data, poor.payload.failure) == (b"", "row 3 is out of range")
    assert good.payload is not None
    assert good.payload.data == b"data" * 16


def test_a_failure_is_typed_and_names_what_the_library_said() -> None:
    heard = Heard()
    items = {1001: item(1, heard), 1002: item(2, heard)}
    batch = Batch().failed(1001, 13, "a fault in a step").failed(1002, 3, "stop_ids[0]: -1 is below 0")
    deliver(batch.buffers, batch.rows, items, native_error)
    (_, _, first), (_, _, second) = heard.calls
    assert isinstance(first, InternalError)
    assert first.message == "a fault in a step"
    assert isinstance(second, InvalidArgumentError)
    assert second.violations[0].field == "stop_ids[0]"
    assert items == {}


def test_events_of_items_that_nobody_waits_for_are_dropped() -> None:
    batch = Batch().context_done(5).tokens(5, [1]).finished(5).failed(6, 13, "gone")
    deliver(batch.buffers, batch.rows, {}, native_error)


@pytest.mark.parametrize("status", [9, 14, 99])
def test_every_status_becomes_an_error_of_the_suite(status: int) -> None:
    error = native_error(status, "")
    assert error.code in (9, 14, 13)
    assert str(status) in error.message
