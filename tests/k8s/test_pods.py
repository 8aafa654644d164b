# SPDX-License-Identifier: Apache-2.0
"""What the cluster does to pods of the suite, and they to it: probes, drain, budgets, pod security. `make test-k8s`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from tests.k8s.cluster import NAMESPACE, POLL_S, is_ready, render
from tests.k8s.suite import CLIENTS, assert_every_row_came, simulated_job, toolbox
from tests.k8s.test_components import OF_OPERATORS
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

BROKERS, SIMULATED = "app.kubernetes.io/name=broker", "ifabric/tier=simulated"
LONG = "512"
"""Tokens of an answer that takes ten seconds: time to be told to go in the middle, and less than a drain gives."""


def evict(cluster: Cluster, pod: str) -> subprocess.CompletedProcess[str]:
    """Asks for a pod's eviction, as a drain of its node does."""
    eviction = {
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}
    }  # fmt: skip
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
    return cluster.attempt("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def door(broker: dict[str, Any]) -> str:
    """Where one broker listens, past the Service."""
    return f"{broker['status']['podIP']}:7600"


def lines(log: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a pod whose log is followed says until it ends."""
    return [json.loads(line) for line in log.communicate(timeout=90)[0].splitlines() if line.startswith("{")]


def main_process(pod: dict[str, Any]) -> int:
    """The process of a pod's container, as this machine numbers it: a child of the container's shim."""
    container = str(pod["status"]["containerStatuses"][0]["containerID"]).rpartition("/")[2]
    for process in psutil.process_iter(["pid", "cmdline"]):
        worker = "-m services.worker" in " ".join(process.info["cmdline"] or ())
        if worker and container in Path(f"/proc/{process.pid}/cgroup").read_text():
            return int(process.pid)
    raise AssertionError(f"no process of {pod['metadata']['name']}")


def test_an_evicted_worker_hands_back_its_work_and_the_budget_keeps_the_other(cluster: Cluster) -> None:
    job, wanted = simulated_job(cluster, "evicted")
    first, second = (pod["metadata"]["name"] for pod in cluster.ready(SIMULATED, 2))
    follow = cluster.command("logs", "-n", NAMESPACE, first, "-f", "--since", "1s")
    with subprocess.Popen(follow, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as log:
        assert evict(cluster, first).returncode == 0
        refused = evict(cluster, second)
        assert refused.returncode != 0
        assert "violate the pod's disruption budget" in refused.stderr
        said = lines(log)
    assert "stop.requested" in {line["event"] for line in said}
    assert not [line for line in said if line["level"] in {"error", "critical"}]
    assert_every_row_came(job, wanted)
    cluster.ready(SIMULATED, 2)
    status = cluster.get("poddisruptionbudget", "worker-simulated")["status"]
    assert (status["currentHealthy"], status["disruptionsAllowed"]) == (2, 1)


@pytest.mark.parametrize("role", ["broker", "worker"])
def test_a_live_answer_outlasts_the_pod_that_is_told_to_go(cluster: Cluster, role: str) -> None:
    brokers = cluster.ready(BROKERS, 2)
    workers = cluster.ready(SIMULATED, 2)

    def ask(broker: dict[str, Any]) -> tuple[str, ...]:
        words = ("ifab", "generate", "At length:", "-n", LONG, "--engine-id", "simulated-test")
        return "exec", "-n", CLIENTS, "client", "--", *words, "--broker", door(broker)

    # Without a buffer of its own: what was read ahead of the first byte would be missing later.
    asking = subprocess.Popen(cluster.command(*ask(brokers[0])), bufsize=0, stdout=subprocess.PIPE)
    with asking:
        assert asking.stdout is not None
        begun = asking.stdout.read(1)
        going, staying = (pod["metadata"]["name"] for pod in (brokers if role == "broker" else workers))
        if role == "worker" and not at_the_broker(cluster, door(brokers[0]))[going]["running_requests"]:
            going, staying = staying, going
        follow = cluster.command("logs", "-n", NAMESPACE, going, "-f", "--since", "1s")
        with subprocess.Popen(follow, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as log:
            assert evict(cluster, going).returncode == 0
            assert "violate the pod's disruption budget" in evict(cluster, staying).stderr
            assert asking.poll() is None, "the answer was over before anybody was told to go"
            rest = asking.communicate(timeout=60)[0]
            said = {line["event"] for line in lines(log)}
    assert asking.returncode == 0
    assert "stop.requested" in said
    assert "drain.handed_back" not in said, "it did not end where it ran"
    other = cluster.ready(BROKERS, 2)[-1]
    assert (begun + rest).decode() == cluster.kubectl(*ask(other)), "it is not the whole answer"
    cluster.ready(SIMULATED, 2)


def at_the_broker(cluster: Cluster, broker: str) -> dict[str, Any]:
    """What a broker says of each node that serves it."""
    listed = json.loads(toolbox(cluster, "ifab", "nodes", "--json", "--broker", broker))["nodes"]
    works = [node["at_the_broker"] for node in listed if "at_the_broker" in node]
    return {work["node_id"]: work for work in works}


def test_a_worker_that_may_not_serve_holds_up_no_drain(cluster: Cluster) -> None:
    [refused] = cluster.pods("ifabric/tier=unbudgeted")
    name = refused["metadata"]["name"]
    assert not is_ready(refused)
    assert evict(cluster, name).returncode == 0
    gone = ("wait", "-n", NAMESPACE, f"pod/{name}", "--for", "delete", "--timeout", "60s")
    cluster.kubectl(*gone, within_s=90)


def test_a_worker_that_stands_still_is_taken_out_of_service_and_then_started_again(cluster: Cluster) -> None:
    [stuck, _] = cluster.ready(SIMULATED, 2)
    name = stuck["metadata"]["name"]
    os.kill(main_process(stuck), signal.SIGSTOP)

    def now() -> dict[str, Any]:
        return dict(cluster.get("pod", name))

    block_until(lambda: not is_ready(now()), every_s=POLL_S, within_s=30, what="the stuck worker is not ready")
    assert now()["status"]["containerStatuses"][0]["restartCount"] == 0, "readiness comes first"
    again = lambda: now()["status"]["containerStatuses"][0]["restartCount"] == 1 and is_ready(now())  # noqa: E731
    block_until(again, every_s=POLL_S, within_s=150, what="the worker was started again and is ready")
    events = cluster.get("events", "--field-selector", f"involvedObject.name={name}")["items"]
    unhealthy = [event["message"] for event in events if event["reason"] == "Unhealthy"]
    assert any(message.startswith("Readiness probe") for message in unhealthy)
    assert any(message.startswith("Liveness probe") for message in unhealthy)


def test_a_broker_is_reached_only_while_it_is_ready(cluster: Cluster) -> None:
    ready = {pod["status"]["podIP"] for pod in cluster.ready(BROKERS, 2)}
    slices = cluster.get("endpointslices", "-l", "kubernetes.io/service-name=broker")["items"]
    endpoints = [endpoint for each in slices for endpoint in each["endpoints"]]
    assert {address for each in endpoints for address in each["addresses"]} == ready
    assert all(each["conditions"]["ready"] for each in endpoints)
    [unbudgeted] = cluster.pods("ifabric/tier=unbudgeted")
    assert not is_ready(unbudgeted), "a worker that may not serve is no ready pod"


def cordons(cluster: Cluster, broker: str) -> set[str]:
    """Nodes that a broker sends nothing."""
    return {name for name, work in at_the_broker(cluster, broker).items() if work["cordoned"]}


def test_a_cordon_outlives_the_brokers_that_were_told(cluster: Cluster) -> None:
    node = cluster.ready(SIMULATED, 2)[0]["metadata"]["name"]
    told = cluster.ready(BROKERS, 2)
    for pod in told:
        toolbox(cluster, "ifab", "nodes", "cordon", node, "--broker", door(pod))
    cluster.kubectl("delete", "pods", "-n", NAMESPACE, "-l", BROKERS, within_s=120)
    later = cluster.ready(BROKERS, 2)
    assert {pod["metadata"]["name"] for pod in later} & {pod["metadata"]["name"] for pod in told} == set()
    for pod in later:
        assert cordons(cluster, door(pod)) == {node}
        toolbox(cluster, "ifab", "nodes", "uncordon", node, "--broker", door(pod))
        assert cordons(cluster, door(pod)) == set()


@pytest.mark.parametrize(
    ("file", "refusal"),
    [("tokenizer.json", "/target is not what its contract says: "), ("contract.json", "and the one asked for is ")],
)
def test_a_changed_byte_of_an_engine_is_refused_before_a_worker_starts(
    cluster: Cluster, file: str, refusal: str
) -> None:
    [template] = [each["spec"]["template"] for each in render("ci") if each["metadata"]["name"] == "worker-simulated"
                  and each["kind"] == "Deployment"]  # fmt: skip
    name = "tampered-" + file.partition(".")[0]
    spec = template["spec"]
    # The pod as it is, but that its engine's image is what this copy of it makes of it.
    [placing] = spec["initContainers"]
    copy = (
        "from pathlib import Path\n"
        "for path in Path('/engine').iterdir():\n"
        "    content = path.read_bytes()\n"
        f"    Path('/brought', path.name).write_bytes(content[:-1] + b'#' if path.name == '{file}' else content)\n"
    )
    tampering = {**placing, "name": "tampering", "command": ["python", "-c", copy], "args": [], "env": [],
                 "volumeMounts": [{"name": "brought", "mountPath": "/brought"}]}  # fmt: skip
    placing["volumeMounts"].append({"name": "brought", "mountPath": "/engine"})
    spec |= {"initContainers": [tampering, placing], "restartPolicy": "Never"}
    spec["volumes"].append({"name": "brought", "emptyDir": {}})
    labels = {**template["metadata"]["labels"], "ifabric/tier": name}
    cluster.apply(
        [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
          "spec": spec}]
    )  # fmt: skip
    try:

        def failed() -> dict[str, Any]:
            status = cluster.get("pod", name)["status"]
            return dict(status) if status["phase"] == "Failed" else {}

        status = block_until(failed, every_s=POLL_S, within_s=60, what="the pod is given up")
        ended = {each["name"]: each["state"]["terminated"]["exitCode"] for each in status["initContainerStatuses"]}
        assert ended == {"tampering": 0, "engine": 1}
        assert not status["containerStatuses"][0]["started"]
        assert refusal in cluster.kubectl("logs", "-n", NAMESPACE, name, "-c", "engine")
    finally:
        cluster.kubectl("delete", "pod", "-n", NAMESPACE, name, "--wait=false")


@pytest.mark.parametrize("namespace", [NAMESPACE, CLIENTS])
def test_pods_that_are_not_restricted_are_refused(cluster: Cluster, namespace: str) -> None:
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bold", "namespace": namespace},
        "spec": {"containers": [{"name": "bold", "image": "bold", "securityContext": {"privileged": True}}]},
    }  # fmt: skip
    refused = cluster.attempt("create", "-f", "-", stdin=json.dumps(pod))
    assert refused.returncode != 0
    assert 'violates PodSecurity "restricted:latest"' in refused.stderr


def test_no_container_is_root_or_writes_its_root(cluster: Cluster) -> None:
    for pod in cluster.get("pods")["items"]:
        if pod["status"]["phase"] != "Running":
            continue
        name = pod["metadata"]["name"]
        shown = cluster.kubectl(
            "exec",
            "-n",
            NAMESPACE,
            name,
            "--",
            "sh",
            "-c",
            "id -u; touch /opt/x 2>&1 || true; grep CapEff /proc/self/status",
        )
        user, written, capabilities = shown.splitlines()
        assert (user, capabilities.split()[1].strip("0")) == ("10001", ""), name
        assert "Read-only file system" in written, name


@pytest.mark.parametrize("overlay", ["one-node", "h200", "consumer-cards", "ci"])
def test_the_real_apiserver_takes_every_overlay_without_a_warning(cluster: Cluster, overlay: str) -> None:
    known = [each for each in render(overlay) if each["apiVersion"] not in OF_OPERATORS]
    words = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
    done = cluster.attempt(*words, stdin=yaml.safe_dump_all(known))
    assert (done.returncode, done.stderr) == (0, "")
