# SPDX-License-Identifier: Apache-2.0
"""Start, stop and loss of the suite, on simulated engines: nothing is left behind, and failures are one sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from engines.simulated import ABSENT, write_simulated_engine
from tests.support.ports import held_port
from tests.support.processes import ROOT, ServiceProcess, environment
from tests.support.suite import IFAB, STOP_WITHIN_S, all_gone, children_of, end, run, start, up
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that takes 20 ms for each token, so that work is in flight when something happens."""
    directory = tmp_path_factory.mktemp("engine")
    write_simulated_engine(directory, time_mode="real", generated_token_ns=20_000_000)
    return directory


@pytest.fixture
def without_budget(tmp_path: Path) -> Path:
    """An engine whose contract leaves the token budget out."""
    write_simulated_engine(tmp_path / "engine", contract_changes={"limits.step_token_budget": ABSENT})
    return tmp_path / "engine"


def nodes(provisioner: str) -> list[dict[str, Any]]:
    done = run("nodes", "--provisioner", provisioner, "--json")
    return list(json.loads(done.stdout).get("nodes", []))


def test_ctrl_c_ends_everything_in_order(engine: Path, tmp_path: Path) -> None:
    with up(tmp_path, [engine]) as suite:
        before = (tmp_path / "provisioner.log").read_text()
        second = run("up", "--free-ports", "--engine", str(engine), "--logs", str(tmp_path))
        assert (second.returncode, second.stderr.count("\n")) == (1, 1)
        assert f"a suite that runs has its logs and jobs in {tmp_path}" in second.stderr
        assert (tmp_path / "provisioner.log").read_text().startswith(before), "it began the logs of the first anew"
        assert suite.stop() == 0
        all_gone(suite.pids, within_s=1)


def test_a_killed_supervisor_leaves_no_service_behind(engine: Path, tmp_path: Path) -> None:
    with up(tmp_path, [engine]) as suite:
        suite.process.kill()
        suite.process.wait()
        all_gone(suite.pids)


def test_a_killed_worker_ends_the_suite_with_a_sentence(engine: Path, tmp_path: Path) -> None:
    with up(tmp_path, [engine]) as suite:
        os.kill(suite.said["workers"][0]["pid"], signal.SIGKILL)
        assert suite.process.wait(STOP_WITHIN_S) == 1
        assert suite.process.stderr is not None
        assert "the worker ended with status -9" in suite.process.stderr.read()
        all_gone(suite.pids, within_s=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_interrupted_stops_its_suite(engine: Path, tmp_path: Path, number: signal.Signals) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"Row {n}", "max_tokens": 200}) for n in range(500)))
    results = tmp_path / "results.jsonl"
    command = start(
        "bulk", "run", str(rows), "-o", str(results), "--up", "--engine", str(engine), "--logs", str(tmp_path)
    )
    services: set[int] = set()
    try:
        block_until(lambda: results.exists() or command.poll() is not None, what="the start of the job")
        services = {child.pid for child in children_of(command.pid)}
        assert len(services) == 3
        command.send_signal(number)
        assert command.wait(STOP_WITHIN_S) == 128 + number
        all_gone(services, within_s=1)
    finally:
        end(command, services)


def test_a_port_that_is_taken_is_named(engine: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("up", "--engine", str(engine), "--provisioner", address, "--logs", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on {address}" in done.stderr
    assert "name another one with --provisioner, or port 0" in done.stderr


def test_a_directory_that_is_no_engine_is_named(tmp_path: Path) -> None:
    done = run("up", "--free-ports", "--engine", str(tmp_path / "absent"), "--logs", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "absent" in done.stderr
    assert "ifab engine build" in done.stderr


def on_a_small_disk(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `ifab` where `folder` is a file system of 64 KiB, in a namespace that ends with it."""
    folder.mkdir()
    script = 'mount -t tmpfs -o size=64k tmpfs "$1" && shift && exec "$@"'
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(folder), *IFAB, *words],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["engine build", "up", "bulk run"])
def test_a_disk_without_room_is_one_sentence(engine: Path, tmp_path: Path, command: str) -> None:
    if subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets nobody mount a file system of his own")
    full = tmp_path / "full"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"Row {n}", "max_tokens": 1}) for n in range(1000)))
    words, says = {
        "engine build": ((str(full / "engine"),), f"of disk are free under {full}"),
        "up": (("--free-ports", "--engine", str(engine), "--logs", str(full)), f"of disk are free under {full}"),
        "bulk run": (
            (str(rows), "-o", str(full / "results.jsonl"), "--up", "--engine", str(engine), "--logs", str(tmp_path)),
            f"{full}/results.jsonl: No space left on device",
        ),
    }[command]
    done = on_a_small_disk(full, *command.split(), *words)
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("ifab: ")] == [done.stderr.splitlines()[-1]]
    assert says in done.stderr


def test_a_contract_without_token_budget_stops_the_start(without_budget: Path, tmp_path: Path) -> None:
    done = run("up", "--free-ports", "--engine", str(without_budget), "--logs", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "limits.step_token_budget is absent" in done.stderr


@pytest.fixture
def provisioner() -> Iterator[ServiceProcess]:
    with ServiceProcess("services.provisioner", {"heartbeat_interval_ms": 200}) as process:
        yield process


def test_a_refused_node_is_visible_and_does_not_load(without_budget: Path, provisioner: ServiceProcess) -> None:
    settings = {"engine_dir": without_budget, "provisioner": provisioner.address, "node_id": "no-budget"}
    with ServiceProcess("services.worker", settings) as worker:
        listed = block_until(lambda: nodes(provisioner.address), what="the node")
        assert [(node["description"]["node_id"], node["state"]) for node in listed] == [
            ("no-budget", "NODE_STATE_REFUSED")
        ]
        assert [each["path"] for each in listed[0]["violations"]] == ["contract.limits.step_token_budget"]
        assert "report" not in listed[0], "a refused worker loads nothing"
        # The worker hears of it after the provisioner has listed it.
        [refused] = block_until(lambda: worker.logs("node.not_in_service"), what="the line of the refusal")
        assert [each["field"] for each in refused["violations"]] == ["contract.limits.step_token_budget"]
        assert worker.process.poll() is None


def test_services_start_in_any_order_and_find_each_other(engine: Path) -> None:
    with (
        held_port() as address,
        ServiceProcess("services.broker", {"provisioner": address}) as broker,
        ServiceProcess("services.worker", {"provisioner": address, "engine_dir": engine, "node_id": "late"}),
        ServiceProcess("services.provisioner", {"listen": address}),
    ):

        def answered() -> bool:
            done = run("generate", "Hello", "-n", "2", "--broker", broker.address, "--json")
            return done.returncode == 0 and json.loads(done.stdout)["usage"]["generated_tokens"] == 2

        block_until(answered, within_s=2 * PATIENCE_S, what="an answer")
