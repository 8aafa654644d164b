# SPDX-License-Identifier: Apache-2.0
"""Real processes: how they start, how they refuse to, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from services.common.rpc import channel
from tests.common.behaviour import FULL_NAME, call
from tests.support.processes import ROOT, ServiceProcess, environment, run_to_end
from tests.support.waiting import PATIENCE_S, block_until, wait_until

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = "tests.common.sample_service"
PROVISIONER = "services.provisioner"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_says_where_it_listens_and_ends_orderly(number: signal.Signals) -> None:
    with ServiceProcess(PROVISIONER) as service:
        assert service.line == {
            "service": "provisioner",
            "address": service.address,
            "metrics": service.metrics,
            "pid": service.pid,
        }
        service.signal(number)
        assert service.wait() == 0
        (started,) = service.logs("process.started")
        assert started["settings"]["heartbeat_interval_ms"] == 1_000
        assert [line["event"] for line in service.logs()] == [
            "process.started",
            "stop.requested",
            "drain.started",
            "drain.ended",
            "process.ended",
        ]
        assert all(line.startswith("{") for line in service.stderr().splitlines())


@pytest.mark.parametrize("place", ["full disk", "reader gone"])
def test_a_log_that_cannot_be_written_keeps_nobody_from_starting_or_ending(place: str) -> None:
    reader, writer = os.pipe()
    errors = os.open("/dev/full", os.O_WRONLY) if place == "full disk" else writer
    command = [sys.executable, "-m", PROVISIONER]
    with subprocess.Popen(command, cwd=ROOT, env=environment(None), stdout=subprocess.PIPE, stderr=errors) as process:
        try:
            assert process.stdout is not None
            os.close(reader)
            assert json.loads(process.stdout.readline())["service"] == "provisioner"
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            for descriptor in {writer, errors}:
                os.close(descriptor)


def test_what_is_wrong_with_settings_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    ended = run_to_end(PROVISIONER, ["--nodes-mx", "3"])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "provisioner: --nodes-mx is not a setting of provisioner; did you mean --nodes-max?\n"
    ended = run_to_end(PROVISIONER, [], env={"IFAB_PROVISIONER_COLOUR": "red"})
    assert ended.stderr == "provisioner: IFAB_PROVISIONER_COLOUR is not a setting of provisioner\n"
    assert ended.returncode == 2
    ended = run_to_end(PROVISIONER, ["--config", str(tmp_path / "none.toml")])
    assert "cannot read the settings file" in ended.stderr


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_taken_port_is_one_sentence_and_status_2(flag: str) -> None:
    with ServiceProcess(SAMPLE) as first:
        address = first.address if flag == "--listen" else first.metrics
        ended = run_to_end(SAMPLE, [flag, address])
    assert (ended.returncode, ended.stdout) == (2, "")
    said = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1
    assert said[0].startswith("sample: cannot ")
    assert address in said[0]
    assert f"name another one with {flag}, or port 0 for a free one" in said[0]


def test_help_is_printed_and_nothing_started() -> None:
    ended = run_to_end(PROVISIONER, ["--help"])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: python -m services.provisioner")
    assert "--heartbeat-interval-ms" in ended.stdout


@pytest.mark.parametrize("mode", ["task fails", "main fails"])
def test_a_fault_ends_the_process_with_status_1_and_a_log_line(mode: str) -> None:
    with ServiceProcess(SAMPLE, {"mode": mode, "drain_grace_s": 1.0}) as service:
        assert service.wait() == 1
        (failed,) = service.logs("task.failed" if mode == "task fails" else "process.failed")
        assert failed["exception"][0]["exc_type"] == "LookupError"


def test_a_second_signal_ends_at_once() -> None:
    with ServiceProcess(SAMPLE, {"mode": "hangs", "drain_grace_s": 60.0}) as service:
        service.signal(signal.SIGTERM)
        block_until(lambda: service.logs("drain.started"), what="the drain began")
        service.signal(signal.SIGTERM)
        assert service.wait() == 128 + signal.SIGTERM


async def test_a_stream_that_is_open_ends_within_the_grace() -> None:
    with ServiceProcess(SAMPLE, {"drain_grace_s": 0.5}) as service:
        async with channel(service.address) as client:
            assert await call(client, "UnaryUnary", b"ok") == [b"ok"]
            make: Any = client.unary_stream(f"/{FULL_NAME}/UnaryStream")
            stream = make(b"wait", timeout=2 * PATIENCE_S)
            assert await stream.read() == b"first"
            service.signal(signal.SIGTERM)
            await wait_until(lambda: service.process.poll() is not None, what="the process ended")
            assert service.wait() == 0


def test_a_supervised_process_ends_with_its_supervisor() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", SAMPLE, "--supervised", "true"],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as service:
        assert service.stdout is not None
        assert service.stdin is not None
        assert json.loads(service.stdout.readline())["pid"] == service.pid
        service.stdin.close()
        try:
            assert service.wait(PATIENCE_S) == 0
        finally:
            service.kill()


def test_the_support_notices_a_service_that_does_not_start() -> None:
    with pytest.raises(AssertionError, match=r"no address from .* \(status 2\)"):
        ServiceProcess(PROVISIONER, {"listen": "nowhere"})
    assert os.environ is not environment()
