# SPDX-License-Identifier: Apache-2.0
"""The images as they were built: what they say of themselves, how large they are, what they share. `make test-k8s`."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from engines.mining.directory import write_directory
from services.common.protocol import suite_version
from tests.engines.test_mining_directory import ENGINE
from tests.k8s.cluster import ARCHIVES, NAMESPACE, POLL_S
from tests.support.processes import ROOT
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

MEGABYTES_MAX = {"services": 330, "broker": 330, "provisioner": 330, "worker-cpu": 340, "worker-cuda": 340}
"""Of an archive, uncompressed, without what is a vendor's; deploy/images/README.md has the figures."""
VENDORS = "opt/tensorrt/lib/lib"
HEALTH = ["CMD", "python", "-m", "services.common.healthcheck", "127.0.0.1:9601"]


@dataclass(frozen=True, slots=True)
class Image:
    """What an archive says."""

    config: dict[str, Any]
    layers: dict[str, int]
    """Name of a layer, which is its digest, to bytes; none that a vendor's run time fills."""


def image(name: str) -> Image:
    path = ARCHIVES / f"{name}.tar"
    if name == "worker-cuda" and not path.exists():
        pytest.skip("TENSORRT named no folder when the images were built")
    with tarfile.open(path) as archive:

        def document(name: str) -> Any:
            file = archive.extractfile(name)
            assert file is not None
            return json.load(file)

        [entry] = document("manifest.json")
        layers = {layer: archive.getmember(layer).size for layer in entry["Layers"]}
        for layer in entry["Layers"][1:]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                if any(file.startswith(VENDORS) for file in files.getnames()):
                    del layers[layer]
        return Image(document(entry["Config"])["config"], layers)


@pytest.mark.parametrize("name", MEGABYTES_MAX)
def test_an_image_is_small_and_says_what_it_is(name: str) -> None:
    found = image(name)
    assert sum(found.layers.values()) < MEGABYTES_MAX[name] * 1_000_000
    assert found.config["User"] == "10001:10001"
    labels = found.config["Labels"]
    assert labels["org.opencontainers.image.version"] == suite_version()
    assert len(labels["org.opencontainers.image.revision"].removesuffix("-dirty")) == 40
    if name != "services":
        assert found.config["Healthcheck"]["Test"] == HEALTH
    if name == "worker-cuda":
        assert re.fullmatch(r"\d+\.\d+\.\d+", labels["ifabric.tensorrt.version"])
    shared = image("services").layers
    own = sum(size for layer, size in found.layers.items() if layer not in shared)
    assert own < 10_000_000, "it brings more to a node than what is its own"


@pytest.mark.parametrize("service", ["broker", "provisioner", "worker-simulated"])
def test_its_own_health_check_finds_a_service_healthy(cluster: Cluster, service: str) -> None:
    cluster.kubectl("exec", "-n", NAMESPACE, f"deployment/{service}", "--", *HEALTH[1:])


def cuda_pod(cluster: Cluster, name: str) -> dict[str, Any]:
    """The pod of a simulated worker, with the image for cards, and nobody's but the test's."""
    image("worker-cuda")
    template = cluster.get("deployment", "worker-simulated")["spec"]["template"]
    spec = template["spec"]
    spec["containers"][0]["image"] = "ifabric/worker-cuda:dev"
    # Without its tier no Deployment takes it for one of its own; the policies of the network go by the others.
    labels = {key: value for key, value in template["metadata"]["labels"].items() if key != "ifabric/tier"}
    labels["test"] = name
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_the_worker_for_cards_serves_where_there_is_none(cluster: Cluster) -> None:
    """With the simulated card: restricted, its root read-only, healthy by its own check, accepted."""
    cluster.apply_pods([cuda_pod(cluster, "on-no-card")])
    try:
        cluster.ready("test=on-no-card", 1)
        cluster.kubectl("exec", "-n", NAMESPACE, "on-no-card", "--", *HEALTH[1:])
        looked = ("sh", "-c", "id -u; touch /opt/x 2>&1 || true")
        shown = cluster.kubectl("exec", "-n", NAMESPACE, "on-no-card", "--", *looked)
        assert shown.splitlines()[0] == "10001"
        assert "Read-only file system" in shown
    finally:
        cluster.kubectl("delete", "pod", "-n", NAMESPACE, "on-no-card", "--grace-period", "1", within_s=120)


@pytest.mark.parametrize(
    ("driver", "lacks"),
    [
        (False, "an NVIDIA card, and there is no driver here (libcuda.so.1 is not found)"),
        (True, "TensorRT 10, which does not load here (libnvinfer.so.10: cannot open shared object file: "
               "No such file or directory)"),
    ],
)  # fmt: skip
def test_what_a_machine_lacks_for_an_engine_ends_the_worker_with_one_sentence(
    cluster: Cluster, tmp_path: Path, driver: bool, lacks: str
) -> None:
    name = "wants-tensorrt" if driver else "wants-a-card"
    pod = cuda_pod(cluster, name)
    write_directory(tmp_path / "engine", ENGINE, b"plan", b"{}")
    files = {path.name: path.read_text() for path in (tmp_path / "engine").iterdir()}
    stub = {"libcuda.so.1": base64.b64encode(driver_of_one_card(tmp_path)).decode()}
    spec = pod["spec"]
    spec["restartPolicy"] = "Never"
    del spec["initContainers"]
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "engine"] + [
        {"name": "engine", "configMap": {"name": name, "items": [{"key": key, "path": key} for key in files]}},
        {"name": "driver", "configMap": {"name": name, "items": [{"key": key, "path": key} for key in stub]}},
        {"name": "nothing", "emptyDir": {}},
    ]
    mounts = spec["containers"][0]["volumeMounts"]
    mounts.append({"name": "nothing", "mountPath": "/opt/tensorrt/lib"})
    if driver:
        mounts.append({"name": "driver", "mountPath": f"/usr/lib/x86_64-linux-gnu/{next(iter(stub))}",
                       "subPath": next(iter(stub))})  # fmt: skip
    config = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": files, "binaryData": stub}
    cluster.apply([{"apiVersion": "v1", "kind": "ConfigMap", **config}])
    cluster.apply_pods([pod])
    try:

        def ended() -> dict[str, Any]:
            states = cluster.get("pod", name)["status"].get("containerStatuses", [])
            return dict(states[0]["state"].get("terminated", {})) if states else {}

        end = block_until(ended, every_s=POLL_S, within_s=90.0, what=f"the end of {name}")
        assert end["exitCode"] == 2
        last = end["message"].splitlines()[-1]
        assert last == f"worker: this engine needs {lacks}", "whoever describes the pod reads it"
    finally:
        cluster.kubectl("delete", f"pod/{name}", f"configmap/{name}", "-n", NAMESPACE, within_s=120)


def driver_of_one_card(folder: Path) -> bytes:
    """A stand-in for the driver's library that counts one card, and can do nothing with it."""
    source = folder / "driver.c"
    stub = ROOT / "native" / "tests" / "cuda_stub.c"
    source.write_text(
        f'#include "{stub}"\n__attribute__((constructor)) static void one(void) {{ stub_answer(0, 1); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-s", "-o", folder / "libcuda.so.1", source], check=True)
    return (folder / "libcuda.so.1").read_bytes()
