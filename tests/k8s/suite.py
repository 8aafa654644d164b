# SPDX-License-Identifier: Apache-2.0
"""What the overlay `ci` expects to find, and a client in a namespace of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engines.simulated import ABSENT, SimulatedEngine, Simulation, write_simulated_engine
from services.common.contract import engine_digest
from tests.k8s.cluster import ARCHIVES, NAMESPACE, POLL_S, Cluster, render, secret
from tests.support.authority import Authority
from tests.support.processes import ROOT
from tests.support.suite import ENGINE
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = "ifabric-clients"
"""Namespace of the client, which the network policies let in by its label."""
KEY: Final = "ifab_key-of-the-client-in-the-test-cluster"
OPERATOR_KEY: Final = "ifab_key-of-the-operator-in-the-test-cluster"
TOLD: Final[dict[str, Any]] = {
    "engine_id": "simulated-test", "time_mode": "real", "step_us": 20_000, "slots": 8,
    "max_output_tokens": 512, "max_sequence_tokens": 1536,
}  # fmt: skip
"""The simulated engine: 20 ms a step, so that a job of a few hundred rows lasts long enough to disturb it."""
BUDGET: Final = "contract.limits.step_token_budget"
"""The field that one engine leaves out, as violations name it."""
ROWS: Final = 600
"""Rows of a job on the simulated workers, some 30 a second at most."""
JOB_WITHIN_S: Final = 400.0
IMAGES: Final = ("services", "broker", "provisioner", "worker-cpu", "postgresql")


def write_engines(folder: Path) -> dict[str, Path]:
    """Writes the engine of each tier of the overlay, and returns where."""
    engines = {"cpu-generate": ENGINE, "simulated": folder / "simulated", "unbudgeted": folder / "unbudgeted"}
    write_simulated_engine(engines["simulated"], **TOLD)
    write_simulated_engine(
        engines["unbudgeted"], engine_id="unbudgeted", contract_changes={BUDGET.removeprefix("contract."): ABSENT}
    )
    return engines


def archives(engines: dict[str, Path]) -> list[Path]:
    """Builds the images of the engines and of the database, and returns all that tests start pods of.

    The worker for cards is among them where it was built.

    Raises:
        AssertionError: an image of the suite is not there.
    """
    for tier, engine in engines.items():
        _build("engine", str(engine), f"engine-{tier}")
    _build("file", "tests/k8s/postgresql/Containerfile", "postgresql")
    found = [ARCHIVES / f"{name}.tar" for name in (*IMAGES, *(f"engine-{tier}" for tier in engines))]
    missing = [archive.name for archive in found if not archive.exists()]
    assert not missing, f"{missing} are not there: run scripts/images first"
    return [*found, *ARCHIVES.glob("worker-cuda.tar")]


def _build(*words: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "images", *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def expected(folder: Path, engines: dict[str, Path], volume: Path) -> list[dict[str, Any]]:
    """What the overlay does not bring itself: secrets, digests of engines, a volume; and the client's namespace."""
    authority = Authority(folder)
    objects: list[dict[str, Any]] = []
    for role in ("broker", "provisioner", "worker", "operator"):
        root, key, certificate = authority.issue(role).pem()
        objects.append(secret(f"{role}-tls", {"ca.crt": root, "tls.key": key, "tls.crt": certificate}))
    access = _entry("client", KEY, "generate", "jobs")
    access += _entry("operator", OPERATOR_KEY, "operate", "jobs", "any-tenant")
    url = "postgresql://ifabric@postgresql:5432/jobs"
    objects.append(secret("broker-access", {"access.toml": access.encode()}))
    objects.append(secret("operator-key", {"token": OPERATOR_KEY.encode()}))
    objects.append(secret("broker-journal", {"url": url.encode(), "password": b"a-password-of-the-test"}))
    digests = {tier: engine_digest(engine) for tier, engine in engines.items()}
    objects.append(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "engines", "namespace": NAMESPACE},
         "data": digests}
    )  # fmt: skip
    volume.mkdir(exist_ok=True)
    volume.chmod(0o777)
    objects.append(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "brokers"},
         "spec": {"capacity": {"storage": "200Gi"}, "accessModes": ["ReadWriteMany"],
                  "hostPath": {"path": str(volume), "type": "Directory"}}}
    )  # fmt: skip
    access_of_client = {"ca.crt": authority.path.read_bytes(), "token": KEY.encode()}
    objects.append(secret("client", access_of_client, namespace=CLIENTS))
    return objects


def _entry(name: str, key: str, *scopes: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nid = "{name}"\nsha256 = "{digest}"\ntenant = "acme"\nscopes = {json.dumps(scopes)}\n'


def namespaces() -> list[dict[str, Any]]:
    """The suite's namespace as the overlay has it, and the client's, restricted too."""
    [own] = [each for each in render("ci") if each["kind"] == "Namespace"]
    labels = {**own["metadata"]["labels"], "ifabric/clients": "yes"}
    labels.pop("app.kubernetes.io/part-of", None)
    return [own, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": CLIENTS, "labels": labels}}]


def waiting_pod(name: str, namespace: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """A restricted pod with the suite's packages that waits for `kubectl exec`, and ends at once when asked to."""
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 10002, "seccompProfile": {"type": "RuntimeDefault"}
            },
            "containers": [{
                "name": name, "image": "ifabric/services:dev", "imagePullPolicy": "IfNotPresent",
                "command": ["python", "-c", "import signal; signal.sigwait({signal.SIGTERM})"],
                "securityContext": {
                    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
                },
            }],
        },
    }  # fmt: skip


def client_pod() -> dict[str, Any]:
    """A pod that works as a tenant's would: with a token, and no certificate."""
    environment = {
        "IFAB_CLI_BROKER": f"broker.{NAMESPACE}.svc:7600",
        "IFAB_CLI_TLS_CA": "/run/client/ca.crt",
        "IFAB_CLI_TOKEN_FILE": "/run/client/token",
    }
    pod = waiting_pod("client", CLIENTS)
    [container] = pod["spec"]["containers"]
    container["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    container["volumeMounts"] = [
        {"name": "client", "mountPath": "/run/client", "readOnly": True}, {"name": "tmp", "mountPath": "/tmp"}
    ]  # fmt: skip
    pod["spec"]["volumes"] = [
        {"name": "client", "secret": {"secretName": "client"}}, {"name": "tmp", "emptyDir": {}}
    ]  # fmt: skip
    return pod


@dataclass(frozen=True, slots=True)
class Job:
    """A bulk job in the client's pod."""

    cluster: Cluster
    name: str
    process: subprocess.Popen[str]

    def results(self) -> dict[str, dict[str, Any]]:
        """The rows that the client has so far, by id; a row that is there twice fails the test."""
        text = in_client(self.cluster, "cat", f"/tmp/{self.name}.out", check=False)
        # Text may hold what Python, and not JSON, takes for the end of a line.
        rows = [json.loads(line) for line in text.split("\n") if line.endswith("}")]
        found = {row["id"]: row for row in rows}
        assert len(found) == len(rows), f"{len(rows) - len(found)} rows came twice"
        return found

    def report(self, *, within_s: float) -> dict[str, Any]:
        """Waits for the end and returns the job's report."""
        out, err = self.process.communicate(timeout=within_s)
        assert self.process.returncode == 0, f"status {self.process.returncode}: {out[-2000:]}\n{err[-2000:]}"
        return dict(json.loads(out.splitlines()[-1]))


def in_client(cluster: Cluster, *words: str, stdin: str | None = None, check: bool = True, within_s: float = 60) -> str:
    """Runs a command in the client's pod."""
    return cluster.kubectl(
        "exec", "-i", "-n", CLIENTS, "client", "--", *words, stdin=stdin, check=check, within_s=within_s
    )


def toolbox(cluster: Cluster, *words: str) -> str:
    """Runs a command in the pod that has an operator's certificate and key."""
    return cluster.kubectl("exec", "-n", NAMESPACE, "deployment/toolbox", "--", *words)


def start_job(cluster: Cluster, name: str, rows: str, *options: str) -> Job:
    """Has the client's pod run rows as a job through the broker's Service."""
    in_client(cluster, "sh", "-c", f"cat > /tmp/{name}.in", stdin=rows)
    command = cluster.command(
        "exec", "-n", CLIENTS, "client", "--", "ifab", "bulk", "run", f"/tmp/{name}.in", "-o", f"/tmp/{name}.out",
        "--job", name, "--json", *options,
    )  # fmt: skip
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return Job(cluster, name, process)


def simulated_rows(name: str, count: int, *, tokens: int = 24) -> tuple[str, dict[str, list[int]]]:
    """Rows for the simulated engine, and the tokens that each must bring."""
    simulation = Simulation(SimulatedEngine(**TOLD))
    rows: list[str] = []
    wanted: dict[str, list[int]] = {}
    for number in range(count):
        prompt = list(f"head {number % 8} of the job, shared by many rows. {name} {number}".encode())
        row = {"id": f"row-{number}", "token_ids": prompt, "max_tokens": tokens, "return_token_ids": True}
        rows.append(json.dumps(row))
        wanted[f"row-{number}"] = simulation.tokens(prompt, tokens)
    return "\n".join(rows) + "\n", wanted


def simulated_job(cluster: Cluster, name: str, count: int = ROWS) -> tuple[Job, dict[str, list[int]]]:
    """Starts a job that takes the two simulated workers a while, and waits until some of it is done."""
    rows, wanted = simulated_rows(name, count)
    job = start_job(cluster, name, rows, "--engine-id", "simulated-test")
    status: dict[str, Any] = {}

    def begun() -> bool:
        assert job.process.poll() is None, job.process.communicate()
        answer = in_client(cluster, "ifab", "bulk", "status", name, "--json", check=False)
        status.update(json.loads(answer) if answer else {})
        return int(status.get("finished", 0)) > 0

    block_until(begun, every_s=POLL_S, within_s=60.0, what=f"the first results of {name}")
    assert int(status["finished"]) < count, "the job was over before anything was done to it"
    return job, wanted


def assert_every_row_came(job: Job, wanted: dict[str, list[int]]) -> None:
    """Waits for the end of a job; each row has come once, with the tokens that its engine owes."""
    report = job.report(within_s=JOB_WITHIN_S)
    assert (report["requests"], report["failed"]) == (len(wanted), 0)
    assert {name: row["token_ids"] for name, row in job.results().items()} == wanted
