# SPDX-License-Identifier: Apache-2.0
"""The images as they were built: what they say of themselves, how large they are, what they share. `make test-k8s`."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from services.common.protocol import suite_version
from tests.k8s.cluster import ARCHIVES, NAMESPACE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

MEGABYTES_MAX = {"services": 330, "broker": 330, "provisioner": 330, "worker-cpu": 340}
"""Of an archive, uncompressed; deploy/images/README.md has the figures."""
HEALTH = ["CMD", "python", "-m", "services.common.healthcheck", "127.0.0.1:9601"]


@dataclass(frozen=True, slots=True)
class Image:
    """What an archive says."""

    config: dict[str, Any]
    layers: dict[str, int]
    """Name of a layer, which is its digest, to bytes."""


def image(path: Path) -> Image:
    with tarfile.open(path) as archive:

        def document(name: str) -> Any:
            file = archive.extractfile(name)
            assert file is not None
            return json.load(file)

        [entry] = document("manifest.json")
        layers = {name: archive.getmember(name).size for name in entry["Layers"]}
        return Image(document(entry["Config"])["config"], layers)


@pytest.mark.parametrize("name", MEGABYTES_MAX)
def test_an_image_is_small_and_says_what_it_is(name: str) -> None:
    found = image(ARCHIVES / f"{name}.tar")
    assert sum(found.layers.values()) < MEGABYTES_MAX[name] * 1_000_000
    assert found.config["User"] == "10001:10001"
    labels = found.config["Labels"]
    assert labels["org.opencontainers.image.version"] == suite_version()
    assert len(labels["org.opencontainers.image.revision"]) == 40
    if name != "services":
        assert found.config["Healthcheck"]["Test"] == HEALTH
    shared = image(ARCHIVES / "services.tar").layers
    own = sum(size for layer, size in found.layers.items() if layer not in shared)
    assert own < 10_000_000, "it brings more to a node than what is its own"


@pytest.mark.parametrize("service", ["broker", "provisioner", "worker-simulated"])
def test_its_own_health_check_finds_a_service_healthy(cluster: Cluster, service: str) -> None:
    cluster.kubectl("exec", "-n", NAMESPACE, f"deployment/{service}", "--", *HEALTH[1:])
