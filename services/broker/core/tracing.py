# SPDX-License-Identifier: Apache-2.0
"""Spans of traced requests in the core: the wait in the queue, and each dispatch to a worker.

The worker's own spans hang below the dispatch that brought it the item, so that a request that was sent twice shows
both. A request that nobody traces, or whose trace is not recorded, costs a look at its trace context.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry import trace

from services.broker.work import LANE_NAMES
from services.common.telemetry import names, propagation

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from services.broker.core.attempts import Attempt

_SAMPLED = 1
"""Flag of a W3C trace context, in its last two digits."""


def record_dispatch(tracer: Tracer, attempt: Attempt, now: float) -> None:
    """Records the wait of a traced request before its first dispatch, and begins the span of this one.

    The dispatch's span ends with the attempt; `attempt.traceparent` names it.

    Args:
        tracer: Where spans go.
        attempt: What is about to be sent.
        now: Time on the core's clock, in seconds.
    """
    if not attempt.traceparent or not int(attempt.traceparent[-2:], 16) & _SAMPLED:
        return
    entry = attempt.entry
    parent, now_ns = propagation.from_traceparent(entry.work.traceparent), time.time_ns()
    if attempt.number == 1:
        wait = tracer.start_span(
            names.SPAN_QUEUE_WAIT,
            parent,
            attributes={"lane": LANE_NAMES[entry.work.lane]},
            start_time=now_ns - round((now - entry.arrived) * 1e9),
        )
        wait.end(now_ns)
    span = tracer.start_span(
        names.SPAN_DISPATCH,
        parent,
        attributes={
            "node": attempt.worker.node_id,
            "attempt": attempt.number,
            "apart": attempt.apart,
            "leads": bool(attempt.leads),
            "prompt_tokens": entry.prompt_tokens,
            "head_tokens": attempt.head_tokens,
        },
        start_time=now_ns,
    )
    attempt.closed = span.end
    attempt.traceparent = propagation.traceparent(trace.set_span_in_context(span, parent))
