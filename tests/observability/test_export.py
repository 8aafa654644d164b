# SPDX-License-Identifier: Apache-2.0
"""The page about metrics against what a live suite exports, and a real Prometheus that scrapes it under our rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc, job_service_pb2
from services.common.telemetry import names
from services.common.telemetry.names import Kind
from tests.jobs.client import JobClient
from tests.jobs.running import Fabric
from tests.observability.test_rules import RULES, first_events, shown
from tests.support.ports import held_port
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

ROWS = 20
ONLY_AT_TIMES = {
    "ifabric_broker_request_failures": "a request was refused or failed",
    "ifabric_rpc_server_refused": "somebody was refused",
    "ifabric_tls_certificate_remaining_duration_seconds": "there is TLS",
    "ifabric_tls_certificate_reloads": "there is TLS",
    "ifabric_provisioner_violations": "a node was refused",
}
"""Metrics that a suite need not export before something has happened, and what."""


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    with Fabric(tmp_path_factory.mktemp("export")) as made:
        made.start()
        with JobClient(made.brokers[0].address) as job:
            job.create()
            job.upload([job_service_pb2.JobRow(row_id=f"r{number}", request=prompt(number)) for number in range(ROWS)])
            job.seal(ROWS)
            block_until(lambda: job.get().finished_rows == ROWS, what="the job has run")
        with grpc.insecure_channel(made.brokers[0].address) as channel:
            stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
            list(
                stub.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=prompt(ROWS)), timeout=PATIENCE_S)
            )
        yield made


def prompt(number: int) -> broker_service_pb2.GenerationRequest:
    made = broker_service_pb2.GenerationRequest(max_tokens=2)
    made.prompt.tokens.ids.extend([1, 2, 3, number])
    return made


def scraped(fabric: Fabric) -> Iterator[str]:
    """What each of the three services exports."""
    for service in (fabric.provisioner, fabric.workers[0], fabric.brokers[0]):
        assert service.process is not None
        with urllib.request.urlopen(f"http://{service.process.metrics}/metrics", timeout=PATIENCE_S) as answer:
            yield answer.read().decode()


def exported(fabric: Fabric) -> dict[str, tuple[str, set[str]]]:
    """Name to Prometheus' type and the labels seen, over all three services; without what a histogram adds."""
    found: dict[str, tuple[str, set[str]]] = {}
    for text in scraped(fabric):
        kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE))
        for series, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, flags=re.MULTILINE):
            name = re.sub(r"_(bucket|count|sum|total)$", "", series)
            kind = kinds.get(series) or kinds.get(name) or ""
            keys = set(re.findall(r'(\w+)="', labels)) - {"le"}
            before = found.get(name, (kind, set()))
            found[name] = (kind, before[1] | keys)
    return {name: what for name, what in found.items() if name.startswith(("ifabric_", "rpc_"))}


def test_what_a_live_suite_exports_is_what_the_page_explains(fabric: Fabric) -> None:
    page = {re.sub(r"_total$", "", name) for name in shown()}
    assert set(exported(fabric)) - page == set()

    def missing() -> set[str]:
        return page - set(exported(fabric)) - set(ONLY_AT_TIMES)

    block_until(lambda: not missing(), what="each has been told of once", every_s=0.2)


def test_the_first_event_is_seen_by_alerts_for_which_one_is_too_many(fabric: Fabric) -> None:
    """Prometheus counts from a series' first value on: one that begins with its first event hides it."""
    live = "\n".join(scraped(fabric))
    wanted = {alert: series for alert, series in first_events().items() if "_tls_" not in series}
    assert {"IfabricEngineStalled", "IfabricLeaseExpired"} <= set(wanted)
    missing = []
    for alert, series in wanted.items():
        name, _, labels = series.partition("{")
        if not re.search(rf"^{name}(\{{.*{re.escape(labels.rstrip('}'))}.*\}})? ", live, flags=re.MULTILINE):
            missing.append(alert)
    assert missing == []


def test_refusals_of_live_requests_of_rows_and_of_jobs_are_counted_by_reason(fabric: Fabric) -> None:
    broker = fabric.brokers[0]
    wrong = broker_service_pb2.GenerationRequest(request_id="wrong", max_tokens=10**6)
    wrong.prompt.text = "hello"
    opening = broker_service_pb2.ExchangeRequest(open=broker_service_pb2.ExchangeOpen(), requests=[wrong])
    with grpc.insecure_channel(broker.address) as channel:
        stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Generate(broker_service_pb2.GenerateRequest(request=wrong), timeout=PATIENCE_S)
        list(stub.Exchange(iter([opening]), timeout=PATIENCE_S))
    with JobClient(broker.address, job_id="wrong") as job:
        job.create()
        wrong.ClearField("request_id")
        job.upload([job_service_pb2.JobRow(row_id="r", request=wrong)])
        job.seal(1)
        block_until(lambda: job.get().failed_rows == 1, what="the job has run")
    name = 'ifabric_broker_request_failures_total{lane="%s",reason="INVALID_FIELDS"} %s'
    assert broker.process is not None
    with urllib.request.urlopen(f"http://{broker.process.metrics}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert name % ("interactive", "1.0") in text
    assert name % ("bulk", "2.0") in text


def test_live_labels_and_kinds_are_those_of_the_names(fabric: Fabric) -> None:
    by_name = {metric.name.replace(".", "_"): metric for metric in names.all_metrics()}
    kinds = {Kind.COUNTER: "counter", Kind.UP_DOWN: "gauge", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
    checked = 0
    for name, (kind, labels) in exported(fabric).items():
        metric = by_name.get(name) or by_name.get(re.sub(r"_(seconds|bytes)$", "", name))
        assert metric is not None, name
        assert kind == kinds[metric.kind], name
        assert labels <= {label.replace(".", "_") for label in metric.labels}, name
        checked += 1
    assert checked > 25


@pytest.fixture
def listen() -> Iterator[str]:
    """Where Prometheus is to listen."""
    with held_port() as address:
        yield address


def test_a_real_prometheus_scrapes_the_suite_and_finds_nothing_wrong(
    fabric: Fabric, listen: str, tmp_path: Path
) -> None:
    assert shutil.which("prometheus"), "prometheus is missing: run scripts/bootstrap tests"
    services = {"provisioner": fabric.provisioner, "worker": fabric.workers[0], "broker": fabric.brokers[0]}
    jobs = [
        {"job_name": f"ifabric-{name}", "static_configs": [{"targets": [service.process.metrics]}]}
        for name, service in services.items()
        if service.process is not None
    ]
    config, rules_file = tmp_path / "prometheus.yml", tmp_path / "rules.yaml"
    rules_file.write_text(RULES.read_text().replace("interval: 30s", "interval: 1s"))
    quick = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config.write_text(json.dumps({"global": quick, "rule_files": [str(rules_file)], "scrape_configs": jobs}))

    def ask(path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{listen}{path}", timeout=PATIENCE_S) as answer:
                return json.loads(answer.read())["data"]
        except OSError:
            return None

    def all_up() -> bool:
        targets = ask("/api/v1/targets")
        return targets is not None and [each["health"] for each in targets["activeTargets"]] == ["up"] * 3

    def all_judged() -> list[dict[str, Any]]:
        groups = ask("/api/v1/rules")
        rules = [rule for group in (groups or {"groups": []})["groups"] for rule in group["rules"]]
        return rules if rules and all(rule["health"] == "ok" for rule in rules) else []

    process = subprocess.Popen(
        [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={listen}", "--log.level=warn",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        block_until(all_up, what="all three are scraped")
        rules = block_until(all_judged, what="every rule is evaluated")
        firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
        assert firing == []
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
