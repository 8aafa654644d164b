# SPDX-License-Identifier: Apache-2.0
"""Metrics as Prometheus sees them, the rules of their names, and the page that explains them."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace

from services.common.errors import StartError
from services.common.telemetry import Kind, Metric, Telemetry, names, propagation
from services.common.telemetry.endpoint import CONNECTIONS
from tests.support.collector import collecting
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
METRICS = names.all_metrics()
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry("test")
    yield made
    made.close()


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_the_endpoint_takes_a_free_port_and_shows_what_was_recorded(telemetry: Telemetry) -> None:
    address = telemetry.serve_metrics("127.0.0.1:0")
    assert not address.endswith(":0")
    telemetry.counter(names.HEARTBEATS).add(2, {"outcome": "renewed"})
    telemetry.up_down(names.WATCHERS).add(-1)
    telemetry.gauge(names.NODES).set(4, {"state": "accepted"})
    telemetry.histogram(names.PROBE_DURATION).record(0.03, {"outcome": "agreed"})
    telemetry.observe(names.ENGINE_STEPS, lambda: [(7, {"engine": "e"})])
    telemetry.observe(names.ENGINE_ACTIVE, lambda: [(1.5, {"engine": "e"})])
    text = scrape(address)
    for line in (
        'ifabric_provisioner_heartbeats_total{outcome="renewed"} 2.0',
        "ifabric_provisioner_watchers -1.0",
        'ifabric_provisioner_nodes{state="accepted"} 4.0',
        'ifabric_provisioner_probe_duration_seconds_bucket{le="0.05",outcome="agreed"} 1.0',
        'ifabric_worker_engine_steps_total{engine="e"} 7.0',
        'ifabric_worker_engine_active{engine="e"} 1.5',
        'ifabric_process_info{service="test",version="0.1.0"} 1.0',
    ):
        assert line in text
    assert "otel_scope" not in text


def test_connections_that_hold_on_give_way_to_a_scrape(telemetry: Telemetry) -> None:
    """More than there are places for, each of which always has a little more to say."""
    address = telemetry.serve_metrics("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((host, int(port)), 5)) for _ in range(CONNECTIONS + 8)]
        for letter in b"GET /met":
            for connection in slow:
                with contextlib.suppress(OSError):  # some have given way
                    connection.send(bytes([letter]))
            assert "ifabric_process_info" in scrape(address)


def test_two_telemetries_do_not_mix(telemetry: Telemetry) -> None:
    other = Telemetry("other")
    telemetry.counter(names.HEARTBEATS).add(1, {"outcome": "renewed"})
    assert "heartbeats" not in scrape(other.serve_metrics("127.0.0.1:0"))
    other.close()


def test_a_taken_port_is_one_sentence(telemetry: Telemetry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot serve metrics on {address}: the address is already in use"):
            telemetry.serve_metrics(address)


def test_an_instrument_of_the_wrong_kind_is_refused(telemetry: Telemetry) -> None:
    with pytest.raises(TypeError, match=r"ifabric\.provisioner\.nodes is a gauge, not a counter"):
        telemetry.counter(names.NODES)
    with pytest.raises(TypeError, match="not a gauge"):
        telemetry.observe(names.PROBE_DURATION, list)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"(ifabric|rpc)(\.[a-z][a-z0-9_]*)+", metric.name)
    assert not re.search(r"(total|count|seconds|bytes)$", metric.name)
    assert metric.meaning.endswith((".", "1."))
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.unit in ("s", "By", "1") or re.fullmatch(r"\{[a-z_]+\}", metric.unit)
    assert metric.name.endswith("duration") == (metric.unit == "s")
    assert not {"request_id", "user", "tenant", "prompt", "job", "incarnation", "pod"} & set(metric.labels)


def test_every_name_is_used() -> None:
    sources = "\n".join(file.read_text() for file in (ROOT / "services").rglob("*.py"))
    constants = [key for key, value in vars(names).items() if isinstance(value, Metric) or key.startswith("SPAN_")]
    assert [key for key in constants if not re.search(rf"\bnames\.{key}\b", sources)] == []


def test_names_are_told_apart() -> None:
    every = [metric.name for metric in METRICS] + list(names.all_spans())
    assert len(every) == len(set(every))


def test_traces_and_metrics_are_pushed_where_a_collector_is_named() -> None:
    with collecting() as collector:
        telemetry = Telemetry("test", otlp_endpoint=collector.endpoint, push_s=PATIENCE_S)
        with telemetry.tracer.start_as_current_span(names.SPAN_PROBE):
            telemetry.counter(names.HEARTBEATS).add(1, {"outcome": "renewed"})
        telemetry.close()
        assert names.SPAN_PROBE in {span.name for span in collector.spans()}
        assert {"ifabric.provisioner.heartbeats", "ifabric.process.info"} <= collector.metrics()


def test_what_is_read_when_somebody_looks_is_pushed_whatever_kind_of_number_it_is() -> None:
    with collecting() as collector:
        telemetry = Telemetry("test", otlp_endpoint=collector.endpoint, push_s=PATIENCE_S)
        for metric, value in ((names.ENGINE_HELD_BACK, True), (names.ENGINE_QUEUED, 3), (names.ENGINE_BUSY, 0.5)):
            telemetry.observe(metric, functools.partial(list, [(value, {"engine": "e"})]))
        telemetry.close()
        assert {"ifabric.worker.engine.held_back", "ifabric.worker.engine.queued"} <= collector.metrics()


def test_a_push_names_its_process_and_what_whoever_runs_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=worker-0,service.name=other")
    with collecting() as collector:
        Telemetry("worker", otlp_endpoint=collector.endpoint, push_s=PATIENCE_S).close()
        (said,) = collector.resources()
    assert (said["service.name"], said["k8s.pod.name"]) == ("worker", "worker-0")
    assert said["service.instance.id"]


def test_what_was_chosen_is_recorded_whatever_the_ratio_says() -> None:
    with collecting() as collector:
        telemetry = Telemetry("test", otlp_endpoint=collector.endpoint, push_s=PATIENCE_S, trace_ratio=0.0)
        with telemetry.tracer.start_as_current_span(names.SPAN_PROBE):
            pass
        with telemetry.kept.start_as_current_span(names.SPAN_ROW):
            pass
        telemetry.close()
        assert [span.name for span in collector.spans()] == [names.SPAN_ROW]


def documented() -> dict[str, tuple[str, str, tuple[str, ...], str]]:
    """Name to kind, unit, labels and the rest of the section, as docs/metrics.md says."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    found = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        facts = re.match(
            r"\n(counter|up-down counter|gauge|histogram) · unit `([^`]+)` · (?:no labels|labels (.+?)) · Prometheus "
            r"`[^`]+`\n\n(.+?)\n\n\*Do:\* (.+)",
            body,
            flags=re.DOTALL,
        )
        assert facts, f"section {heading} of docs/metrics.md has another form than the others"
        labels = tuple(re.findall(r"`([a-z_.]+)`(?= \(|,|$)", facts[3] or ""))
        found[heading.strip("`")] = (facts[1], facts[2], labels, " ".join(facts[4].split()))
    return found


def test_the_page_explains_every_metric_and_no_other() -> None:
    assert set(documented()) == {metric.name for metric in METRICS}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_the_page_says_what_the_code_says(metric: Metric) -> None:
    kind, unit, labels, meaning = documented()[metric.name]
    assert (kind, unit, labels) == (metric.kind.value, metric.unit, metric.labels)
    assert meaning.startswith(metric.meaning)


def test_the_page_has_the_names_that_prometheus_shows(telemetry: Telemetry) -> None:
    for metric in METRICS:
        labels = dict.fromkeys(metric.labels, "x")
        match metric.kind:
            case Kind.COUNTER:
                telemetry.counter(metric).add(1, labels)
            case Kind.UP_DOWN:
                telemetry.up_down(metric).add(1, labels)
            case Kind.GAUGE:
                if metric is not names.PROCESS_INFO:
                    telemetry.gauge(metric).set(1, labels)
            case Kind.HISTOGRAM:
                telemetry.histogram(metric).record(1, labels)
    shown = {
        match[1]
        for match in re.finditer(r"^# TYPE (\S+) ", scrape(telemetry.serve_metrics("127.0.0.1:0")), flags=re.MULTILINE)
    }
    page = set(re.findall(r"Prometheus `([^`]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    own = {name for name in shown if name.startswith(("ifabric_", "rpc_"))}
    assert page == own


def test_the_page_lists_every_span() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(ifabric\.[a-z_.]+)` \|", text, flags=re.MULTILINE)) == set(names.all_spans())


def test_trace_context_goes_there_and_back(telemetry: Telemetry) -> None:
    parent = propagation.from_traceparent(PARENT)
    with telemetry.tracer.start_as_current_span("work", parent):
        pairs = propagation.metadata()
        assert propagation.traceparent().split("-")[1] == PARENT.split("-")[1]
    received = trace.get_current_span(propagation.from_metadata((*pairs, ("other-bin", b"x"))))
    assert format(received.get_span_context().trace_id, "032x") == PARENT.split("-")[1]


@pytest.mark.parametrize("broken", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_broken_trace_context_is_none(broken: str) -> None:
    for context in (propagation.from_traceparent(broken), propagation.from_metadata([("traceparent", broken)])):
        assert not trace.get_current_span(context).get_span_context().is_valid
    assert propagation.traceparent() == ""
    assert propagation.metadata() == ()
