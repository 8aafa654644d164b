# SPDX-License-Identifier: Apache-2.0
"""Alerts and dashboard: a real Prometheus evaluates each rule, firing and quiet; every figure named is exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "observability" / "prometheus" / "ifabric.rules.yaml"
DASHBOARD = ROOT / "deploy" / "observability" / "grafana" / "ifabric.json"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())

Case = tuple[dict[str, str], dict[str, str]]
"""Series that let an alert fire within an hour, and series that do not: name to values, in Prometheus' notation."""

STEADY = "0+0x120"

_FIRST, _WAIT = (
    "ifabric_broker_first_token_duration_seconds_bucket",
    "ifabric_broker_queue_wait_duration_seconds_bucket",
)
_COMMIT = "ifabric_broker_journal_commit_duration_seconds_bucket"


def jump(series: str) -> Case:
    """A counter for which any increase is one too many."""
    return {series: "0x60 1x60"}, {series: STEADY}


def level(series: str, bad: int, good: int) -> Case:
    """A gauge with a value that is bad and one that is not."""
    return {series: f"{bad}x120"}, {series: f"{good}x120"}


def slow(bucket: str, under: str, labels: str = "") -> Case:
    """A histogram of which everything, or nothing, lies above a bound."""

    def said(fast: str) -> dict[str, str]:
        lane = f",{labels}" if labels else ""
        bounds = {under: fast, "30": "0+10x120", "+Inf": "0+10x120"}
        return {f'{bucket}{{le="{bound}"{lane}}}': values for bound, values in bounds.items()}

    return said(STEADY), said("0+10x120")


def share(part: str, whole: str, bad: int) -> Case:
    """Two counters whose ratio is bad."""
    return {part: f"0+{bad}x120", whole: "0+10x120"}, {part: STEADY, whole: "0+10x120"}


_FAILED = 'ifabric_broker_requests_total{lane="bulk",outcome="failed"}'
_FINISHED = 'ifabric_broker_requests_total{lane="bulk",outcome="finished"}'
_IDLE, _BUSY = (f'ifabric_worker_engine_idle_duration_seconds_total{{engine="{engine}"}}' for engine in ("e", "f"))
_DEPTH, _OTHER = (f'ifabric_broker_queue_depth{{lane="bulk",engine="{engine}"}}' for engine in ("e", "f"))
_UP = [f'up{{job="ifabric-{service}"}}' for service in ("broker", "provisioner", "worker")]
_STALLED = 'ifabric_broker_jobs{state="stalled"}'
_ACCEPTED = 'ifabric_provisioner_nodes{state="accepted"}'

CASES: dict[str, Case] = {
    "IfabricServiceDown": level('up{job="ifabric-broker"}', 0, 1),
    "IfabricServiceAbsent": ({name: "1x120" for name in _UP[::2]}, dict.fromkeys(_UP, "0x120")),
    "IfabricNodeRefused": level('ifabric_provisioner_nodes{state="refused"}', 1, 0),
    "IfabricNoNodeAccepted": level(_ACCEPTED, 0, 1),
    "IfabricLeaseExpired": jump('ifabric_provisioner_leases_ended_total{reason="expired"}'),
    "IfabricBrokerSeesFewerNodes": (
        {"ifabric_broker_nodes": "1x120", _ACCEPTED: "2x120"},
        {"ifabric_broker_nodes": "2x120", _ACCEPTED: "2x120"},
    ),
    # One stall, half an hour long, is seen to its end: what counts stalls counted it at its beginning.
    "IfabricEngineStalled": level('ifabric_worker_engine_stalled{engine="e"}', 1, 0),
    "IfabricEngineHeldBack": level('ifabric_worker_engine_held_back{engine="e"}', 1, 0),
    # Work that waits for another engine than the idle one is none of its business.
    "IfabricEngineIdleWhileWorkWaits": (
        {_IDLE: "0+25x120", _DEPTH: "5x120"},
        {_IDLE: "0+25x120", _BUSY: STEADY, _DEPTH: "0x120", _OTHER: "5x120"},
    ),
    "IfabricPoolTooSmall": share(
        'ifabric_worker_engine_progress_only_steps_total{engine="e"}',
        'ifabric_worker_engine_steps_total{engine="e"}',
        5,
    ),
    "IfabricPayloadsMissing": jump('ifabric_worker_engine_payload_failures_total{engine="e"}'),
    "IfabricFirstTokenSlow": slow(_FIRST, "5", 'lane="interactive"'),
    "IfabricQueueWaitLong": slow(_WAIT, "2.5", 'lane="interactive",engine="e"'),
    "IfabricRequestsFail": share(_FAILED, _FINISHED, 5),
    # No status is exported before its first call, of which `increase` alone would not know.
    "IfabricInternalErrors": (
        {'rpc_server_call_duration_seconds_count{rpc_method="m",rpc_status_code="INTERNAL"}': "_x60 1x60"},
        {'rpc_server_call_duration_seconds_count{rpc_method="m",rpc_status_code="NOT_FOUND"}': "_x60 1x60"},
    ),
    "IfabricAttemptsLost": (
        {"ifabric_broker_lost_attempts_total": "0+20x120"},
        {"ifabric_broker_lost_attempts_total": "0+1x120"},
    ),
    "IfabricRequestQuarantined": jump("ifabric_broker_quarantined_total"),
    "IfabricJobsStalled": level(_STALLED, 2, 0),
    "IfabricJournalSlow": slow(_COMMIT, "1"),
    "IfabricJournalFull": jump('ifabric_broker_journal_full_total{where="rows"}'),
    "IfabricJobLeaseLost": jump("ifabric_broker_job_leases_lost_total"),
    "IfabricCertificateEnds": level("ifabric_tls_certificate_remaining_duration_seconds", 3600, 864_000),
    "IfabricCertificateRefused": jump('ifabric_tls_certificate_reloads_total{outcome="refused"}'),
    "IfabricTokensGuessed": (
        {'ifabric_rpc_server_refused_total{reason="TOKEN_INVALID"}': "0+90x120"},
        {'ifabric_rpc_server_refused_total{reason="TOKEN_EXPIRED"}': "0+90x120"},
    ),
}  # fmt: skip


_ROWS_FAILED, _ROWS_FINISHED = (f'ifabric_broker_job_rows_total{{outcome="{how}"}}' for how in ("failed", "finished"))
FURTHER: tuple[tuple[str, Case], ...] = (
    ("IfabricServiceAbsent", ({name: "1x120" for name in _UP[1:]}, dict.fromkeys(_UP, "0x120"))),
    ("IfabricServiceAbsent", ({name: "1x120" for name in _UP[:-1]}, dict.fromkeys(_UP, "1x120"))),
    # A broker looks again every now and then whether it can go on, and is scraped in the middle of it.
    ("IfabricJobsStalled", ({_STALLED: "1 1 0 1 1 0 1" + " 1 0 1" * 38}, {_STALLED: "0x60 1x3 0x60"})),
    ("IfabricEngineStalled", jump('ifabric_worker_engine_stalls_total{engine="e"}')),
    ("IfabricRequestsFail", share(_ROWS_FAILED, _ROWS_FINISHED, 5)),
)
"""Other ways to the same alert."""


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    assert shutil.which("promtool"), "promtool is missing: run scripts/bootstrap tests"
    return subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False)


def first_events() -> dict[str, str]:
    """Each alert for which one event is too many, and the series that has to be there before it."""
    alerts = re.split(r"(?m)^      - alert: ", RULES.read_text())[1:]
    found = {}
    for alert in alerts:
        series = re.search(r"increase\(([^\[]+)\[\w+\]\)+ > 0", alert)
        if series is not None and "offset" not in alert:
            found[alert.split()[0]] = series[1]
    return found


def test_every_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(ALERTS)
    assert len(ALERTS) == len(set(ALERTS))


def test_the_rules_are_well_formed() -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_is_quiet_otherwise(tmp_path: Path) -> None:
    tests: list[dict[str, Any]] = []
    for alert, cases in (*CASES.items(), *FURTHER):
        for series, expected in zip(cases, (1, 0), strict=True):
            firing = f'max_over_time(sum(ALERTS{{alertname="{alert}",alertstate="firing"}})[60m:30s])'
            tests.append(
                {
                    "name": f"{alert} {'fires' if expected else 'is quiet'}",
                    "interval": "30s",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": f"{firing} >= bool 1 or vector(0)",
                            "eval_time": "60m",
                            "exp_samples": [{"labels": "{}", "value": expected}],
                        }
                    ],
                }
            )
    # JSON is YAML: nothing more is needed to write it.
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def test_a_tier_sees_what_waits_for_the_engines_that_its_workers_serve(tmp_path: Path) -> None:
    """Two brokers, two engines; one tier serves one of them, another serves both, one pod of it no longer."""
    depth, active = "ifabric_broker_queue_depth", "ifabric_worker_engine_active"
    series = {
        f'{depth}{{instance="b1",lane="bulk",engine="e"}}': "5x120",
        f'{depth}{{instance="b1",lane="interactive",engine="e"}}': "1x120",
        f'{depth}{{instance="b2",lane="bulk",engine="e"}}': "10x120",
        f'{depth}{{instance="b2",lane="bulk",engine="f"}}': "100x120",
        f'{depth}{{instance="b2",lane="bulk",engine="of-no-tier"}}': "1000x120",
        f'{active}{{instance="w1",tier="one",engine="e"}}': "0x120",
        f'{active}{{instance="w2",tier="one",engine="e"}}': "3x120",
        f'{active}{{instance="w3",tier="two",engine="e"}}': "1x120",
        f'{active}{{instance="w4",tier="two",engine="f"}}': "1x110 _x10",
        f'{active}{{instance="w5",tier="three",engine="f"}}': "1x60 _x60",
        f'{active}{{instance="w6",engine="of-no-tier"}}': "1x120",
    }
    wanted = [("one", 16), ("two", 116)]
    case = {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": "ifabric:queue_depth:tier",
                "eval_time": "60m",
                "exp_samples": [
                    {"labels": f'ifabric:queue_depth:tier{{tier="{tier}"}}', "value": value} for tier, value in wanted
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [case]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def test_a_case_that_is_wrong_is_found(tmp_path: Path) -> None:
    """Promtool is asked the opposite of what holds, so that the test above is known to look."""
    firing, _ = CASES["IfabricNodeRefused"]
    wrong = {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in firing.items()],
        "promql_expr_test": [
            {
                "expr": 'count(ALERTS{alertname="IfabricNodeRefused",alertstate="firing"}) or vector(0)',
                "eval_time": "60m",
                "exp_samples": [{"labels": "{}", "value": 0}],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [wrong]}))
    assert promtool("test", "rules", str(file)).returncode != 0


@pytest.mark.parametrize("alert", ALERTS)
def test_the_runbook_says_what_to_do(alert: str) -> None:
    section = re.search(rf"^### {alert}\n\n(.+?)(?=^###? |\Z)", RUNBOOK, flags=re.MULTILINE | re.DOTALL)
    assert section, f"docs/runbook.md has no section {alert}"
    assert "*Means:*" in section[1]
    assert "*Do:*" in section[1]
    assert f"docs/runbook.md#{alert.lower()}" in RULES.read_text()


def figures(text: str) -> set[str]:
    """Names of ours in an expression, as Prometheus shows them, without what a histogram adds."""
    found = re.findall(r"\b(?:ifabric|rpc_server)_[a-z0-9_]+", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in found}


def shown() -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"Prometheus `([^`]+)`", METRICS_PAGE)}


def expressions() -> list[str]:
    document = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]


def test_rules_and_dashboard_name_only_figures_that_exist() -> None:
    assert figures(RULES.read_text()) - shown() - {"ifabric_broker"} == set()
    assert figures("\n".join(expressions())) - shown() == set()


def test_the_dashboard_adds_up_nothing_of_which_every_broker_tells_the_whole() -> None:
    whole = re.findall(r"Prometheus `([^`]+)`\n\n[^*]*do not add them up", METRICS_PAGE)
    assert whole == ["ifabric_broker_job_rows_waiting"]
    assert [expression for expression in expressions() for name in whole if f"sum({name})" in expression] == []


def test_the_dashboard_is_whole_and_its_expressions_parse(tmp_path: Path) -> None:
    document = json.loads(DASHBOARD.read_text())
    assert document["uid"] == "ifabric"
    titles = [panel["title"] for panel in document["panels"]]
    assert len(titles) == len(set(titles)) >= 12
    assert len({panel["id"] for panel in document["panels"]}) == len(titles)
    rules = [
        {"record": f"check:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions())
    ]
    file = tmp_path / "dashboard.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
