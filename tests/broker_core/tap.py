# SPDX-License-Identifier: Apache-2.0
"""A gRPC relay between brokers and a real worker that can bend, or cut off, what the worker says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Bend = Callable[[bytes], bytes]

_EXECUTE = "/ifabric.worker.v1.WorkerService/Execute"
_LONG = [("grpc.max_receive_message_length", 16 << 20)]


class Tap(grpc.GenericRpcHandler):
    """Relays every call as bytes; messages of Execute streams from the worker go through `bend`.

    Used as `async with Tap() as tap`: `tap.address` is what the worker advertises, `tap.relay_to` where it listens.
    """

    def __init__(self) -> None:
        self.bend: Bend = bytes
        self._open = asyncio.Event()
        self._open.set()
        self.address = ""
        self._target: asyncio.Future[grpc.aio.Channel] = asyncio.get_running_loop().create_future()
        self._server = grpc.aio.server(options=_LONG)

    async def __aenter__(self) -> Self:
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        if self._target.done():
            await self._target.result().close()

    def relay_to(self, address: str) -> None:
        """Says where the worker listens; calls that came before wait for it."""
        self._target.set_result(grpc.aio.insecure_channel(address, options=_LONG))

    def mute(self) -> None:
        """Lets nothing through from the worker any more, with every connection left open."""
        self._open.clear()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """See grpc.GenericRpcHandler; on the wire every call is a pair of streams."""
        method = handler_call_details.method

        async def relay(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            relayed: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = (await self._target).stream_stream(method)
            call = relayed(requests)
            try:
                async for message in call:
                    await self._open.wait()
                    yield self.bend(message) if method == _EXECUTE else message
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(relay)
