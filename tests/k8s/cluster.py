# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes with the suite in its pods, for tests: what `scripts/kube` starts and the overlay `ci` says."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.processes import ROOT
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SCRIPTS = ROOT / "scripts" / "kube"
KUSTOMIZE = ROOT / ".tools" / "bin" / "kustomize"
ARCHIVES = ROOT / "build" / "images"
NAMESPACE = "ifabric"
NOBODYS = "registry.invalid"
"""Where images of an overlay come from before somebody says where."""
READY_WITHIN_S = 240.0
POLL_S = 1.0
"""How often a cluster is asked: each question is a process."""
KEPT_CLUSTER = "TEST_CLUSTER"
"""Variable that names the folder of a cluster that runs already, and is to run on after the tests."""


def render(overlay: str) -> list[dict[str, Any]]:
    """The objects that an overlay makes."""
    return build(ROOT / "deploy" / "k8s" / "overlays" / overlay)


def build(folder: Path) -> list[dict[str, Any]]:
    """The objects that a folder with a kustomization makes."""
    if not KUSTOMIZE.exists():
        raise AssertionError("kustomize is not there: run scripts/kustomize first")
    done = subprocess.run([KUSTOMIZE, "build", folder], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def image_name(container: dict[str, Any]) -> str:
    """The image of a container, without its registry, tag and digest."""
    return str(container["image"]).removeprefix(f"{NOBODYS}/").partition("@")[0].partition(":")[0]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that runs."""

    folder: Path
    """What `scripts/kube/up` was given."""

    def kubectl(self, *words: str, stdin: str | None = None, within_s: float = 60.0, check: bool = True) -> str:
        """Runs kubectl as the administrator and returns what it printed.

        Raises:
            AssertionError: it failed, and `check` is set; says what it printed.
        """
        done = self.attempt(*words, stdin=stdin, within_s=within_s)
        assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr or done.stdout}"
        return done.stdout

    def attempt(
        self, *words: str, stdin: str | None = None, within_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as the administrator, whatever becomes of it."""
        return subprocess.run(
            self.command(*words), input=stdin, capture_output=True, text=True, timeout=within_s, check=False
        )

    def command(self, *words: str) -> list[str]:
        """The command line of a kubectl, for who starts it."""
        return [str(SCRIPTS / "kubectl"), str(self.folder), *words]

    def apply(self, objects: Sequence[dict[str, Any]]) -> None:
        """Creates or changes objects."""
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def apply_pods(self, pods: Sequence[dict[str, Any]]) -> None:
        """Creates pods, in namespaces that may be new: none is taken before its namespace has its service account."""
        for namespace in {pod["metadata"]["namespace"] for pod in pods}:

            def there(namespace: str = namespace) -> bool:
                return self.attempt("get", "serviceaccount", "default", "-n", namespace).returncode == 0

            block_until(there, every_s=POLL_S, within_s=30.0, what=f"the service account of {namespace}")
        self.apply(pods)

    def get(self, *words: str, namespace: str = NAMESPACE) -> Any:
        """What `kubectl get` says, decoded."""
        return json.loads(self.kubectl("get", "-n", namespace, *words, "-o", "json"))

    def pods(self, selector: str, *, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """Pods that a selector of labels names and that are not being taken away."""
        found = self.get("pods", "-l", selector, namespace=namespace)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, selector: str, count: int, *, within_s: float = READY_WITHIN_S) -> list[dict[str, Any]]:
        """Waits until exactly `count` pods of a selector are there, all of them ready, and returns them."""

        def condition() -> list[dict[str, Any]]:
            pods = self.pods(selector)
            return pods if len(pods) == count and all(map(is_ready, pods)) else []

        try:
            return list(
                block_until(condition, every_s=POLL_S, within_s=within_s, what=f"{count} ready pods of {selector}")
            )
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{self.kubectl('describe', 'pods', '-n', NAMESPACE, '-l', selector)}"
            ) from None

    def logs(self, pod: str, *, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """The log lines of a pod's container, as objects."""
        text = self.kubectl("logs", "-n", namespace, pod)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def declare_node(self, name: str, cards: int, **labels: str) -> None:
        """Declares a node with cards and no kubelet."""
        words = [f"{key}={value}" for key, value in labels.items()]
        subprocess.run([SCRIPTS / "gpu-node", self.folder, name, str(cards), *words], check=True, timeout=60)


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod counts as ready."""
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True"


def secret(name: str, values: dict[str, bytes], *, namespace: str = NAMESPACE) -> dict[str, Any]:
    """A Secret."""
    data = {key: base64.b64encode(value).decode() for key, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}, "data": data}


@contextlib.contextmanager
def started(images: Callable[[], Sequence[Path]]) -> Iterator[Cluster]:
    """Starts a cluster whose node has `images`, and takes it away; or uses the one that KEPT_CLUSTER names."""
    kept = os.environ.get(KEPT_CLUSTER)
    if kept and (Path(kept) / "init.pid").exists():
        yield Cluster(Path(kept))
        return
    if os.geteuid() != 0:
        raise AssertionError("a cluster needs namespaces, and they need root: run this as root")
    folder = Path(kept or tempfile.mkdtemp(prefix="ifab-cluster-"))
    try:
        done = subprocess.run(
            [SCRIPTS / "up", folder, *images()], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        yield Cluster(folder)
    finally:
        if not kept:
            subprocess.run([SCRIPTS / "down", folder], check=True, timeout=60)
