# SPDX-License-Identifier: Apache-2.0
"""Traces of bulk rows that nobody asked for: a small share of them, and every one that fails.

A row that is chosen gets a trace of its own when it is taken in; the spans of its wait, its dispatches and the worker
hang below it. Whether a row will fail nobody knows beforehand: one that was not chosen leaves a single span, made when
it has failed, from the time that the core keeps anyway. So a row that is not traced costs a countdown.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from services.broker.work import Lane
from services.common.errors import FabricError
from services.common.telemetry import names, propagation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.trace import Span, Tracer

    from services.broker.core.entry import Entry
    from services.broker.work import Work, WorkEnd


class RowTraces:
    """Chooses rows and records them.

    Args:
        tracer: Records whatever is started with it.
        share: Share of rows that are traced, 0 to 1; failures are recorded even with 0.
    """

    def __init__(self, tracer: Tracer, share: float) -> None:
        self._tracer = tracer
        self._share = share
        self._left = self._gap()
        self._open: dict[tuple[str, str], Span] = {}

    def begin(self, works: Sequence[Work], results: Sequence[FabricError | None], taken_ns: int) -> None:
        """Chooses among the rows that were just taken in; called before any of them is dispatched.

        Args:
            works: What was offered.
            results: What became of each; None is "taken in".
            taken_ns: When they were, in ns since 1970.
        """
        for work, refused in zip(works, results, strict=True):
            if refused is not None or work.lane is not Lane.BULK or work.traceparent:
                continue
            self._left -= 1
            if self._left <= 0:
                self._left = self._gap()
                nobodys = trace.set_span_in_context(trace.INVALID_SPAN)
                span = self._tracer.start_span(names.SPAN_ROW, nobodys, start_time=taken_ns)
                work.traceparent = propagation.traceparent(trace.set_span_in_context(span))
                self._open[work.key] = span

    def ended(self, entry: Entry, end: WorkEnd | FabricError, now: float) -> None:
        """A request has ended.

        Args:
            entry: The request.
            end: How.
            now: Time on the core's clock, in seconds.
        """
        failed = isinstance(end, FabricError)
        span = self._open.pop(entry.work.key, None) if entry.work.traceparent else None
        if span is None:
            if not failed or entry.work.lane is not Lane.BULK:
                return
            span = self._tracer.start_span(
                names.SPAN_ROW,
                propagation.from_traceparent(entry.work.traceparent),
                start_time=time.time_ns() - round((now - entry.arrived) * 1e9),
            )
            if span.get_span_context().trace_flags.sampled:
                entry.work.traceparent = propagation.traceparent(trace.set_span_in_context(span))
        span.set_attributes({"prompt_tokens": entry.prompt_tokens, "attempts": entry.attempts})
        if isinstance(end, FabricError):
            span.set_attribute("reason", end.reason)
            span.set_status(Status(StatusCode.ERROR, end.reason))
        span.end()

    def _gap(self) -> float:
        """How many rows to pass over: random, so that a job whose rows repeat is not sampled at one place only."""
        return random.expovariate(self._share) + 0.5 if self._share else float("inf")
