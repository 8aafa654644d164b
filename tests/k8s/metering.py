# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus and a real prometheus-adapter beside a test cluster: what serves autoscalers their figure."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import yaml

from tests.k8s.cluster import NAMESPACE, POLL_S, Cluster, render
from tests.support.processes import ROOT
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OBSERVABILITY = ROOT / "deploy" / "observability"
ADAPTER = ROOT / ".tools" / "kube" / "adapter"
ADAPTER_PORT = 6444
EVERY_S = 2
"""How often is scraped and reckoned here: in 30 s, as the rules have it, a test would be over."""
FIGURE = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/ifabric_tier_queue_depth"


def _underscored(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _targets(cluster: Cluster) -> list[dict[str, Any]]:
    """Ports of the suite's pods, with the labels that Prometheus' own discovery of pods gives them.

    Debian's Prometheus is built without that discovery: it reads these from a file, and relabels them as the
    PodMonitors say.
    """
    found = []
    for pod in cluster.get("pods")["items"]:
        address = pod["status"].get("podIP")
        labels = {
            "__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9_]", "_", name): value
            for name, value in pod["metadata"]["labels"].items()
        }
        ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", ())]
        found += [
            {"targets": [f"{address}:{port['containerPort']}"],
             "labels": {**labels, "__meta_kubernetes_pod_container_port_name": port["name"]}}
            for port in ports
            if address
        ]  # fmt: skip
    return found


@contextlib.contextmanager
def _discovered(cluster: Cluster, file: Path) -> Iterator[None]:
    """Keeps what is to be scraped in a file that Prometheus watches, while the block runs."""

    def write() -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(_targets(cluster)))
        part.replace(file)

    def follow() -> None:
        while not over.wait(EVERY_S):
            write()

    over = threading.Event()
    write()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        try:
            yield
        finally:
            over.set()
            following.result()


def _scrapes(targets: Path) -> list[dict[str, Any]]:
    """The PodMonitors of the overlays as the Prometheus operator would write them for Prometheus."""
    configs = []
    for monitor in (each for each in render("h200") if each["kind"] == "PodMonitor"):
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        [(label, value)] = monitor["spec"]["selector"]["matchLabels"].items()
        meta = "__meta_kubernetes_pod_label_" + label.replace(".", "_").replace("/", "_")
        keep = [
            {"source_labels": [meta], "regex": value, "action": "keep"},
            {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"],
             "action": "keep"},
        ]  # fmt: skip
        relabel = [{_underscored(key): each[key] for key in each} for each in endpoint["relabelings"]]
        configs.append(
            {"job_name": monitor["metadata"]["name"], "file_sd_configs": [{"files": [str(targets)]}],
             "relabel_configs": [*keep, *relabel]}
        )  # fmt: skip
    return configs


def _adapter_objects(address: str) -> list[dict[str, Any]]:
    """Where the apiserver finds the external metrics: a Service whose one endpoint is on the node, outside the pods."""
    place = {"name": "adapter", "namespace": "kube-system"}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": place,
         "spec": {"ports": [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": ADAPTER_PORT}]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
         "metadata": {**place, "labels": {"kubernetes.io/service-name": "adapter"}}, "addressType": "IPv4",
         "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
         "ports": [{"name": "https", "port": ADAPTER_PORT, "protocol": "TCP"}]},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
         "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
         "spec": {"service": place, "group": "external.metrics.k8s.io", "version": "v1beta1",
                  "insecureSkipTLSVerify": True, "groupPriorityMinimum": 100, "versionPriority": 100}},
    ]  # fmt: skip


@contextlib.contextmanager
def metered(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Has the cluster's apiserver serve what waits for each tier, while the block runs."""
    kubeconfig = cluster.folder.resolve() / "admin.kubeconfig"
    targets = folder / "targets.json"
    rules = (OBSERVABILITY / "prometheus" / "ifabric.rules.yaml").read_text()
    (folder / "rules.yaml").write_text(rules.replace("interval: 30s", f"interval: {EVERY_S}s"))
    every = {"scrape_interval": f"{EVERY_S}s", "scrape_timeout": f"{EVERY_S}s"}
    prometheus = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": _scrapes(targets)}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(prometheus))
    init = (cluster.folder / "init.pid").read_text().strip()
    inside = ["nsenter", "--target", init, "--net", "--"]
    commands = {
        "prometheus": [
            *inside, "prometheus", "--config.file", str(folder / "prometheus.yaml"),
            "--storage.tsdb.path", str(folder / "data"), "--web.listen-address", "127.0.0.1:9090",
        ],
        "adapter": [
            *inside, str(ADAPTER), "--prometheus-url", "http://127.0.0.1:9090", "--secure-port", str(ADAPTER_PORT),
            "--config", str(OBSERVABILITY / "prometheus-adapter" / "ifabric.yaml"), "--cert-dir", str(folder),
            "--metrics-relist-interval", "5s", "--lister-kubeconfig", str(kubeconfig),
            "--authentication-kubeconfig", str(kubeconfig), "--authorization-kubeconfig", str(kubeconfig),
        ],
    }  # fmt: skip
    [subset] = cluster.get("endpoints", "kubernetes", namespace="default")["subsets"]
    objects = _adapter_objects(str(subset["addresses"][0]["ip"]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_discovered(cluster, targets))
        for name, command in commands.items():
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(process.terminate)
        stack.callback(cluster.kubectl, "delete", "-f", "-", "--wait=false", stdin=yaml.safe_dump_all(objects))
        cluster.apply(objects)
        yield


def waiting(cluster: Cluster, tier: str) -> float | None:
    """What waits for a tier, as autoscalers are told; None where nobody says."""
    done = cluster.attempt("get", "--raw", f"{FIGURE}?labelSelector=tier%3D{tier}")
    items = json.loads(done.stdout)["items"] if done.returncode == 0 else []
    if not items:
        return None
    value = str(items[0]["value"])
    return float(value.removesuffix("m")) / 1000 if value.endswith("m") else float(value)


def wait_for_figure(cluster: Cluster, tier: str, *, within_s: float = 90.0) -> float:
    """Waits until somebody says what waits for a tier, and returns it."""

    def said() -> list[float]:
        figure = waiting(cluster, tier)
        return [] if figure is None else [figure]

    [figure] = block_until(said, every_s=POLL_S, within_s=within_s, what=f"the figure of tier {tier}")
    return float(figure)
