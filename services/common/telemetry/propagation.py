# SPDX-License-Identifier: Apache-2.0
"""Trace context across process borders, in W3C form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Iterable

_PROPAGATOR = TraceContextTextMapPropagator()
_KEYS = ("traceparent", "tracestate")


def metadata(context: otel_context.Context | None = None) -> tuple[tuple[str, str], ...]:
    """Returns gRPC metadata that carries the trace context (the current one if absent); empty without a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return tuple(carrier.items())


def traceparent(context: otel_context.Context | None = None) -> str:
    """Returns the `traceparent` of the trace context (the current one if absent); empty without a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier.get("traceparent", "")


def log_ids(value: str) -> dict[str, str]:
    """Returns what a log line says of a trace that is not the current one, from its `traceparent`; empty without."""
    _, _, rest = value.partition("-")
    trace_id, _, rest = rest.partition("-")
    return {"trace_id": trace_id, "span_id": rest.partition("-")[0]} if trace_id else {}


def from_metadata(pairs: Iterable[tuple[str, str | bytes]]) -> otel_context.Context:
    """Returns the trace context of received gRPC metadata; an empty context where there is none or it is malformed."""
    carrier = {key: value for key, value in pairs if key in _KEYS and isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, otel_context.Context())


def from_traceparent(value: str) -> otel_context.Context:
    """Returns the trace context of one `traceparent`; an empty context where it is empty or malformed."""
    return _PROPAGATOR.extract({"traceparent": value} if value else {}, otel_context.Context())
