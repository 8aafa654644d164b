# SPDX-License-Identifier: Apache-2.0
"""Why a stream ended on which messages were being written.

Where a write meets the end of its call, gRPC reports INTERNAL with an error of its own, whatever the broker said: its
status was there before and is overwritten, or comes a moment later, or never, where the connection broke.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from ifabric_client.errors import CallError, of_call

if TYPE_CHECKING:
    from collections.abc import Coroutine

_WRITE_MET_THE_END = "Internal error from Core"
_ASKED, _ASK_AGAIN_S = 20, 0.05


class Ending:
    """The end of one call.

    Args:
        call: A call on which messages are written, as soon as it is made.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    async def error(self, raised: grpc.aio.AioRpcError) -> CallError:
        """Returns what the broker ended the call with; UNAVAILABLE where it says nothing within 1 s.

        Args:
            raised: What the call raised.
        """
        for _ in range(_ASKED):
            if not _is_hidden(raised):
                return of_call(raised)
            if self._first is not None and not _is_hidden(self._first):
                return of_call(self._first)
            await asyncio.sleep(_ASK_AGAIN_S)
            call = self._call
            raised = grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        return CallError("UNAVAILABLE", "the connection to the broker broke while a message was being sent")

    def _keep(self, call: Any) -> None:
        """Called once, with the first status, which a write that fails may overwrite."""
        code = _at_once(call.code())
        if code is not grpc.StatusCode.OK:
            self._first = grpc.aio.AioRpcError(
                code,
                _at_once(call.initial_metadata()),
                _at_once(call.trailing_metadata()),
                _at_once(call.details()),
            )


def _is_hidden(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITE_MET_THE_END


def _at_once(asked: Coroutine[Any, Any, Any]) -> Any:
    """What a call that has ended says of its end; it holds that already, so that nothing is waited for."""
    try:
        asked.send(None)
    except StopIteration as stopped:
        return stopped.value
    asked.close()
    raise RuntimeError("a call that has ended let its status be waited for")
