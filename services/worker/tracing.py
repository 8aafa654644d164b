# SPDX-License-Identifier: Apache-2.0
"""Spans of traced items: the prompt's computation, then the generation.

Both are recorded when an item ends, from times kept on the item, so that an item that nobody traces costs nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.common.telemetry import names, propagation

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from services.worker.items import Item


def record_spans(tracer: Tracer, item: Item) -> None:
    """Records the spans of an item that has just ended; without effect where it is not traced."""
    if not item.traceparent:
        return
    parent, now_ns = propagation.from_traceparent(item.traceparent), time.time_ns()
    prefill_end_ns = item.context_done_ns or now_ns
    prefill = tracer.start_span(
        names.SPAN_PREFILL,
        parent,
        attributes={
            "prompt_tokens": item.prompt_tokens,
            "cached_tokens": item.cached_tokens,
            "computed_tokens": item.computed_tokens,
        },
        start_time=item.begun_ns,
    )
    prefill.end(prefill_end_ns)
    if item.context_done_ns and item.request.options.max_tokens:
        generated = sum(sample.generated_tokens for sample in item.samples)
        decode = tracer.start_span(
            names.SPAN_DECODE, parent, attributes={"generated_tokens": generated}, start_time=prefill_end_ns
        )
        decode.end(now_ns)
