# SPDX-License-Identifier: Apache-2.0
"""Traces over the whole way, from a client through broker and worker, as a collector gets them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from engines.simulated import FAIL_REQUEST, RequestFault
from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.common.telemetry import names
from tests.jobs.running import Fabric
from tests.support import suite
from tests.support.collector import collecting
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.collector import Collector, Span

pytestmark = pytest.mark.e2e

CANARY = "CANARY-TRACED-0815"
BROKEN = "~"
"""The engine fails every prompt that holds this byte."""
ROWS = 400


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def fabric(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    env = {f"IFAB_{service}_OTLP_ENDPOINT": collector.endpoint for service in ("BROKER", "WORKER")}
    env["OTEL_METRIC_EXPORT_INTERVAL"] = "500"  # milliseconds; the SDK's own variable
    faults = (RequestFault(FAIL_REQUEST, "prompt_token", ord(BROKEN)),)
    broker = {"trace_row_ratio": 0.05, "log_level": "debug"}
    made = Fabric(
        tmp_path_factory.mktemp("traced"),
        engine={"request_faults": faults},
        broker=broker,
        worker_env=env,
        broker_env=env,
    )
    with made:
        yield made.start()


def of_trace(collector: Collector, trace: str) -> dict[str, Span]:
    return {span.name: span for span in collector.spans() if span.trace == trace}


def generate(fabric: Fabric, collector: Collector) -> None:
    """Sends one traced request and waits for its answer, which a suite that has just begun may not give at once."""
    broker = fabric.brokers[0].address

    def generated() -> bool:
        done = suite.run("--otlp-endpoint", collector.endpoint, "generate", CANARY, "-n", "8", "--broker", broker)
        return done.returncode == 0

    block_until(generated, what="an answer")


def test_one_request_is_one_trace_from_the_command_to_the_engine(fabric: Fabric, collector: Collector) -> None:
    generate(fabric, collector)
    wanted = {
        names.SPAN_COMMAND,
        "ifabric.broker.v1.BrokerService/GenerateStream",
        names.SPAN_QUEUE_WAIT,
        names.SPAN_DISPATCH,
        names.SPAN_PREFILL,
        names.SPAN_DECODE,
    }

    def whole() -> dict[str, Span]:
        for command in collector.spans(names.SPAN_COMMAND):
            found = of_trace(collector, command.trace)
            if wanted <= set(found):
                return found
        return {}

    found = block_until(whole, what="the whole trace")
    assert [found[name].service for name in sorted(wanted)] == [
        "broker", "broker", "broker", "cli", "worker", "worker"
    ]  # fmt: skip
    call = found["ifabric.broker.v1.BrokerService/GenerateStream"]
    dispatch = found[names.SPAN_DISPATCH]
    assert call.parent == found[names.SPAN_COMMAND].id
    assert found[names.SPAN_QUEUE_WAIT].parent == dispatch.parent == call.id
    assert found[names.SPAN_PREFILL].parent == found[names.SPAN_DECODE].parent == dispatch.id
    assert found[names.SPAN_QUEUE_WAIT].end_ns <= found[names.SPAN_PREFILL].start_ns
    assert found[names.SPAN_PREFILL].end_ns <= found[names.SPAN_DECODE].end_ns
    assert found[names.SPAN_PREFILL].attributes["prompt_tokens"] == len(CANARY)


def test_a_share_of_bulk_rows_is_traced_and_every_row_that_fails(
    fabric: Fabric, collector: Collector, tmp_path: Path
) -> None:
    broken = set(range(0, ROWS, 20))
    before = {span.id for span in collector.spans(names.SPAN_ROW)}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            f'{{"id": "r{row}", "prompt": "{CANARY} {row} {BROKEN if row in broken else ""}"}}\n' for row in range(ROWS)
        )
    )
    done = suite.run(
        "bulk", "run", str(rows), "-o", str(tmp_path / "out.jsonl"), "--defaults", "{\"max_tokens\": 4}",
        "--broker", fabric.brokers[0].address,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr

    def of_rows() -> list[Span]:
        return [span for span in collector.spans(names.SPAN_ROW) if span.id not in before]

    def recorded() -> list[Span]:
        spans = of_rows()
        failures = sum(span.failed for span in spans)
        return spans if failures >= len(broken) and len(spans) - failures >= 3 else []

    spans = block_until(recorded, what="a span of each row that failed, and of some that did not")
    well = [span for span in spans if not span.failed]
    assert sum(span.failed for span in spans) == len(broken)
    assert all(span.attributes["reason"] for span in spans if span.failed)
    assert len(well) <= 60  # 19 are to be expected
    rows_begun = {span.id: span.start_ns for span in spans}
    waits = [span for span in collector.spans(names.SPAN_QUEUE_WAIT) if span.parent in rows_begun]
    # The clocks of both are not the same one.
    assert all(rows_begun[wait.parent] <= wait.start_ns + 5_000_000 for wait in waits)
    below = Counter(span.trace for span in collector.spans(names.SPAN_DISPATCH))
    assert all(below[span.trace] for span in well)


def test_the_line_of_a_request_and_that_of_a_row_that_failed_name_their_traces(
    fabric: Fabric, collector: Collector
) -> None:
    generate(fabric, collector)
    broker = fabric.brokers[0]
    assert broker.process is not None
    request = broker_service_pb2.GenerationRequest(request_id="one", max_tokens=4)
    request.prompt.text = BROKEN
    opening = broker_service_pb2.ExchangeRequest(open=broker_service_pb2.ExchangeOpen(), requests=[request])
    with grpc.insecure_channel(broker.address) as channel:
        stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
        list(stub.Exchange(iter([opening]), timeout=PATIENCE_S))
    log = broker.process.logs
    (failed,) = block_until(lambda: log("row.failed"), what="the line of the row")
    ended = block_until(lambda: log("request.ended"), what="the line of the request")[-1]

    def told() -> bool:
        rows = {span.trace for span in collector.spans(names.SPAN_ROW) if span.failed}
        calls = {span.trace for span in collector.spans(names.SPAN_DISPATCH)}
        return failed["trace_id"] in rows and ended["trace_id"] in calls

    block_until(told, what="the spans that both lines name")


def test_no_span_holds_a_prompt(fabric: Fabric, collector: Collector) -> None:
    generate(fabric, collector)
    block_until(lambda: collector.spans(names.SPAN_DECODE), what="the engine's span")
    assert CANARY not in collector.raw()
    wanted = {"ifabric.process.info", "ifabric.broker.requests", "ifabric.worker.engine.held_back"}
    block_until(lambda: wanted <= collector.metrics(), what="broker and worker push their metrics")
