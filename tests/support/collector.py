# SPDX-License-Identifier: Apache-2.0
"""An OTLP collector that keeps what it is sent."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Span:
    """One span as it came."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes spans and metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[Any] = []
        self.endpoint = ""
        """What processes are told, `http://host:port`."""

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            self._requests.append(request)
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            return trace_service_pb2.ExportTraceServiceResponse()
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def spans(self, name: str | None = None) -> list[Span]:
        """Every span so far; only those of one name if given."""
        found = [
            _span(resource.resource, span)
            for request in self._all(trace_service_pb2.ExportTraceServiceRequest)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return [span for span in found if name is None or span.name == name]

    def metrics(self) -> set[str]:
        """Names of all metrics so far."""
        return {
            metric.name
            for request in self._all(metrics_service_pb2.ExportMetricsServiceRequest)
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def resources(self) -> list[dict[str, Any]]:
        """What each push of metrics says of its process."""
        return [
            {each.key: _value(each.value) for each in resource.resource.attributes}
            for request in self._all(metrics_service_pb2.ExportMetricsServiceRequest)
            for resource in request.resource_metrics
        ]

    def raw(self) -> str:
        """Everything that came, as text."""
        with self._lock:
            return "\n".join(str(request) for request in self._requests)

    def _all(self, kind: type[Any]) -> list[Any]:
        with self._lock:
            return [request for request in self._requests if isinstance(request, kind)]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector on a free port of loopback."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    adds: list[Any] = [
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
    ]
    for add in adds:
        add(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _span(resource: Any, span: Any) -> Span:
    service = next(each.value.string_value for each in resource.attributes if each.key == "service.name")
    attributes = {each.key: _value(each.value) for each in span.attributes}
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes,
        span.status.code == 2,
    )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
