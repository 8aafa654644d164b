# SPDX-License-Identifier: Apache-2.0
"""What a server ended a stream with, for clients that write meanwhile.

Where a message that is being written meets the end of its call, gRPC reports an error of its own in place of the
server's: either it takes the place of the server's status, which was there already, or the server's comes after it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Coroutine

_WRITE_MET_THE_END = "Internal error from Core"
_ASKED, _ASK_AGAIN_S = 20, 0.05


class Ending:
    """The end of one call.

        ending = Ending(call)
        try:
            await call.write(message)
        except grpc.aio.AioRpcError as error:
            raise call_error(await ending.of(error)) from error

    Args:
        call: A call on which messages are written, as soon as it is made.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._heard: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._hear)

    async def of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The error that the server ended the call with; `error` itself where it is that, or none comes within 1 s.

        Args:
            error: What the call raised.
        """
        for _ in range(_ASKED):
            if not hidden(error):
                return error
            if self._heard is not None and not hidden(self._heard):
                return self._heard
            await asyncio.sleep(_ASK_AGAIN_S)
            error = await self._now()
        return error

    def _hear(self, call: Any) -> None:
        """Called once, with the first status; the call holds what is asked for, so that nothing is waited for."""
        code = _at_once(call.code())
        if code is not grpc.StatusCode.OK:
            self._heard = grpc.aio.AioRpcError(
                code,
                _at_once(call.initial_metadata()),
                _at_once(call.trailing_metadata()),
                _at_once(call.details()),
            )

    async def _now(self) -> grpc.aio.AioRpcError:
        call = self._call
        return grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )


def hidden(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC says no more than that a write met the end of its call."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITE_MET_THE_END


def _at_once(asked: Coroutine[Any, Any, Any]) -> Any:
    try:
        asked.send(None)
    except StopIteration as stopped:
        return stopped.value
    asked.close()
    raise AssertionError("a call that has ended let its status be waited for")
