# SPDX-License-Identifier: Apache-2.0
"""Objects for KEDA, the Prometheus operator and cert-manager, against what these define. `make test-k8s`.

The real apiserver checks them; the operators themselves do not run.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.k8s.cluster import NAMESPACE, render
from tests.k8s.test_components import SCHEMAS
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

FOLDER = ROOT / ".tools" / "crds"
DRY = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
ISSUER = {
    "apiVersion": "cert-manager.io/v1", "kind": "Issuer", "metadata": {"name": "ifabric", "namespace": NAMESPACE},
    "spec": {"ca": {"secretName": "authority"}},
}  # fmt: skip
"""What the certificates expect to find, as an operator of the cluster would write it."""


@pytest.fixture(scope="module")
def knowing(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the definitions of these operators."""
    definitions = sorted(FOLDER.glob("*.yaml"))
    assert definitions, "run scripts/kube/crds first"
    files = [word for path in definitions for word in ("-f", str(path))]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.kubectl("wait", "--for", "condition=Established", "--timeout", "60s", *files, within_s=90)
    yield cluster
    cluster.kubectl("delete", "--wait=false", *files)


def objects() -> list[dict[str, Any]]:
    found = [each for overlay in ("h200", "consumer-cards") for each in render(overlay) if each["kind"] in SCHEMAS]
    assert {each["kind"] for each in found} == set(SCHEMAS)
    return [*found, ISSUER]


def test_the_definitions_have_nothing_against_any_object(knowing: Cluster) -> None:
    done = knowing.attempt(*DRY, stdin=yaml.safe_dump_all(objects()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("serverside-applied (server dry run)") == len(objects())


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_field_that_is_misspelt_is_refused(knowing: Cluster, kind: str) -> None:
    wrong = copy.deepcopy(next(each for each in objects() if each["kind"] == kind))
    wrong["spec"]["misspelt"] = 1
    done = knowing.attempt(*DRY, stdin=yaml.safe_dump(wrong))
    assert done.returncode != 0
    assert "misspelt" in done.stderr
