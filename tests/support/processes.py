# SPDX-License-Identifier: Apache-2.0
"""Real service processes for tests: started on free ports, found by the line that they print, never left behind."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Turns settings into command-line flags; values that are not text are written as JSON."""
    return [
        part
        for key, value in settings.items()
        for part in ("--" + key.replace("_", "-"), value if isinstance(value, str) else _plain(value))
    ]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a service process: ours, without the settings of whoever runs the tests."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("IFAB_BROKER_", "IFAB_WORKER_", "IFAB_PROVISIONER_"))
    }
    return kept | dict(extra or {})


class ServiceProcess:
    """One process of the suite.

        with ServiceProcess("services.provisioner", {"listen": "127.0.0.1:0"}) as provisioner:
            address = provisioner.address

    Leaving the block ends the process, by SIGKILL if need be. What it wrote is shown when the block fails. With
    `profile` it runs under cProfile, which writes that file when the process is stopped in order.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        start_within_s: float = PATIENCE_S,
        profile: Path | None = None,
    ) -> None:
        self._errors: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [
                sys.executable,
                *(["-m", "cProfile", "-o", str(profile)] if profile is not None else []),
                *("-m", module, *flags(settings or {})),
            ],
            cwd=ROOT,
            env=environment(env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        try:
            self.line = self._announcement(start_within_s)
        except BaseException:
            self.kill()
            raise
        self.address = str(self.line["address"])
        self.metrics = str(self.line["metrics"])
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.kill()
        if kind is not None:
            sys.stderr.write("".join(self._errors))

    def logs(self, event: str | None = None) -> list[dict[str, Any]]:
        """Returns the log lines so far, as objects; only those of one event if named."""
        lines = [json.loads(line) for line in list(self._errors) if line.startswith("{")]
        return [line for line in lines if event is None or line.get("event") == event]

    def stderr(self) -> str:
        """Returns what it wrote to stderr so far."""
        return "".join(self._errors)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Waits for the end and returns the exit status (negative: the signal that ended it)."""
        status = self.process.wait(within_s)
        self._read_to_the_end(within_s)
        return status

    def stop(self, within_s: float = PATIENCE_S) -> int:
        """Asks for an orderly end and returns the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(within_s)

    def kill(self) -> None:
        """Ends it at once and frees what belongs to it."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _announcement(self, within_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                return dict(json.loads(self._lines.get(timeout=min(left, 0.1))))
            except queue.Empty:
                if self.process.poll() is None:
                    continue
                self._read_to_the_end(left)  # it may have spoken before it ended
                if self._lines.empty():
                    break
        raise AssertionError(f"no address from {self.process.args!r} (status {self.process.poll()}):\n{self.stderr()}")

    def _read_to_the_end(self, within_s: float) -> None:
        for reader in self._readers:
            reader.join(within_s)

    def _read_out(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)

    def _read_err(self) -> None:
        for line in self.process.stderr or ():
            self._errors.append(line)


def run_to_end(
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    within_s: float = 2 * PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Runs a module that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment(env),
        text=True,
        capture_output=True,
        timeout=within_s,
        check=False,
    )


def _plain(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, Path) else str(value)
