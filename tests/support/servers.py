# SPDX-License-Identifier: Apache-2.0
"""Our own server around a servicer, on a free loopback port, inside the test's event loop."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from services.common.errors import UnimplementedError
from services.common.rpc import Server
from services.common.settings import ServiceSettings
from services.common.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc


class LoopbackSettings(ServiceSettings, env_prefix="IFAB_LOOPBACK_"):
    """Settings of servers that only tests run."""


class Unserved:
    """A servicer of which only what a test calls is there."""

    def __getattr__(self, name: str) -> Any:
        async def unserved(request: Any, context: Any) -> Any:
            raise UnimplementedError(name)

        return unserved


@asynccontextmanager
async def serving(
    register: Callable[[Any, grpc.aio.Server], None],
    servicer: Any,
    full_name: str,
    *,
    settings: ServiceSettings | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Server]:
    """Runs a ready `Server` with one servicer; `server.address` says where. Calls that are left get a second to end."""
    used = telemetry or Telemetry("loopback")
    server = Server(settings or LoopbackSettings(drain_grace_s=1.0), used)
    server.add(register, servicer, full_name)
    await server.start()
    await server.ready()
    try:
        yield server
    finally:
        await server.close()
        if telemetry is None:
            used.close()
