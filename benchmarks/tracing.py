# SPDX-License-Identifier: Apache-2.0
"""What tracing costs a bulk row at the broker: `make bench-tracing`.

Rows go through the very code that chooses and records them (`services.broker.core.row_traces`), with spans that are
exported to a collector on loopback. One row in a hundred is traced; the cost is spread over all of them, and set
against what the broker aims to spend on a row (`broker_cpu_us_per_request` of `make bench-throughput`). CPU time of the
whole process counts, exporter and collector included.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.frame import Report, take_no_options
from services.broker.core.row_traces import RowTraces
from services.broker.core.tracing import record_dispatch
from services.broker.work import Lane, Work
from services.common.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.broker.core.attempts import Attempt
    from services.broker.core.entry import Entry
    from services.broker.work import Sink, WorkEnd

ROWS, RUNS = 50_000, 5
SHARE = 0.01
REQUEST_US = 100.0
"""What the broker aims to spend on a row."""


@dataclass
class _Row:
    """As much of an entry and its attempt as tracing looks at."""

    work: Work
    arrived: float = 0.0
    prompt_tokens: int = 64
    attempts: int = 1


@dataclass
class _Node:
    node_id: str = "node"


@dataclass
class _Attempt:
    entry: _Row
    traceparent: str
    worker: _Node
    number: int = 1
    apart: bool = False
    leads: tuple[()] = ()
    head_tokens: int = 0
    closed: Any = None


class _Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes everything and keeps nothing."""

    def Export(self, request: Any, context: Any) -> Any:
        """See OTLP."""
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            return trace_service_pb2.ExportTraceServiceResponse()
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def _collector() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    adds: list[Any] = [
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
    ]
    for add in adds:
        add(_Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def _run(telemetry: Telemetry, share: float | None) -> float:
    """CPU time a row, in microseconds; None does everything but the tracing."""
    traces = None if share is None else RowTraces(telemetry.kept, share)
    digests, tokens = frozenset({"a" * 64}), np.empty(0, np.int32)
    works = [
        Work(("t", f"r{row}"), tokens, 4, digests, cast("Sink", None), Lane.BULK) for row in range(ROWS)
    ]  # fmt: skip
    end: Any = cast("WorkEnd", None)
    node, taken = _Node(), [None] * 256
    began = time.process_time()
    for start in range(0, ROWS, 256):
        part = works[start : start + 256]
        if traces is not None:
            traces.begin(part, taken[: len(part)], time.time_ns())
        for work in part:
            row = _Row(work)
            attempt = _Attempt(row, work.traceparent, node)
            record_dispatch(telemetry.tracer, cast("Attempt", attempt), 1.0)
            if attempt.closed is not None:
                attempt.closed()
            if traces is not None:
                traces.ended(cast("Entry", row), end, 2.0)
    return (time.process_time() - began) / ROWS * 1e6


def main() -> None:
    """Entry point."""
    take_no_options(__doc__)
    report = Report("tracing")
    with _collector() as endpoint:
        telemetry = Telemetry("bench", otlp_endpoint=endpoint)
        without, with_ = [], []
        for _ in range(RUNS):
            without.append(_run(telemetry, None))
            with_.append(_run(telemetry, SHARE))
        telemetry.close()
    report.figure("untraced_us_per_row", without, unit="us")
    report.figure("traced_us_per_row", with_, unit="us")
    added = [left - right for left, right in zip(with_, without, strict=True)]
    report.figure("added_us_per_row", added, unit="us")
    report.figure("added_share_of_request", [each / REQUEST_US for each in added], unit="", goal="<= 0.05")
    report.fact("rows", ROWS)
    report.fact("share", SHARE)
    report.print()


if __name__ == "__main__":
    main()
