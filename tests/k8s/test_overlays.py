# SPDX-License-Identifier: Apache-2.0
"""What the overlays make: valid objects, restricted pods, settings that exist, names that fit together. Offline."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from services.broker.settings import BrokerSettings
from services.common.settings import load
from services.provisioner.settings import ProvisionerSettings
from services.worker.settings import WorkerSettings
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.common.settings import ServiceSettings

OVERLAYS = sorted(path.parent.name for path in (ROOT / "deploy" / "k8s" / "overlays").glob("*/kustomization.yaml"))
KUSTOMIZE = ROOT / ".tools" / "bin" / "kustomize"
VERSION = "1.34"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "broker": BrokerSettings,
    "provisioner": ProvisionerSettings,
    "worker": WorkerSettings,
}
FROM_ELSEWHERE = {
    "IFAB_WORKER_ADVERTISE": "10.0.0.1:7602",
    "IFAB_WORKER_NODE_ID": "worker-7c9d-x2",
    "IFAB_BROKER_JOURNAL": "postgresql://db/jobs",
}
"""Examples of what the cluster fills in."""


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What an overlay makes."""
    if not KUSTOMIZE.exists():
        pytest.fail("kustomize is not there: run scripts/kustomize first")
    folder = ROOT / "deploy" / "k8s" / "overlays" / request.param
    done = subprocess.run([KUSTOMIZE, "build", folder], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of(objects: list[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    yield from (each for each in objects if each["kind"] == kind)


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod specifications by the name of what runs in them."""
    return {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]: each["spec"]["template"]["spec"]
        for each in of(objects, "Deployment")
    }


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {
        each["name"]: FROM_ELSEWHERE[each["name"]] if each["name"] in FROM_ELSEWHERE else str(each["value"])
        for each in pod["containers"][0]["env"]
        if each["name"].startswith("IFAB_")
    }


def test_objects_are_valid_and_in_the_namespace(objects: list[dict[str, Any]]) -> None:
    for each in objects:
        kubernetes_validate.validate(each, VERSION, strict=True)
    assert {each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"} == {"ifabric"}
    assert set(pods(objects)) == set(SETTINGS)


def test_pods_are_restricted(objects: list[dict[str, Any]]) -> None:
    [namespace] = of(objects, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    allowed = {"secret", "emptyDir", "persistentVolumeClaim", "image", "configMap"}
    for pod in pods(objects).values():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
        [container] = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_settings_are_ones_that_the_services_know(objects: list[dict[str, Any]]) -> None:
    for name, pod in pods(objects).items():
        settings = load(SETTINGS[name], [], environment(pod))
        assert settings.tls_cert is not None
        assert set(settings.allow_cleartext) == {"metrics", "health"}
        ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
        doors = {"grpc": settings.listen, "metrics": settings.metrics_listen, "health": str(settings.health_listen)}
        assert {door: int(listen.rpartition(":")[2]) for door, listen in doors.items()} == ports


def test_probes_ask_the_port_of_health_alone_and_outlast_the_load(objects: list[dict[str, Any]]) -> None:
    for name, pod in pods(objects).items():
        [container] = pod["containers"]
        assert container["readinessProbe"]["grpc"] == {"port": 9601}
        assert container["livenessProbe"]["grpc"] == {"port": 9601, "service": "liveness"}
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= (1800 if name == "worker" else 300)


def test_pods_are_given_the_time_that_draining_takes(objects: list[dict[str, Any]]) -> None:
    for name, pod in pods(objects).items():
        settings = load(SETTINGS[name], [], environment(pod))
        # Calls and close hooks have the grace each; hooks are quick unless something is broken.
        assert pod["terminationGracePeriodSeconds"] >= settings.drain_propagation_s + settings.drain_grace_s + 30


def test_names_lead_somewhere(objects: list[dict[str, Any]]) -> None:
    labels = {name: {"app.kubernetes.io/name": name} for name in pods(objects)}
    services = {each["metadata"]["name"]: each["spec"] for each in of(objects, "Service")}
    for name, service in services.items():
        assert service["selector"].items() >= labels[name].items()
        named = {port["name"] for port in pods(objects)[name]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["ports"]} <= named
    for pod in pods(objects).values():
        peer = environment(pod).get("IFAB_BROKER_PROVISIONER") or environment(pod).get("IFAB_WORKER_PROVISIONER")
        if peer:
            host, _, port = peer.partition(":")
            assert int(port) in {each["port"] for each in services[host]["ports"]}
    accounts = {each["metadata"]["name"] for each in of(objects, "ServiceAccount")}
    assert {pod["serviceAccountName"] for pod in pods(objects).values()} <= accounts
    for budget in of(objects, "PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] in labels


def test_nobody_speaks_but_as_named(objects: list[dict[str, Any]]) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of(objects, "NetworkPolicy")}
    closed = policies["nobody"]
    assert closed["podSelector"] == {}
    assert (set(closed["policyTypes"]), closed.get("ingress"), closed.get("egress")) == (
        {"Ingress", "Egress"},
        None,
        None,
    )
    ports = {
        name: {port["port"] for rule in policies[name]["ingress"] for port in rule["ports"]} for name in pods(objects)
    }
    assert ports == {"broker": {7600}, "provisioner": {7601}, "worker": {7602}}


def test_cards_go_with_their_pool(objects: list[dict[str, Any]]) -> None:
    worker = pods(objects)["worker"]
    [container] = worker["containers"]
    cards = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
    pool = "nvidia.com/gpu.product" in worker.get("nodeSelector", {})
    assert (pool, "cuda" in container["image"]) == (bool(cards), bool(cards))
    assert not cards or {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in worker["tolerations"]


def test_a_journal_in_a_file_has_one_broker_at_a_time(objects: list[dict[str, Any]]) -> None:
    [broker] = [each for each in of(objects, "Deployment") if each["metadata"]["name"] == "broker"]
    [journal] = [
        each
        for each in broker["spec"]["template"]["spec"]["containers"][0]["env"]
        if each["name"] == "IFAB_BROKER_JOURNAL"
    ]
    if "value" in journal:
        assert (broker["spec"]["replicas"], broker["spec"]["strategy"]) == (1, {"type": "Recreate"})
    else:
        assert journal["valueFrom"]["secretKeyRef"]["key"] == "url"
        assert broker["spec"]["replicas"] >= 2
