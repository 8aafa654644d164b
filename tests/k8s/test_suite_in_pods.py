# SPDX-License-Identifier: Apache-2.0
"""The suite in pods of a real Kubernetes: what it brings, and what it survives. `make test-k8s`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.k8s.cluster import NAMESPACE, POLL_S, is_ready
from tests.k8s.suite import BUDGET, JOB_WITHIN_S, ROWS, assert_every_row_came, simulated_job, start_job, toolbox
from tests.support.processes import ROOT
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

BROKERS, SIMULATED = "app.kubernetes.io/name=broker", "ifabric/tier=simulated"


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
    job, wanted = simulated_job(cluster, "rolled", 4 * ROWS)
    cluster.kubectl("rollout", "restart", "-n", NAMESPACE, "deployment/broker", "deployment/provisioner")
    for name in ("broker", "provisioner"):
        cluster.kubectl("rollout", "status", "-n", NAMESPACE, f"deployment/{name}", "--timeout", "240s", within_s=250)
    assert job.process.poll() is None, f"the job was over before the update was: {job.process.communicate()}"
    assert_every_row_came(job, wanted)
    after = {pod["metadata"]["name"] for pod in cluster.ready(BROKERS, 2)}
    assert before & after == set()


def test_an_engine_without_its_token_budget_stays_out_and_says_why(cluster: Cluster) -> None:
    def registered() -> dict[str, Any]:
        listed = json.loads(toolbox(cluster, "ifab", "nodes", "--json")).get("nodes", ())
        return next((dict(node) for node in listed if "unbudgeted" in node["description"]["node_id"]), {})

    node = block_until(registered, every_s=POLL_S, within_s=60.0, what="the node in ListNodes")
    assert node["state"] == "NODE_STATE_REFUSED"
    assert BUDGET in {violation["path"] for violation in node["violations"]}
    [pod] = cluster.pods("ifabric/tier=unbudgeted")
    assert not is_ready(pod)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0, "it waits; it is not started again and again"
    refused = [line for line in cluster.logs(pod["metadata"]["name"]) if BUDGET in json.dumps(line)]
    assert refused, "its log does not name the field"
