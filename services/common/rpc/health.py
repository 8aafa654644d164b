# SPDX-License-Identifier: Apache-2.0
"""gRPC's health service, over states that are set as a whole.

Anybody may ask: health is served to whoever connects, before any credential. So saying a state waits for no watcher:
one that does not take its few bytes waits by itself, and hears the newest state once it does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

    Context = grpc.aio.ServicerContext[Any, Any]

_OFFER_S = 1.0
"""How long watchers have to take the last state."""
_STATES = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}


class HealthServicer(health_pb2_grpc.HealthServicer):
    """See grpc.health.v1. One may be served on several servers of a process."""

    def __init__(self) -> None:
        self._serving: Mapping[str, bool] = {}
        self._changed = asyncio.Event()
        self._ended = False
        self._watches = 0

    def publish(self, serving: Mapping[str, bool]) -> None:
        """Says which names serve; names that are left out are not known."""
        self._serving = serving
        self._wake()

    async def end_watches(self) -> None:
        """Ends every watch once it has told the newest state; returns when all have, or after a second."""
        self._ended = True
        self._wake()
        try:
            async with asyncio.timeout(_OFFER_S):
                while self._watches:
                    await self._changed.wait()
        except TimeoutError:
            pass  # who does not take it has had the offer

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """See grpc.health.v1."""
        serving = self._serving.get(request.service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such health name")
        return health_pb2.HealthCheckResponse(status=_STATES[bool(serving)])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """See grpc.health.v1."""
        self._watches += 1
        try:
            await self._tell(request, context)
        finally:
            self._watches -= 1
            if self._ended and not self._watches:
                self._wake()

    async def _tell(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        told: int | None = None
        while True:
            changed, serving = self._changed, self._serving.get(request.service)
            state = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN if serving is None else _STATES[serving]
            if state != told:
                await context.write(health_pb2.HealthCheckResponse(status=state))
                told = state
            elif self._ended:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
