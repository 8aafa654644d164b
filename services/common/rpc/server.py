# SPDX-License-Identifier: Apache-2.0
"""A gRPC server as every service runs it.

Health names: `""` is readiness (NOT_SERVING until `ready()`), `liveness` is true while the process works, each service
has its full name, and services add more (`engine/<id>`) with `set_health`. Draining, in this order: every name but
`liveness` turns NOT_SERVING, the drain hooks run, balancers get `drain_propagation_s` to notice, new calls are refused
UNAVAILABLE while old ones may end, the close hooks run. Drain hooks and old calls share `drain_grace_s`. Watches of
health end with the state that they heard last, and no drain waits for one that does not take it.

    server = Server(settings, telemetry)
    server.add(worker_service_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, "ifabric.worker.v1.WorkerService")
    await server.start()
    await server.ready()
    await server.serve(stop)
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import logs
from services.common.errors import StartError
from services.common.rpc import options
from services.common.rpc.health import HealthServicer
from services.common.rpc.interceptor import RpcInterceptor
from services.common.rpc.tls import server_credentials
from services.common.rpc.underway import Underway
from services.common.security import Access, check_exposure
from services.common.security.exposure import is_loopback
from services.common.settings import join_address, split_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from services.common.process import Stop
    from services.common.security import Credentials, TokenVerifier
    from services.common.settings import ServiceSettings
    from services.common.telemetry import Telemetry

    Hook = Callable[[], Awaitable[None]]

T = TypeVar("T")

LIVENESS = "liveness"
_LEAST_S = 0.1
"""What each step of a drain gets at least, where those before it have used the grace up."""
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_log = logs.get("common.rpc")


class Server:
    """One grpc.aio server with health, reflection, error translation, metrics, and an orderly end."""

    def __init__(
        self,
        settings: ServiceSettings,
        telemetry: Telemetry,
        *,
        credentials: Credentials | None = None,
        tokens: TokenVerifier | None = None,
    ) -> None:
        """Sets a server up; nothing listens before `start`.

        Args:
            settings: Where it listens, and its bounds.
            telemetry: For calls and their outcomes.
            credentials: The service's certificate; the server speaks TLS with it.
            tokens: Verifies the tokens of clients. Without them a server with TLS wants a certificate of each peer.
        """
        self._settings = settings
        self._credentials = credentials
        self._certified = credentials is not None and tokens is None
        self._underway = Underway()
        self._server = grpc.aio.server(
            interceptors=[
                RpcInterceptor(
                    telemetry,
                    Access(
                        tokens,
                        certified=self._certified,
                        exposed=not is_loopback(split_address(settings.listen)[0]),
                    ),
                    self._underway,
                )
            ],
            options=options.server(settings.message_bytes_max, calls=settings.calls_per_connection_max),
        )
        self._health_server: grpc.aio.Server | None = None
        self._health = HealthServicer()
        self._own: list[str] = []
        self._named: dict[str, bool] = {}
        self._drain_hooks: list[tuple[str, Hook]] = []
        self._close_hooks: list[tuple[str, Hook]] = []
        self._ready = False
        self.draining = asyncio.Event()
        """Set when the server begins to drain; streams that outlive calls watch it to refuse new work."""
        self.address = ""
        """Where the server listens, `host:port`; empty before `start`."""
        self.health_address = ""
        """Where health alone is served, `host:port`; empty where it is not."""

    def add(self, register: Callable[[T, grpc.aio.Server], None], servicer: T, full_name: str) -> None:
        """Serves `servicer`.

        Args:
            register: The generated `add_XServicer_to_server`.
            servicer: The implementation.
            full_name: Full name of the service, for health and reflection.
        """
        register(servicer, self._server)
        self._own.append(full_name)

    def on_drain(self, name: str, hook: Hook) -> None:
        """Has `hook` run when draining begins, in order of registration, within what is left of `drain_grace_s`."""
        self._drain_hooks.append((name, hook))

    def on_close(self, name: str, hook: Hook) -> None:
        """Has `hook` run after the last call has ended, in reverse order of registration, each for `drain_grace_s`."""
        self._close_hooks.append((name, hook))

    async def start(self) -> str:
        """Listens, and returns the address. The process is alive but not ready.

        Raises:
            StartError: The address is taken or not ours, or it is reached by other machines and nothing protects it.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._settings.reflection:
            shown = (*self._own, _HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(shown, self._server)
        self._publish()
        listen, allowed = self._settings.listen, self._settings.allow_cleartext
        check_exposure("grpc", listen, protected=self._credentials is not None, allowed=allowed, setting="listen")
        self.address = _bind(self._server, listen, "--listen", self._server_credentials())
        if self._settings.health_listen is not None:
            check_exposure(
                "health", self._settings.health_listen, protected=False, allowed=allowed, setting="health_listen"
            )
            self._health_server = grpc.aio.server(
                options=options.server(options.HEALTH_MESSAGE_BYTES, calls=options.HEALTH_CALLS)
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            self.health_address = _bind(self._health_server, self._settings.health_listen, "--health-listen", None)
            await self._health_server.start()
        await self._server.start()
        return self.address

    def _server_credentials(self) -> grpc.ServerCredentials | None:
        """TLS with whichever certificate is in force when a connection is made; None without one."""
        if self._credentials is None:
            return None
        return server_credentials(self._credentials, certified=self._certified)

    async def ready(self) -> None:
        """Turns `""` and the services' own names to SERVING. Without effect once draining."""
        self._ready = True
        self._publish()

    async def not_ready(self) -> None:
        """Turns `""` and the services' own names to NOT_SERVING."""
        self._ready = False
        self._publish()

    async def set_health(self, name: str, serving: bool) -> None:
        """Sets one further health name, such as `engine/<id>`; NOT_SERVING all the same once draining."""
        self._named[name] = serving
        self._publish()

    async def serve(self, stop: Stop) -> None:
        """Serves until `stop` is asked for, then drains and closes."""
        await stop.wait()
        await self.close()

    async def close(self) -> None:
        """Drains and closes; returns when every call has ended and every hook has run."""
        self.draining.set()
        _log.info("drain.started")
        self._publish()
        grace_s, propagation_s = self._settings.drain_grace_s, self._settings.drain_propagation_s
        ends_at = time.monotonic() + grace_s
        for name, hook in self._drain_hooks:
            await self._run(name, hook, max(ends_at - time.monotonic(), _LEAST_S))
        await asyncio.sleep(propagation_s)
        await self._health.end_watches()
        await self._end_calls(max(ends_at + propagation_s - time.monotonic(), _LEAST_S))
        if self._health_server is not None:
            await self._health_server.stop(_LEAST_S)
        for name, hook in reversed(self._close_hooks):
            await self._run(name, hook, grace_s)
        _log.info("drain.ended")

    async def _end_calls(self, grace_s: float) -> None:
        """Takes no more calls, and returns once those of services have ended, or after the grace."""
        stopping = asyncio.create_task(self._server.stop(grace_s))
        await asyncio.wait({stopping}, timeout=_LEAST_S)  # what came just before is counted by then
        ended = asyncio.create_task(self._underway.ended())
        await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not stopping.done():
            await self._server.stop(_LEAST_S)  # the shorter of both graces holds
        await stopping

    async def _run(self, name: str, hook: Hook, limit_s: float) -> None:
        """Runs one hook; neither its failure nor its slowness keeps the others from running."""
        try:
            async with asyncio.timeout(limit_s):
                await hook()
        except TimeoutError:
            _log.error("drain.hook_timed_out", hook=name, limit_s=round(limit_s, 3))
        except Exception:
            _log.exception("drain.hook_failed", hook=name)

    def _publish(self) -> None:
        open_ = not self.draining.is_set()
        serving = dict.fromkeys(("", *self._own), self._ready and open_)
        self._health.publish({LIVENESS: True, **serving, **{name: on and open_ for name, on in self._named.items()}})


def _bind(server: grpc.aio.Server, listen: str, flag: str, credentials: grpc.ServerCredentials | None) -> str:
    """Takes the address and returns it with the port in force.

    Raises:
        StartError: it is taken or not ours.
    """
    host, wanted = split_address(listen)
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise StartError(
            f"cannot listen on {listen}: the port is in use or the address is not of this machine; "
            f"name another one with {flag}, or port 0 for a free one"
        ) from error
    return join_address(host, port or wanted)
