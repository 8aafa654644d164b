# SPDX-License-Identifier: Apache-2.0
"""The suite as processes of this machine: started together, watched, stopped together.

Every service is a process in a session of its own, so that a terminal's Ctrl-C reaches this one only, which then ends
the services in order: broker, workers, provisioner, each by SIGTERM and, when its grace is over, by SIGKILL. Each holds
the read end of a pipe as its stdin: where this process dies without a word, the pipe closes and the services end by
themselves (`supervised` in their settings).
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from services.cli.contracts import check_readable
from services.cli.running import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import TextIO

_FREE = "127.0.0.1:0"
_KILL_SLACK_S = 5.0
"""Time beyond its grace that a service gets for closing before it is killed."""
_ROOM_BYTES = 8 << 20
"""Disk below which no suite is started: a service that cannot write its log ends without a word."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start."""

    engines: tuple[Path, ...]
    """Engine directory of each worker."""
    logs: Path
    """Folder of the log files, one a process."""
    broker: str = _FREE
    """Where the broker listens, `host:port`; port 0 takes a free one."""
    provisioner: str = _FREE
    workers: tuple[str, ...] = ()
    """Where each worker listens; free ports where empty."""
    journal: Path | None = None
    """Where the broker keeps jobs; `jobs.sqlite` beside the logs where absent."""
    grace_s: float = 10.0
    """Time that each service gets to finish what it has, in seconds."""
    start_limit_s: float = 120.0
    """Time within which all services must listen, in seconds."""


@dataclass(slots=True)
class Service:
    """One running process."""

    kind: str
    """`provisioner`, `worker` or `broker`."""
    name: str
    """The node's name for a worker, the kind for the others."""
    process: asyncio.subprocess.Process = field(repr=False)
    log: Path
    address: str = ""
    metrics: str = ""


class Suite:
    """Provisioner, workers and broker: `async with Suite(plan) as suite: …`.

    Raises (on entering):
        CommandError: A service did not start; the sentence is the service's own, and nothing is left running.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started: list[Service] = []
        self._held: TextIO | None = None

    @property
    def services(self) -> tuple[Service, ...]:
        """All processes, in the order in which they were started."""
        return tuple(self._started)

    @property
    def provisioner(self) -> Service:
        """The provisioner."""
        return self._of("provisioner")[0]

    @property
    def broker(self) -> Service:
        """The broker."""
        return self._of("broker")[0]

    @property
    def workers(self) -> tuple[Service, ...]:
        """The workers, in the order of the plan's engines."""
        return self._of("worker")

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._plan.start_limit_s):
                await self._start()
        except TimeoutError:
            await self.stop()
            names = ", ".join(service.name for service in self._started) or "nothing"
            raise CommandError(
                f"not all services listened within {self._plan.start_limit_s:g} s ({names} did); see {self._plan.logs}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def watch(self) -> None:
        """Waits until a process ends by itself.

        Raises:
            CommandError: One did; the sentence names it.
        """
        waits = {asyncio.create_task(service.process.wait()): service for service in self._started}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        raise CommandError(self._epitaph(waits[next(iter(done))]))

    async def stop(self) -> None:
        """Ends all processes; when it returns, or is cancelled, none is left."""
        try:
            for kind in ("broker", "worker", "provisioner"):
                await asyncio.gather(*(self._end(service) for service in self._of(kind)))
        finally:
            for service in self._started:
                if service.process.returncode is None:
                    with suppress(ProcessLookupError):
                        service.process.kill()
            if self._held is not None:
                self._held.close()

    def _hold(self) -> None:
        """Keeps others out of the folder: a second suite would begin the logs of this one anew.

        Raises:
            CommandError: A suite that runs has it.
        """
        logs = self._plan.logs
        self._held = (logs / "suite.lock").open("w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"a suite that runs has its logs and jobs in {logs}: use it, stop it, or name another folder with "
                "--logs"
            ) from None

    def _check_room(self) -> None:
        logs = self._plan.logs
        logs.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(logs).free
        if free < _ROOM_BYTES:
            raise CommandError(
                f"{free >> 20} MiB of disk are free under {logs}, and logs and jobs need {_ROOM_BYTES >> 20}: make "
                "room, or name another folder with --logs"
            )

    async def _start(self) -> None:
        plan = self._plan
        self._check_room()
        self._hold()
        for directory in plan.engines:
            check_readable(directory)
        provisioner = await self._spawn("provisioner", "provisioner", plan.provisioner)
        listens = plan.workers or (_FREE,) * len(plan.engines)
        peers = ("--provisioner", provisioner.address)
        for number, (engine, listen) in enumerate(zip(plan.engines, listens, strict=True), start=1):
            node = f"local-{number}"
            await self._spawn("worker", node, listen, *peers, "--engine-dir", str(engine), "--node-id", node)
        journal = plan.journal or plan.logs / "jobs.sqlite"
        kept = ("--journal", str(journal.absolute()), "--cordon-file", str((plan.logs / "cordons.json").absolute()))
        await self._spawn("broker", "broker", plan.broker, *peers, *kept)

    async def _spawn(self, kind: str, name: str, listen: str, *flags: str) -> Service:
        """Starts one service and returns once it listens."""
        log = self._plan.logs / f"{name}.log"
        command = [
            sys.executable, "-m", f"services.{kind}", "--listen", listen, "--supervised", "true",
            "--drain-grace-s", f"{self._plan.grace_s:g}", *flags,
        ]  # fmt: skip
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        service = Service(kind, name, process, log)
        self._started.append(service)
        assert process.stdout is not None  # noqa: S101 -- it is a pipe
        line = await process.stdout.readline()
        if not line:
            await process.wait()
            raise CommandError(self._epitaph(service))
        said = json.loads(line)
        service.address, service.metrics = said["address"], said["metrics"]
        return service

    async def _end(self, service: Service) -> None:
        if service.process.returncode is None:
            with suppress(ProcessLookupError):
                service.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._plan.grace_s + _KILL_SLACK_S):
                    await service.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    service.process.kill()
                await service.process.wait()
        if service.process.stdin is not None:
            service.process.stdin.close()

    def _of(self, kind: str) -> tuple[Service, ...]:
        return tuple(service for service in self._started if service.kind == kind)

    def _epitaph(self, service: Service) -> str:
        """Why a process ended: its own last sentence where it left one."""
        status = service.process.returncode
        said = _last_sentence(service.log)
        if status == 2 and said:
            return said.replace("with --listen", f"with --{service.kind}")  # as our own option is called
        return f"the {service.kind} ended with status {status}; see {service.log}" + (f" ({said})" if said else "")


def _last_sentence(log: Path) -> str:
    """The last line that is not a log record: what a service says when it cannot start."""
    lines: Sequence[str] = log.read_text("utf-8", "replace").splitlines()
    plain = [line for line in lines if line.strip() and not line.startswith("{")]
    return plain[-1].strip() if plain else ""
