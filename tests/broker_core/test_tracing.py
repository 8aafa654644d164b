# SPDX-License-Identifier: Apache-2.0
"""Spans of the core: one wait a request, one dispatch an attempt, the worker's below the dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.broker.core import wire
from services.broker.core.tracing import record_dispatch
from services.common.telemetry import names
from tests.broker_core.made import Bench, work

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from services.broker.core.attempts import Attempt

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider.get_tracer("test")


def _dispatch(bench: Bench, tracer: Tracer) -> Attempt:
    (attempt,) = bench.give()
    record_dispatch(tracer, attempt, bench.now)
    return attempt


def test_a_request_that_ran_twice_shows_its_wait_and_both_dispatches(
    spans: InMemorySpanExporter, tracer: Tracer
) -> None:
    bench = Bench()
    made = work([1] * 6)
    made.traceparent = f"00-{TRACE}-{PARENT}-01"
    bench.submit(made)
    worker = bench.worker("w1")
    bench.now += 2.0
    first = _dispatch(bench, tracer)
    (message,) = wire.dispatch_messages([first])
    below = message.dispatch.items[0].traceparent
    bench.lose(worker)
    bench.worker("w2")
    bench.now += 5.0
    bench.finish(_dispatch(bench, tracer))

    wait, lost, ended = spans.get_finished_spans()
    assert [wait.name, lost.name, ended.name] == [names.SPAN_QUEUE_WAIT, names.SPAN_DISPATCH, names.SPAN_DISPATCH]
    for span in (wait, lost, ended):
        assert span.context is not None
        assert span.parent is not None
        assert format(span.context.trace_id, "032x") == TRACE
        assert format(span.parent.span_id, "016x") == PARENT
    assert (wait.end_time or 0) - (wait.start_time or 0) == pytest.approx(2e9)
    assert [dict(span.attributes or {})["node"] for span in (lost, ended)] == ["w1", "w2"]
    assert [dict(span.attributes or {})["attempt"] for span in (lost, ended)] == [1, 2]
    assert lost.context is not None
    assert below == f"00-{TRACE}-{lost.context.span_id:016x}-01", "the worker's spans lie below the dispatch"


@pytest.mark.parametrize("traceparent", ["", f"00-{TRACE}-{PARENT}-00"])
def test_what_nobody_records_leaves_nothing_and_goes_on(
    spans: InMemorySpanExporter, tracer: Tracer, traceparent: str
) -> None:
    bench = Bench()
    made = work([1] * 6)
    made.traceparent = traceparent
    bench.submit(made)
    bench.worker("w")
    attempt = _dispatch(bench, tracer)
    (message,) = wire.dispatch_messages([attempt])
    assert message.dispatch.items[0].traceparent == traceparent
    bench.finish(attempt)
    assert spans.get_finished_spans() == ()
