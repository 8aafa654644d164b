# SPDX-License-Identifier: Apache-2.0
"""Which calls a drain waits for: those of services, and none of gRPC's own.

A watch of health or a stream of reflection may last for ever, also where its handler has ended: what it was told last
waits in the connection for a client that does not take it, and gRPC counts it as a call until its server gives it up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc

_GRPCS_OWN = "grpc."
"""How the full names of services begin that come with gRPC: health, reflection."""


class Underway:
    """Counts calls of services until the last byte of each is on its way."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """A call of `package.Service/Method` has come in."""
        if not method.startswith(_GRPCS_OWN):
            self._count += 1
            self._none.clear()
            context.add_done_callback(self._ended)  # type: ignore[arg-type]  # the stubs want a class of theirs

    async def ended(self) -> None:
        """Returns once none is under way."""
        await self._none.wait()

    def _ended(self, _context: Any) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()
