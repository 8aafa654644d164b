# SPDX-License-Identifier: Apache-2.0
"""Where the real scheduler puts the workers of each overlay, on nodes that are declared. `make test-k8s`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.k8s.cluster import POLL_S, render
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

PRODUCT = "nvidia.com/gpu.product"
POOLS = {
    "h200": {"h200-a": (4, "NVIDIA-H200"), "h200-b": (2, "NVIDIA-H200"), "other": (8, "NVIDIA-A10")},
    "consumer-cards": {
        "blackwell": (4, "NVIDIA-GeForce-RTX-5090"), "ada": (2, "NVIDIA-GeForce-RTX-4090"), "other": (8, "NVIDIA-A10")
    },
    "one-node": {"processors": (0, ""), "other": (8, "NVIDIA-A10")},
}  # fmt: skip
"""Nodes of each overlay's test: name to cards and product. `other` is for nobody."""


@contextlib.contextmanager
def placed(cluster: Cluster, overlay: str) -> Iterator[str]:
    """Declares an overlay's nodes and applies its workers in a namespace of their own; both go afterwards."""
    namespace = f"pool-{overlay}"
    nodes = POOLS[overlay]
    try:
        for name, (cards, product) in nodes.items():
            cluster.declare_node(name, cards, **({PRODUCT: product} if product else {}))
        objects = [each for each in render(overlay) if each["kind"] in {"Namespace", "ServiceAccount", "Deployment"}]
        wanted = [each for each in objects if each["kind"] != "Deployment" or "worker-" in each["metadata"]["name"]]
        for each in wanted:
            if each["kind"] == "Namespace":
                each["metadata"]["name"] = namespace
            else:
                each["metadata"]["namespace"] = namespace
        cluster.apply(wanted)
        yield namespace
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false", check=False)
        cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--grace-period", "0", "--force", check=False)
        cluster.kubectl("delete", "nodes", *nodes, check=False)


def workers(cluster: Cluster, namespace: str, tier: str = "") -> list[dict[str, Any]]:
    selector = "app.kubernetes.io/name=worker" + (f",ifabric/tier={tier}" if tier else "")
    return cluster.pods(selector, namespace=namespace)


def deployments(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    return list(cluster.get("deployments", namespace=namespace)["items"])


@pytest.mark.parametrize("overlay", sorted(POOLS))
def test_every_worker_lands_on_its_pool(cluster: Cluster, overlay: str) -> None:
    with placed(cluster, overlay) as namespace:
        count = sum(each["spec"]["replicas"] for each in deployments(cluster, namespace))

        def bound() -> list[dict[str, Any]]:
            pods = workers(cluster, namespace)
            return pods if len(pods) == count and all(pod["spec"].get("nodeName") for pod in pods) else []

        for pod in block_until(bound, every_s=POLL_S, within_s=60, what=f"{count} workers on nodes"):
            _, product = POOLS[overlay][pod["spec"]["nodeName"]]
            assert pod["spec"].get("nodeSelector", {}).get(PRODUCT, "") == product


@pytest.mark.parametrize("overlay", sorted(set(POOLS) - {"one-node"}))
def test_what_the_pool_has_no_cards_for_stays_pending_and_says_so(cluster: Cluster, overlay: str) -> None:
    with placed(cluster, overlay) as namespace:
        crowded = deployments(cluster, namespace)[0]
        name, tier = crowded["metadata"]["name"], crowded["metadata"]["labels"]["ifabric/tier"]
        cluster.kubectl("scale", "-n", namespace, f"deployment/{name}", "--replicas", "20")

        def over() -> list[dict[str, Any]]:
            pods = workers(cluster, namespace, tier)
            return [pod for pod in pods if not pod["spec"].get("nodeName")] if len(pods) == 20 else []

        def events() -> list[str]:
            found = cluster.get("events", "--field-selector", "reason=FailedScheduling", namespace=namespace)["items"]
            names = {pod["metadata"]["name"] for pod in over()}
            return [event["message"] for event in found if event["involvedObject"]["name"] in names]

        said = block_until(events, every_s=POLL_S, within_s=60, what="an event about pods without a node")
        assert any("Insufficient nvidia.com/gpu" in message for message in said), said
        assert {pod["status"]["phase"] for pod in over()} == {"Pending"}
        used: dict[str, int] = {}
        for pod in workers(cluster, namespace):
            cards = int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            if node := pod["spec"].get("nodeName"):
                used[node] = used.get(node, 0) + cards
        assert all(cards <= POOLS[overlay][node][0] for node, cards in used.items()), "a card went to two workers"
