# SPDX-License-Identifier: Apache-2.0
"""What the overlays make: valid objects, restricted pods, settings that exist, names that fit together. Offline."""

from __future__ import annotations

import os
import tomllib
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from services.broker.settings import BrokerSettings
from services.common.settings import load
from services.provisioner.settings import ProvisionerSettings
from services.worker.settings import WorkerSettings
from tests.k8s.cluster import NOBODYS, build, image_name, render
from tests.k8s.test_components import OF_OPERATORS
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from services.common.settings import ServiceSettings

Object = dict[str, Any]

OVERLAYS = sorted(path.parent.name for path in (ROOT / "deploy" / "k8s" / "overlays").glob("*/kustomization.yaml"))
VERSION = "1.34"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "broker": BrokerSettings,
    "provisioner": ProvisionerSettings,
    "worker": WorkerSettings,
}
FROM_ELSEWHERE = {
    "IFAB_WORKER_ADVERTISE": "10.0.0.1:7602",
    "IFAB_WORKER_NODE_ID": "worker-7c9d-x2",
    "IFAB_BROKER_JOURNAL": "postgresql://db/jobs?sslmode=verify-full&sslrootcert=/run/ifabric/database/ca.crt",
}
"""Examples of what the cluster fills in."""
ARCHITECTURE = {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
RESTRICTED_VOLUMES = {"secret", "emptyDir", "persistentVolumeClaim", "configMap"}


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """What an overlay makes."""
    return render(request.param)


def of(objects: list[Object], kind: str) -> Iterator[Object]:
    yield from (each for each in objects if each["kind"] == kind)


def pods(objects: list[Object]) -> dict[str, Object]:
    """Pod templates by the name of their workload."""
    return {each["metadata"]["name"]: each["spec"]["template"] for each in of(objects, "Deployment")}


def services(objects: list[Object]) -> dict[str, tuple[str, Object]]:
    """What of the pods runs a service: name of the workload, to name of the service and pod."""
    by_name = {name: (role(template), template["spec"]) for name, template in pods(objects).items()}
    return {name: found for name, found in by_name.items() if found[0] in SETTINGS}


def workers(objects: list[Object]) -> dict[str, Object]:
    return {name: each for name, each in pods(objects).items() if role(each) == "worker"}


def role(template: Object) -> str:
    return str(template["metadata"]["labels"]["app.kubernetes.io/name"])


def environment(pod: Object) -> dict[str, str]:
    told = {each["name"]: str(each.get("value", "$(…)")) for each in pod["containers"][0]["env"]}
    return {
        name: FROM_ELSEWHERE[name] if "$(" in value else value
        for name, value in told.items()
        if name.startswith("IFAB_")
    }


def test_there_is_an_overlay_for_each_place() -> None:
    assert set(OVERLAYS) >= {"one-node", "h200", "consumer-cards", "ci"}


def test_objects_are_valid_and_in_the_namespace(objects: list[Object]) -> None:
    for each in objects:
        if each["apiVersion"] not in OF_OPERATORS:
            kubernetes_validate.validate(each, VERSION, strict=True)
    assert {each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"} == {"ifabric"}
    assert {found for found, _ in services(objects).values()} == set(SETTINGS)
    named = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(named)) == len(named)


def test_pods_are_restricted(objects: list[Object]) -> None:
    [namespace] = of(objects, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for template in pods(objects).values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "variables of Services could look like settings"
        assert all(set(volume) - {"name"} <= RESTRICTED_VOLUMES for volume in pod["volumes"])
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}


def test_settings_are_ones_that_the_services_know(objects: list[Object]) -> None:
    for service, pod in services(objects).values():
        settings = load(SETTINGS[service], [], environment(pod))
        assert settings.tls_cert is not None
        assert set(settings.allow_cleartext) - {"journal"} == {"metrics", "health"}
        ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
        doors = {"grpc": settings.listen, "metrics": settings.metrics_listen, "health": str(settings.health_listen)}
        assert {door: int(listen.rpartition(":")[2]) for door, listen in doors.items()} == ports


def test_rows_travel_in_the_clear_to_the_database_of_the_tests_alone() -> None:
    told = {overlay: environment(pods(render(overlay))["broker"]["spec"]) for overlay in OVERLAYS}
    plain = [overlay for overlay, each in told.items() if "journal" in each["IFAB_BROKER_ALLOW_CLEARTEXT"]]
    assert plain == ["ci"]


def test_probes_ask_the_port_of_health_alone_and_outlast_the_load(objects: list[Object]) -> None:
    for service, pod in services(objects).values():
        [container] = pod["containers"]
        assert container["readinessProbe"]["grpc"] == {"port": 9601}
        assert container["livenessProbe"]["grpc"] == {"port": 9601, "service": "liveness"}
        # Who does not even answer that cannot drain: it is not given the time for it.
        assert container["livenessProbe"]["terminationGracePeriodSeconds"] <= 30
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= (1800 if service == "worker" else 300)


def test_an_update_is_not_called_failed_while_a_pod_drains_or_an_engine_loads(objects: list[Object]) -> None:
    for each in of(objects, "Deployment"):
        pod = each["spec"]["template"]["spec"]
        probe = pod["containers"][0].get("startupProbe", {"periodSeconds": 0, "failureThreshold": 0})
        longest_s = pod["terminationGracePeriodSeconds"] + probe["periodSeconds"] * probe["failureThreshold"]
        assert each["spec"].get("progressDeadlineSeconds", 600) >= longest_s


def test_a_broker_has_the_memory_that_it_may_take(objects: list[Object]) -> None:
    pod = pods(objects)["broker"]["spec"]
    settings = load(BrokerSettings, [], environment(pod))
    [in_memory] = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if "emptyDir" in volume]
    # docs/benchmarks.md, `make bench-memory`: a quarter more than the bound for requests in flight.
    needed = 1.25 * settings.waiting_bytes_max + settings.holdings_bytes_max + size(in_memory)
    assert size(pod["containers"][0]["resources"]["limits"]["memory"]) >= needed


def size(quantity: str) -> int:
    """Bytes of a quantity in Mi or Gi."""
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]


def test_images_are_nobodys_until_somebody_says_where_they_come_from() -> None:
    """Without a registry a name means one of a public registry, whoever pushed it there."""
    for overlay in OVERLAYS:
        for template in pods(render(overlay)).values():
            for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
                registry, _, name = container["image"].partition("/ifabric/")
                if overlay == "ci":
                    assert container["image"].endswith(":dev"), "built where it runs, and never pulled"
                else:
                    assert (registry, name.partition("@")[2][:7]) == (NOBODYS, "sha256:")


def test_pods_run_where_their_images_do(objects: list[Object]) -> None:
    for name, template in pods(objects).items():
        if name != "postgresql":
            assert template["spec"]["nodeSelector"].items() >= ARCHITECTURE.items()


def test_the_room_that_an_engine_takes_on_its_node_is_asked_for(objects: list[Object]) -> None:
    for template in workers(objects).values():
        [placing] = template["spec"]["initContainers"]
        cards = int(template["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert size(placing["resources"]["requests"]["ephemeral-storage"]) >= size(f"{max(24 * cards, 1)}Gi")


def test_pods_are_given_the_time_that_draining_takes(objects: list[Object]) -> None:
    for service, pod in services(objects).values():
        settings = load(SETTINGS[service], [], environment(pod))
        # Calls and close hooks have the grace each; hooks are quick unless something is broken.
        assert pod["terminationGracePeriodSeconds"] >= settings.drain_propagation_s + settings.drain_grace_s + 30


def test_a_drain_outlasts_the_longest_answer(objects: list[Object]) -> None:
    told = [(service, load(SETTINGS[service], [], environment(pod))) for service, pod in services(objects).values()]
    [longest] = [settings.live_timeout_s for _, settings in told if isinstance(settings, BrokerSettings)]
    for service, settings in told:
        # A worker lets what runs end for four fifths of its grace, and needs the rest to hand back what does not.
        left = settings.drain_grace_s * (0.8 if service == "worker" else 1.0)
        assert service == "provisioner" or left >= longest


def test_names_lead_somewhere(objects: list[Object]) -> None:
    labels = [template["metadata"]["labels"] for template in pods(objects).values()]
    named_services = {each["metadata"]["name"]: each["spec"] for each in of(objects, "Service")}
    for service in named_services.values():
        [template] = [each for each in pods(objects).values() if selects(service["selector"], each)]
        named = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["ports"]} <= named
    for _, pod in services(objects).values():
        told = environment(pod)
        peer = told.get("IFAB_BROKER_PROVISIONER") or told.get("IFAB_WORKER_PROVISIONER")
        if peer:
            host, _, port = peer.partition(":")
            assert int(port) in {each["port"] for each in named_services[host]["ports"]}
    accounts = {each["metadata"]["name"] for each in of(objects, "ServiceAccount")}
    assert {each["spec"].get("serviceAccountName", "default") for each in pods(objects).values()} - {
        "default"
    } <= accounts
    claims = {each["metadata"]["name"] for each in of(objects, "PersistentVolumeClaim")}
    volumes = [volume for template in pods(objects).values() for volume in template["spec"]["volumes"]]
    assert {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each} == claims
    for policy in of(objects, "NetworkPolicy"):
        wanted = policy["spec"]["podSelector"].get("matchLabels", {})
        assert any(wanted.items() <= each.items() for each in labels)


def selects(selector: Object, template: Object) -> bool:
    return bool(selector.items() <= template["metadata"]["labels"].items())


def test_each_workload_has_a_budget_and_its_own_pods(objects: list[Object]) -> None:
    for each in of(objects, "Deployment"):
        chosen = [
            name
            for name, template in pods(objects).items()
            if selects(each["spec"]["selector"]["matchLabels"], template)
        ]
        assert chosen == [each["metadata"]["name"]], "two workloads would fight over pods"
    budgets = [each["spec"]["selector"]["matchLabels"] for each in of(objects, "PodDisruptionBudget")]
    for name, template in pods(objects).items():
        matching = [budget for budget in budgets if selects(budget, template)]
        # The provisioner may be away for seconds; of what is not the suite nothing is promised.
        assert len(matching) == (1 if role(template) in {"broker", "worker"} else 0), name


def test_budgets_keep_what_serves_and_let_every_node_be_drained(objects: list[Object]) -> None:
    replicas = {each["metadata"]["name"]: each["spec"].get("replicas", 1) for each in of(objects, "Deployment")}
    for each in of(objects, "PodDisruptionBudget"):
        budget = each["spec"]
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "a refused worker would hold its node"
        if each["metadata"]["name"] == "broker":
            kept = {"minAvailable": replicas["broker"] - 1}
        else:
            kept = {"maxUnavailable": 1}
        assert {name: budget[name] for name in ("minAvailable", "maxUnavailable") if name in budget} == kept


def test_nobody_speaks_but_as_named(objects: list[Object]) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of(objects, "NetworkPolicy")}
    closed = policies["nobody"]
    assert closed["podSelector"] == {}
    assert (set(closed["policyTypes"]), closed.get("ingress"), closed.get("egress")) == (
        {"Ingress", "Egress"},
        None,
        None,
    )
    ports = {
        name: {port["port"] for rule in policies[name].get("ingress", ()) for port in rule["ports"]}
        for name in {role(template) for template in pods(objects).values()}
    }
    told = {"broker": {7600}, "provisioner": {7601}, "worker": {7602}, "toolbox": set(), "postgresql": {5432}}
    assert ports == {name: told[name] for name in ports}


def test_cards_go_with_their_pool_and_with_what_the_tier_needs(objects: list[Object]) -> None:
    for template in workers(objects).values():
        pod = template["spec"]
        [container] = pod["containers"]
        cards = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        pool = "nvidia.com/gpu.product" in pod.get("nodeSelector", {})
        assert (pool, "cuda" in container["image"]) == (bool(cards), bool(cards))
        if cards:
            assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
            card_set, _, kind = template["metadata"]["labels"]["ifabric/tier"].rpartition("-")
            image = image_name(container)
            assert image == ("ifabric/worker-cuda" if kind == "mining" else "ifabric/worker-cuda-executor")
            tier = tomllib.loads((ROOT / "engines" / "tiers" / f"{card_set}.toml").read_text())
            assert tier["card"]["count"] == cards
            # The ranks of one engine speak through shared memory, of which a container's own has 64 MiB.
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            shared = [each for each in pod["volumes"] if each["name"] == mounts.get("/dev/shm")]
            assert [each["emptyDir"]["medium"] for each in shared] == ["Memory"] * (cards > 1)


def test_each_tier_has_an_engine_by_digest(objects: list[Object]) -> None:
    images = []
    for name, template in workers(objects).items():
        tier = template["metadata"]["labels"]["ifabric/tier"]
        assert name == f"worker-{tier}"
        [placing] = template["spec"]["initContainers"]
        assert placing["env"] == [
            {"name": "ENGINE_DIGEST", "valueFrom": {"configMapKeyRef": {"name": "engines", "key": tier}}}
        ]
        assert placing["args"] == ["/target", "--digest", "$(ENGINE_DIGEST)"]
        images.append(image_name(placing))
        assert images[-1] == f"ifabric/engine-{tier}"
        places = {mount["name"]: mount["mountPath"] for mount in placing["volumeMounts"]}
        taken = {mount["name"]: mount for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert places["engine"] == "/target"
        assert taken["engine"]["readOnly"] is True
        assert taken["engine"]["mountPath"] == environment(template["spec"])["IFAB_WORKER_ENGINE_DIR"]
    assert len(set(images)) == len(images)


def test_overlays_for_cards_have_several_tiers() -> None:
    for overlay in ("h200", "consumer-cards"):
        assert len(workers(render(overlay))) >= 3


def test_a_journal_in_a_file_has_one_broker_at_a_time(objects: list[Object]) -> None:
    [broker] = [each for each in of(objects, "Deployment") if each["metadata"]["name"] == "broker"]
    told = {each["name"]: each for each in broker["spec"]["template"]["spec"]["containers"][0]["env"]}
    journal = told["IFAB_BROKER_JOURNAL"]
    if "value" in journal:
        assert (broker["spec"]["replicas"], broker["spec"]["strategy"]) == (1, {"type": "Recreate"})
    else:
        assert journal["valueFrom"]["secretKeyRef"] == {"name": "broker-journal", "key": "url", "optional": False}
        pod = broker["spec"]["template"]["spec"]
        [volume] = [each for each in pod["volumes"] if each["name"] == "database"]
        [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "database"]
        authority = f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
        assert f"sslrootcert={authority}" in FROM_ELSEWHERE["IFAB_BROKER_JOURNAL"]
        assert told["PGPASSWORD"]["valueFrom"]["secretKeyRef"] == {
            "name": "broker-journal", "key": "password", "optional": True
        }  # fmt: skip
        assert broker["spec"]["replicas"] >= 2
        assert broker["spec"]["strategy"] == {
            "type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}
        }, "a new broker is ready before an old one goes"  # fmt: skip


def test_cordons_and_payloads_outlive_a_broker(objects: list[Object]) -> None:
    pod = pods(objects)["broker"]["spec"]
    settings = load(BrokerSettings, [], environment(pod))
    kept = [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    [mount] = [each["mountPath"] for each in pod["containers"][0]["volumeMounts"] if each["name"] in kept]
    assert str(settings.cordon_file).startswith(f"{mount}/")
    assert str(settings.jobs().payload_folder).startswith(f"{mount}/")
    [claim] = [
        each
        for each in of(objects, "PersistentVolumeClaim")
        if each["metadata"]["name"] in {"brokers", "broker-journal"}
    ]
    shared = settings.journal.startswith("postgresql:")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany" if shared else "ReadWriteOnce"]


def test_payloads_are_not_walked_over_whenever_a_broker_starts(objects: list[Object]) -> None:
    assert pods(objects)["broker"]["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_traces_have_a_way_to_their_collector(tmp_path: Path) -> None:
    k8s = os.path.relpath(ROOT / "deploy" / "k8s", tmp_path)
    written = {"resources": [f"{k8s}/overlays/h200"], "components": [f"{k8s}/components/otlp"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(written))
    objects = build(tmp_path)
    [policy] = [each["spec"] for each in of(objects, "NetworkPolicy") if each["metadata"]["name"] == "traces"]
    [names] = policy["podSelector"]["matchExpressions"]
    [port] = policy["egress"][0]["ports"]
    for service, pod in services(objects).values():
        settings = load(SETTINGS[service], [], environment(pod))
        assert str(settings.otlp_endpoint).endswith(f":{port['port']}")
        assert service in names["values"]
