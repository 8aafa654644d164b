# SPDX-License-Identifier: Apache-2.0
"""Puts the worker together: start, work, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from typing import TYPE_CHECKING

from ifabric.worker.v1 import worker_service_pb2_grpc
from services.common import logs, reasons
from services.common.contract import Contract
from services.common.errors import FailedPreconditionError, NotFoundError, StartError, UnavailableError
from services.common.rpc import Dialer, Server
from services.common.security.needs import PROVISIONER
from services.common.settings import join_address, split_address
from services.worker.credit import CreditBook
from services.worker.description import (
    DirectoryReader,
    capacity,
    node_description,
    report_message,
    stats_message,
)
from services.worker.engine_host import EngineHost, engine_failure
from services.worker.health import Health, Progress
from services.worker.metrics import EngineMetrics
from services.worker.native import check_machine, forward_logs, library_version
from services.worker.registration import Registration
from services.worker.servicer import WorkerServicer

if TYPE_CHECKING:
    from ifabric.engine.v1 import node_pb2
    from services.common.process import Process
    from services.worker.native import Stats
    from services.worker.settings import WorkerSettings

FULL_NAME = "ifabric.worker.v1.WorkerService"
PULSE_S = 0.25
"""How often the engine's counters are read, for health, metrics, credit and brokers."""
SIGN_OF_LIFE_S = 1.0
"""How often brokers hear the counters though nothing has moved: a worker that says nothing counts as lost."""

_GRACE_SHARE = 0.8
"""Share of the drain's grace in which work may end; the rest is for handing back what did not."""
_MESSAGE_SLACK_BYTES = 64 * 1024
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 -- names the addresses, binds nothing
_log = logs.get("worker")
_native_log = logs.get("worker.native")


async def serve(settings: WorkerSettings, process: Process) -> None:
    """Serves until `process.stop` is asked for.

    Raises:
        StartError: the native library or the engine directory is not there, the machine lacks what the engine runs on
            (a card, its driver, its runtime), or the address is taken.
    """
    if not settings.engine_dir.is_dir():
        raise StartError(f"engine_dir {settings.engine_dir} is not a directory: name one that `ifab engine build` made")
    try:
        version = library_version()
        # A directory without a contract is for the provisioner to refuse: it can be mended under a running worker.
        with contextlib.suppress(NotFoundError):
            await asyncio.to_thread(check_machine, settings.engine_dir)
    except (FailedPreconditionError, UnavailableError) as error:
        raise StartError(error.message) from error
    loop = asyncio.get_running_loop()
    forward_logs(
        lambda *line: loop.call_soon_threadsafe(_log_native, *line),
        logging.getLevelNamesMapping()[settings.log_level.upper()],
    )
    try:
        await Worker(settings, process).serve(version)
    finally:
        forward_logs(None)


class Worker:
    """One worker process, from its first registration to its end."""

    def __init__(self, settings: WorkerSettings, process: Process) -> None:
        self._settings = settings
        self._stop = process.stop
        self._process = process
        self._server = Server(settings, process.telemetry, credentials=process.credentials)
        self._health = Health(self._server)
        self._metrics = EngineMetrics(process.telemetry)
        self._host = EngineHost(self._engine_failed)
        self._servicer = WorkerServicer(settings.engine_dir, self._host, self._metrics, process.telemetry.tracer)
        self._reader = DirectoryReader(settings.engine_dir)
        self._incarnation = secrets.token_hex(16)
        dialer = Dialer(process.credentials, message_bytes_max=settings.message_bytes_max)
        self._provisioner = dialer.channel(settings.provisioner, role=PROVISIONER)
        self._registration = Registration(self._provisioner, self, self._stop.fail)

    async def serve(self, library: str) -> None:
        """Serves until the process shall end, then drains."""
        server = self._server
        server.add(worker_service_pb2_grpc.add_WorkerServiceServicer_to_server, self._servicer, FULL_NAME)
        server.on_close("engine", self._host.close)
        server.on_close("provisioner", self._provisioner.close)
        self._process.announce(await server.start(), health=server.health_address)
        _log.info("library.loaded", version=library)
        living = self._process.tasks.start(self._registration.run(), name="registration")
        server.on_drain("hand back", lambda: self._drain(living))
        await server.serve(self._stop)

    async def describe(self) -> node_pb2.NodeDescription:
        """Reads the engine directory anew."""
        reading = await asyncio.to_thread(self._reader.read)
        node = node_description(
            reading,
            node_id=self._settings.node_name,
            incarnation=self._incarnation,
            address=self._settings.advertise or _reachable(self._server.address),
        )
        self._servicer.describe_as(node)
        return node

    async def load(self, node: node_pb2.NodeDescription) -> node_pb2.EngineReport:
        """Loads the engine and opens for work."""
        agreed = Contract.from_proto(node.contract)
        self._check_message_size(agreed)
        description = await self._host.load(self._settings.engine_dir)
        report = report_message(description)
        if report.engine_digest != node.engine_digest:
            await self._host.close()
            raise FailedPreconditionError(
                "the engine directory changed between registration and load", reason=reasons.ENGINE_DIFFERS
            )
        book = CreditBook(capacity(agreed, description))
        _log.info("engine.loaded", engine_id=agreed.engine_id, engine_digest=node.engine_digest, load_ms=report.load_ms)
        self._metrics.loaded(agreed.engine_id, description)
        self._servicer.open(book)
        await self._health.name_engine(agreed.engine_id)
        await self._health.set("load", None)
        self._process.tasks.start(self._pulse(Progress(agreed.limits.longest_step_ms)), name="pulse")
        return report

    def _check_message_size(self, agreed: Contract) -> None:
        """One payload has to fit into one message, or no request of the engine could ever be answered."""
        form, most = agreed.capabilities.payload, self._settings.message_bytes_max - _MESSAGE_SLACK_BYTES
        if form is not None and form.size_bytes > most:
            raise FailedPreconditionError(
                f"a payload of {form.size_bytes} bytes does not fit into a message: raise message_bytes_max, "
                f"which allows {most}"
            )

    async def accepted(self, against: str | None) -> None:
        """Takes in whether the provisioner accepts the loaded engine."""
        await self._health.set("registration", against)

    def stats(self) -> node_pb2.EngineStats | None:
        """The engine's counters, None before it is loaded."""
        return stats_message(self._host.stats()) if self._host.loaded else None

    async def _pulse(self, progress: Progress) -> None:
        """Reads the engine's counters, again and again, and tells whom they concern."""
        shown: Stats | None = None
        shown_at = 0.0
        while self._host.loaded:
            stats = self._host.stats()
            against = progress.observe(
                stats, poll_age_s=self._host.poll_age_s, now_s=time.monotonic(), period_s=PULSE_S
            )
            self._metrics.standing(against is not None)
            await self._health.set("progress", against)
            self._metrics.update(stats)
            if shown is None or _moved(shown, stats) or time.monotonic() - shown_at >= SIGN_OF_LIFE_S:
                self._servicer.refresh(stats)
                shown, shown_at = stats, time.monotonic()
            if stats.engine_failed:
                self._host.fail("the library reports that the engine cannot go on")
            await asyncio.sleep(PULSE_S)

    def _engine_failed(self, why: str) -> None:
        """An engine that cannot go on ends the process: whoever started it starts it again."""
        self._servicer.refuse_new(engine_failure(why))
        self._stop.fail(f"the engine failed: {why}")

    async def _drain(self, living: asyncio.Task[None]) -> None:
        within_s = self._settings.drain_grace_s * _GRACE_SHARE
        await asyncio.gather(self._registration.leave(), self._servicer.drain(within_s))
        living.cancel()
        await asyncio.wait({living})
        await self._registration.withdraw()


def _moved(before: Stats, now: Stats) -> bool:
    """Whether anything that brokers look at differs."""
    return (before.progress_tick, before.queued, before.active) != (now.progress_tick, now.queued, now.active)


def _reachable(address: str) -> str:
    """Returns an address for others: one that listens everywhere is reached by the machine's name."""
    host, port = split_address(address)
    return join_address(socket.gethostname(), port) if host in _EVERYWHERE else address


def _log_native(level: int, component: str, message: str) -> None:
    _native_log.log(level, "library.said", component=component, message=message)
