# SPDX-License-Identifier: Apache-2.0
"""Life of a service process, from its flags to its exit status.

    # services/worker/__main__.py
    raise SystemExit(process.run(WorkerSettings, serve))

    # services/worker/main.py
    async def serve(settings: WorkerSettings, process: Process) -> None:
        server = Server(settings, process.telemetry)
        ...
        process.announce(await server.start())
        await server.ready()
        await server.serve(process.stop)

Exit status: 0 after an orderly end, 1 after a fault, 2 where the process could not start (one sentence on stderr says
why), 130 or 143 where a second signal cut the end short.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from services.common import logs
from services.common.errors import StartError
from services.common.protocol import suite_version
from services.common.security import Credentials, Files, check_exposure
from services.common.settings import ServiceSettings, load, usage
from services.common.tasks import Tasks
from services.common.telemetry import Telemetry, names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

S = TypeVar("S", bound=ServiceSettings)

_log = logs.get("common.process")


class Stop:
    """The wish that the process ends."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.failed = False
        """Whether a fault is the cause; the exit status is then 1."""

    @property
    def requested(self) -> bool:
        """Whether somebody asked."""
        return self._event.is_set()

    def request(self, why: str) -> None:
        """Asks for an orderly end. Asking again changes nothing."""
        asked = self.requested
        self._event.set()
        if not asked:
            _log.info("stop.requested", why=why)

    def fail(self, why: str) -> None:
        """Asks for an orderly end because of a fault."""
        self.failed = True
        self._event.set()
        _log.error("stop.requested", why=why)

    async def wait(self) -> None:
        """Returns once somebody asked."""
        await self._event.wait()


class Process:
    """What a service's main gets beside its settings."""

    def __init__(
        self, service: str, telemetry: Telemetry, metrics: str, credentials: Credentials | None = None
    ) -> None:
        self.service = service
        self.telemetry = telemetry
        self.credentials = credentials
        """The process's certificate, where it has one."""
        self.stop = Stop()
        """Set by SIGTERM, SIGINT, or a background task that failed."""
        self.tasks = Tasks(self.stop.fail)
        """Background tasks of the process; cancelled after main has returned."""
        self._metrics = metrics

    def announce(self, address: str, *, health: str = "") -> None:
        """Prints the one JSON line on stdout that says where the service listens; called once, when it does.

        Args:
            address: Where its gRPC server does.
            health: Where health alone is served, empty where it is not.
        """
        line = {"service": self.service, "address": address, "metrics": self._metrics, "pid": os.getpid()}
        if health:
            line["health"] = health
        sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
        sys.stdout.buffer.flush()


def run(
    settings: type[S],
    main: Callable[[S, Process], Awaitable[None]],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a service to its end and returns the exit status.

    Args:
        settings: The model of its settings.
        main: Serves until `process.stop` is asked for.
        argv: Flags; the command line's if absent.
    """
    flags = sys.argv[1:] if argv is None else argv
    if "--help" in flags or "-h" in flags:
        sys.stdout.write(usage(settings))
        return 0
    # Journals and payloads hold what tenants sent: what a service writes, only its own user reads.
    os.umask(0o077)
    try:
        return asyncio.run(_live(load(settings, flags), main))
    except StartError as error:
        sys.stderr.write(f"{settings.service()}: {error}\n")
        return 2


async def _live(settings: S, main: Callable[[S, Process], Awaitable[None]]) -> int:
    service = settings.service()
    logs.configure(service, level=settings.log_level)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_loop_fault)
    credentials = _credentials(settings)
    telemetry = Telemetry(service, otlp_endpoint=settings.otlp_endpoint, trace_ratio=settings.trace_ratio)
    try:
        process = Process(service, telemetry, _serve_metrics(settings, telemetry, credentials), credentials)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _signalled, process.stop, number)
        if settings.supervised:
            _follow_stdin(loop, process.stop, limit_s=settings.drain_propagation_s + 3 * settings.drain_grace_s)
        _log.info("process.started", version=suite_version(), pid=os.getpid(), settings=settings.effective())
        try:
            await main(settings, process)
        except StartError:
            raise
        except Exception:
            _log.exception("process.failed")
            return 1
        finally:
            await process.tasks.close()
        _log.info("process.ended")
        return 1 if process.stop.failed else 0
    finally:
        telemetry.close()


def _credentials(settings: ServiceSettings) -> Credentials | None:
    """The process's certificate, where the settings name one.

    Raises:
        StartError: it cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
        return None
    return Credentials(Files(settings.tls_cert, settings.tls_key, settings.tls_ca))


def _serve_metrics(settings: ServiceSettings, telemetry: Telemetry, credentials: Credentials | None) -> str:
    """Starts the Prometheus endpoint and returns where it listens.

    Raises:
        StartError: the address is taken, or it is reached by other machines and nothing protects it.
    """
    if credentials is not None:
        telemetry.observe(names.CERTIFICATE_REMAINING, lambda: ((credentials.current().expires_at - time.time(), {}),))
        telemetry.observe(
            names.CERTIFICATE_RELOADS,
            lambda: ((credentials.reloads, {"outcome": "taken"}), (credentials.failures, {"outcome": "refused"})),
        )
    listen, allowed = settings.metrics_listen, settings.allow_cleartext
    protecting = None if "metrics" in allowed else credentials
    check_exposure("metrics", listen, protected=protecting is not None, allowed=allowed, setting="metrics_listen")
    return telemetry.serve_metrics(listen, credentials=protecting)


def _signalled(stop: Stop, number: int) -> None:
    if stop.requested:
        os._exit(128 + number)
    stop.request(signal.Signals(number).name)


def _follow_stdin(loop: asyncio.AbstractEventLoop, stop: Stop, *, limit_s: float) -> None:
    """Asks for an orderly end once stdin closes, and makes an end of any kind `limit_s` later.

    A thread does it, not the loop: a process whose loop is stuck must not outlive its supervisor either.
    """

    def follow() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.request, "the supervisor is gone")
        time.sleep(limit_s)
        os._exit(1)

    threading.Thread(target=follow, name="supervisor", daemon=True).start()


def _loop_fault(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error that no task is left to raise: logged, since nobody else can hear of it."""
    _log.error("loop.fault", message=str(context.get("message")), exc_info=context.get("exception"))
