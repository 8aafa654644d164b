# SPDX-License-Identifier: Apache-2.0
"""One cluster for all tests that need one: with images, namespaces, secrets, the overlay `ci` and a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.k8s import suite
from tests.k8s.cluster import Cluster, render, started

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The suite in pods, served by a real Kubernetes; whatever a test changes, it leaves pods that become ready."""
    folder = tmp_path_factory.mktemp("cluster")
    engines = suite.write_engines(folder)
    with started(lambda: suite.archives(engines)) as made:
        if made.attempt("get", "namespace", suite.CLIENTS).returncode != 0:
            made.apply(suite.namespaces())
            made.apply(suite.expected(folder, engines, made.folder / "volume"))
            made.apply(render("ci"))
            made.apply_pods([suite.client_pod()])
        made.ready("app.kubernetes.io/name=postgresql", 1)
        made.ready("app.kubernetes.io/name=provisioner", 1)
        made.ready("app.kubernetes.io/name=broker", 2)
        made.ready("ifabric/tier=simulated", 2)
        made.ready("ifabric/tier=cpu-generate", 1)
        made.kubectl(
            "wait", "-n", suite.CLIENTS, "pod/client", "--for", "condition=Ready", "--timeout", "60s", within_s=90
        )
        yield made
