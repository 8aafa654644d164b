# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.telemetry import names
from services.worker.events import deliver
from services.worker.items import Item, item_from_wire
from services.worker.native import native_error
from services.worker.tracing import record_spans
from tests.worker.made import Batch, Heard, work

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def ended(traceparent: str, *, reached_context: bool = True) -> Item:
    """An item that has gone through the engine."""
    item = item_from_wire(work(1, [1, 2, 3], traceparent=traceparent), 1001, Heard(), 0)
    batch = Batch()
    if reached_context:
        batch.context_done(1001, computed=3).tokens(1001, [4]).finished(1001, generated=4)
    else:
        batch.failed(1001, 13, "a fault")
    deliver(batch.buffers, batch.rows, {1001: item}, native_error)
    return item


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def recorded(spans: InMemorySpanExporter, item: Item) -> list[tuple[str, str, dict[str, object]]]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    record_spans(provider.get_tracer("test"), item)
    return [
        (span.name, format(span.context.trace_id, "032x"), dict(span.attributes or {}))
        for span in spans.get_finished_spans()
        if span.context
    ]


def test_a_traced_item_leaves_a_span_for_its_prompt_and_one_for_its_output(spans: InMemorySpanExporter) -> None:
    prefill, decode = recorded(spans, ended(TRACEPARENT))
    assert prefill == (names.SPAN_PREFILL, TRACE, {"prompt_tokens": 3, "cached_tokens": 0, "computed_tokens": 3})
    assert decode == (names.SPAN_DECODE, TRACE, {"generated_tokens": 4})
    first, second = spans.get_finished_spans()
    assert (first.start_time or 0) <= (first.end_time or 0) == (second.start_time or 0) <= (second.end_time or 0)


def test_an_item_that_failed_before_its_prompt_was_computed_has_one_span(spans: InMemorySpanExporter) -> None:
    assert [name for name, _, _ in recorded(spans, ended(TRACEPARENT, reached_context=False))] == [names.SPAN_PREFILL]


def test_an_item_that_nobody_traces_leaves_nothing(spans: InMemorySpanExporter) -> None:
    item = ended("")
    assert recorded(spans, item) == []
    assert (item.begun_ns, item.context_done_ns) == (0, 0)
