# SPDX-License-Identifier: Apache-2.0
"""The suite in pods of a real Kubernetes: what it brings, and what it survives. `make test-k8s`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.k8s.cluster import NAMESPACE, POLL_S, is_ready
from tests.k8s.suite import BUDGET, in_client, simulated_rows, start_job
from tests.support.processes import ROOT
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from tests.k8s.cluster import Cluster
    from tests.k8s.suite import Job

pytestmark = pytest.mark.k8s

JOB_WITHIN_S = 400.0
ROWS = 600
BROKERS, SIMULATED = "app.kubernetes.io/name=broker", "ifabric/tier=simulated"


def simulated_job(cluster: Cluster, name: str) -> tuple[Job, dict[str, list[int]]]:
    """Starts a job that takes the two simulated workers a while, and waits until some of it is done."""
    rows, wanted = simulated_rows(name, ROWS)
    job = start_job(cluster, name, rows, "--engine-id", "simulated-test")
    status: dict[str, Any] = {}

    def begun() -> bool:
        assert job.process.poll() is None, job.process.communicate()
        answer = in_client(cluster, "ifab", "bulk", "status", name, "--json", check=False)
        status.update(json.loads(answer) if answer else {})
        return int(status.get("finished", 0)) > 0

    block_until(begun, every_s=POLL_S, within_s=60.0, what=f"the first results of {name}")
    assert int(status["finished"]) < ROWS, "the job was over before anything was done to it"
    return job, wanted


def assert_every_row_came(job: Job, wanted: dict[str, list[int]]) -> None:
    report = job.report(within_s=JOB_WITHIN_S)
    assert (report["requests"], report["failed"]) == (len(wanted), 0)
    assert {name: row["token_ids"] for name, row in job.results().items()} == wanted


def test_a_bulk_job_through_the_service_brings_every_row_of_a_real_model(cluster: Cluster) -> None:
    rows = (ROOT / "examples" / "prompts.jsonl").read_text()
    ids = {json.loads(row)["id"] for row in rows.splitlines()}
    job = start_job(cluster, "bundled", rows, "--engine-id", "smollm2-135m-instruct-q8_0-cpu", "--fresh")
    report = job.report(within_s=JOB_WITHIN_S)
    assert (report["requests"], report["failed"]) == (len(ids), 0)
    assert set(job.results()) == ids
    assert report["prompt_tokens_computed"] < report["prompt_tokens_logical"] / 4, "heads were not shared"


def test_a_worker_pod_that_is_killed_in_the_middle_loses_nothing(cluster: Cluster) -> None:
    job, wanted = simulated_job(cluster, "killed")
    victim = cluster.pods(SIMULATED)[0]["metadata"]["name"]
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, victim, "--grace-period", "0", "--force")
    assert_every_row_came(job, wanted)
    survivors = cluster.ready(SIMULATED, 2)
    assert victim not in {pod["metadata"]["name"] for pod in survivors}


def test_a_rolling_update_of_broker_and_provisioner_drops_no_row(cluster: Cluster) -> None:
    before = {pod["metadata"]["name"] for pod in cluster.pods(BROKERS)}
    job, wanted = simulated_job(cluster, "rolled")
    cluster.kubectl("rollout", "restart", "-n", NAMESPACE, "deployment/broker", "deployment/provisioner")
    for name in ("broker", "provisioner"):
        cluster.kubectl("rollout", "status", "-n", NAMESPACE, f"deployment/{name}", "--timeout", "240s", within_s=250)
    assert_every_row_came(job, wanted)
    after = {pod["metadata"]["name"] for pod in cluster.ready(BROKERS, 2)}
    assert before & after == set()


def test_an_engine_without_its_token_budget_stays_out_and_says_why(cluster: Cluster) -> None:
    def registered() -> dict[str, Any]:
        listed = toolbox(cluster, "ifab", "nodes", "--json")
        nodes = {node["node_id"]: node for node in map(json.loads, listed.splitlines())}
        return dict(next((node for name, node in nodes.items() if "unbudgeted" in name), {}))

    node = block_until(registered, every_s=POLL_S, within_s=60.0, what="the node in ListNodes")
    assert BUDGET in json.dumps(node)
    [pod] = cluster.pods("ifabric/tier=unbudgeted")
    assert not is_ready(pod)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0, "it waits; it is not started again and again"
    refused = [line for line in cluster.logs(pod["metadata"]["name"]) if BUDGET in json.dumps(line)]
    assert refused, "its log does not name the field"


def toolbox(cluster: Cluster, *words: str) -> str:
    """Runs a command in the pod that has an operator's certificate."""
    return cluster.kubectl("exec", "-n", NAMESPACE, "deployment/toolbox", "--", *words)
