# SPDX-License-Identifier: Apache-2.0
"""The whole suite for end-to-end tests, started as a person does: `ifab up`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.processes import ROOT, environment
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

ENGINE = ROOT / "build" / "engines" / "smollm2-135m"
IFAB = (sys.executable, "-c", "from services.cli.main import main; main()")
STOP_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningSuite:
    """A suite that `ifab up` holds."""

    process: subprocess.Popen[str]
    said: dict[str, Any]
    """The line that `ifab up --json` printed."""

    @property
    def broker(self) -> str:
        """Address of the broker."""
        return str(self.said["broker"]["address"])

    @property
    def provisioner(self) -> str:
        """Address of the provisioner."""
        return str(self.said["provisioner"]["address"])

    @property
    def workers(self) -> list[str]:
        """Addresses of the workers."""
        return [str(worker["address"]) for worker in self.said["workers"]]

    @property
    def pids(self) -> list[int]:
        """Processes of all services."""
        return [int(each["pid"]) for each in (self.said["broker"], self.said["provisioner"], *self.said["workers"])]

    def stop(self) -> int:
        """Ends it as Ctrl-C does and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_WITHIN_S)


@contextmanager
def up(
    logs: Path, engines: Sequence[Path] = (ENGINE,), *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[RunningSuite]:
    """Runs `ifab up` on free ports; whatever is left at the end is killed and fails the test."""
    words = [word for engine in engines for word in ("--engine", str(engine))]
    process = start("up", "--json", "--free-ports", "--logs", str(logs), *words, *flags, env=env)
    pids: list[int] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"`ifab up` ended with status {process.wait()}: {process.stderr and process.stderr.read()}"
        suite = RunningSuite(process, json.loads(line))
        assert "error" not in suite.said, suite.said
        pids = suite.pids
        yield suite
        suite.stop()
        assert alive(pids) == []
    finally:
        end(process, pids)


def start(*words: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Starts `ifab` in a session of its own, so that a test's signals reach nobody else."""
    return subprocess.Popen(
        [*IFAB, *words],
        cwd=ROOT,
        env=environment(env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def run(*words: str, within_s: float = 2 * PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Runs `ifab` to its end."""
    return subprocess.run(
        [*IFAB, *words], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=within_s, check=False
    )


def end(process: subprocess.Popen[str], pids: Iterable[int] = ()) -> None:
    """Kills what is left of a command and of the services that it started."""
    children = {child.pid for child in children_of(process.pid)} | set(pids)
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    for pid in alive(children):
        os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[psutil.Process]:
    """All living descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that are processes still; a zombie is none."""
    return [pid for pid in pids if _runs(pid)]


def all_gone(pids: Iterable[int], *, within_s: float = STOP_WITHIN_S) -> None:
    """Waits until none of `pids` runs."""
    block_until(lambda: not alive(pids), within_s=within_s, what=f"the end of {pids}")


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
