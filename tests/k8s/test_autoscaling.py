# SPDX-License-Identifier: Apache-2.0
"""Work that waits brings a worker, and its end takes one away: with a real Prometheus and adapter. `make test-k8s`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.k8s.cluster import NAMESPACE, render
from tests.k8s.metering import metered, wait_for_figure, waiting
from tests.k8s.suite import assert_every_row_came, simulated_job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

TIER = "simulated"
SIMULATED = f"ifabric/tier={TIER}"
ROWS = 2_000


def autoscaler() -> dict[str, Any]:
    """The HPA that an overlay has for a tier, for a tier of the test cluster, and brisk."""
    hpa = next(each for each in render("consumer-cards") if each["kind"] == "HorizontalPodAutoscaler")
    hpa["metadata"]["name"] = hpa["spec"]["scaleTargetRef"]["name"] = f"worker-{TIER}"
    [figure] = hpa["spec"]["metrics"]
    figure["external"]["metric"]["selector"]["matchLabels"]["tier"] = TIER
    figure["external"]["target"]["averageValue"] = "16"
    hpa["spec"] |= {"minReplicas": 1, "maxReplicas": 2}
    hpa["spec"]["behavior"]["scaleDown"] = {
        "stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 15}]
    }  # fmt: skip
    return dict(hpa)


def test_work_that_waits_brings_a_worker_and_its_end_takes_one_away(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ready(SIMULATED, 2)
    hpa = autoscaler()
    try:
        with metered(cluster, tmp_path):
            assert wait_for_figure(cluster, TIER) == 0, "nothing waits yet"
            assert waiting(cluster, "no-tier") is None
            cluster.apply([hpa])
            cluster.ready(SIMULATED, 1)
            job, wanted = simulated_job(cluster, "queued", ROWS)
            cluster.ready(SIMULATED, 2)
            assert job.process.poll() is None, f"the work was over before the worker came: {job.process.communicate()}"
            assert wait_for_figure(cluster, "cpu-generate") == 0, (
                "what waits for one engine is no other tier's business"
            )
            assert_every_row_came(job, wanted)
            cluster.ready(SIMULATED, 1)
            events = cluster.get("events", "--field-selector", f"involvedObject.name={hpa['metadata']['name']}")
            said = [event["message"] for event in events["items"] if event["reason"] == "SuccessfulRescale"]
            assert any("New size: 2; reason: external metric ifabric_tier_queue_depth" in each for each in said), said
    finally:
        cluster.kubectl("delete", "hpa", "-n", NAMESPACE, hpa["metadata"]["name"], "--ignore-not-found")
        cluster.kubectl("scale", "-n", NAMESPACE, f"deployment/worker-{TIER}", "--replicas", "2")
        cluster.ready(SIMULATED, 2)
