# SPDX-License-Identifier: Apache-2.0
"""Network policies, enforced: who in the cluster can open a connection to whom, tried from pods. `make test-k8s`.

What ought to be closed is closed by a policy and not for want of a listener: each port is open to somebody below.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.k8s.cluster import NAMESPACE
from tests.k8s.suite import CLIENTS, waiting_pod

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

STRANGERS, SCRAPERS = "strangers", "scrapers"
"""Namespaces without a label that policies know, and with that of metrics."""
PORTS = {
    "broker": ("app.kubernetes.io/name=broker", 7600),
    "broker's metrics": ("app.kubernetes.io/name=broker", 9600),
    "provisioner": ("app.kubernetes.io/name=provisioner", 7601),
    "provisioner's metrics": ("app.kubernetes.io/name=provisioner", 9600),
    "worker": ("ifabric/tier=simulated", 7602),
    "worker's metrics": ("ifabric/tier=simulated", 9600),
    "database": ("app.kubernetes.io/name=postgresql", 5432),
}
APISERVER = "apiserver"
OPEN = {
    "client": {"broker", APISERVER},
    "stranger": {APISERVER},
    "scraper": {"broker's metrics", "provisioner's metrics", "worker's metrics", APISERVER},
    "intruder": set(),
    "toolbox": {"broker", "provisioner"},
    "broker": {"provisioner", "worker", "database"},
    "provisioner": {"worker"},
    "worker": {"provisioner"},
    "database": set(),
}
"""Who may reach what. `intruder` is a pod in the suite's own namespace that is none of the suite's; nothing keeps the
pods of other namespaces from the apiserver."""
PROBE = """
import asyncio, json, sys
async def is_open(address, port):
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 4)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
async def main():
    targets = json.loads(sys.argv[1])
    found = await asyncio.gather(*(is_open(*target) for target in targets.values()))
    print(json.dumps([name for name, open in zip(targets, found) if open]))
asyncio.run(main())
"""
BASH_PROBE = """
for each in "$@"; do
  timeout 4 bash -c "exec 3<>/dev/tcp/${each##*=}" 2>/dev/null && echo "${each%=*}" &
done
wait
"""
"""The same for a container without Python."""


@pytest.fixture(scope="module")
def others(cluster: Cluster) -> Iterator[None]:
    """Pods that the overlay does not bring, in namespaces of their own and in the suite's."""
    namespaces = {STRANGERS: {}, SCRAPERS: {"ifabric/metrics": "yes"}}
    pods = {"stranger": STRANGERS, "scraper": SCRAPERS, "intruder": NAMESPACE}
    try:
        cluster.apply(
            [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
             for name, labels in namespaces.items()]
        )  # fmt: skip
        cluster.apply_pods([waiting_pod(name, namespace) for name, namespace in pods.items()])
        for name, namespace in pods.items():
            cluster.kubectl(
                "wait", "-n", namespace, f"pod/{name}", "--for", "condition=Ready", "--timeout", "60s", within_s=90
            )
        yield
    finally:
        cluster.kubectl("delete", "pod", "-n", NAMESPACE, "intruder", "--ignore-not-found", "--wait=false")
        cluster.kubectl("delete", "namespace", *namespaces, "--ignore-not-found", "--wait=false")


def targets(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Name of a port to its address."""
    found = {}
    for name, (selector, port) in PORTS.items():
        pod = next(pod for pod in cluster.pods(selector) if pod["status"].get("podIP"))
        found[name] = (str(pod["status"]["podIP"]), port)
    [subset] = cluster.get("endpoints", "kubernetes", namespace="default")["subsets"]
    found[APISERVER] = (str(subset["addresses"][0]["ip"]), int(subset["ports"][0]["port"]))
    return found


def where(cluster: Cluster, who: str) -> tuple[str, str]:
    """Namespace and name of the pod that tries."""
    fixed = {
        "client": (CLIENTS, "client"), "stranger": (STRANGERS, "stranger"), "scraper": (SCRAPERS, "scraper"),
        "intruder": (NAMESPACE, "intruder"),
    }  # fmt: skip
    if who in fixed:
        return fixed[who]
    # A worker that is not the target: it would reach itself whatever policies say.
    selector = {"worker": "ifabric/tier=cpu-generate", "database": "app.kubernetes.io/name=postgresql"}
    pods = cluster.ready(selector.get(who, f"app.kubernetes.io/name={who}"), 2 if who == "broker" else 1)
    return NAMESPACE, str(pods[-1]["metadata"]["name"])


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("who", OPEN)
def test_a_pod_reaches_what_it_may_and_nothing_else(cluster: Cluster, who: str) -> None:
    namespace, pod = where(cluster, who)
    known = targets(cluster)
    own = cluster.get("pod", pod, namespace=namespace)["status"]["podIP"]
    tried = {name: address for name, address in known.items() if address[0] != own}
    start = ("exec", "-n", namespace, pod, "--")
    if who == "database":
        words = [f"{name}={address}/{port}" for name, (address, port) in tried.items()]
        found = set(cluster.kubectl(*start, "bash", "-c", BASH_PROBE, "bash", *words).splitlines())
    else:
        found = set(json.loads(cluster.kubectl(*start, "python", "-c", PROBE, json.dumps(tried))))
    assert found == OPEN[who]


def test_every_port_is_open_to_somebody() -> None:
    assert set().union(*OPEN.values()) == {*PORTS, APISERVER}


def test_names_are_found_and_services_lead_past_no_policy(cluster: Cluster) -> None:
    """A Service's address is another way to the same pods: policies hold for it too, and names can be asked for."""
    try_service = (
        "import socket, sys\n"
        "address = socket.gethostbyname(sys.argv[1])\n"
        "try:\n    socket.create_connection((address, 7600), timeout=4)\n    print('open')\n"
        "except TimeoutError:\n    print('closed')\n"
    )
    name = f"broker.{NAMESPACE}.svc.cluster.local"
    for who, said in (("client", "open"), ("worker", "closed")):
        namespace, pod = where(cluster, who)
        answer = cluster.kubectl("exec", "-n", namespace, pod, "--", "python", "-c", try_service, name)
        assert answer.strip() == said, who
