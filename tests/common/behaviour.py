# SPDX-License-Identifier: Apache-2.0
"""A service of bytes with one method of each kind; what it does with a request is the test's choice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from services.common.errors import InvalidArgumentError, ResourceExhaustedError, Violation
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

FULL_NAME = "ifabric.test.v1.BehaviourService"
KINDS = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")


class Behaviour:
    """Answers as the request says: `ok`, `typed`, `many`, `crash`, `abort`, `wait` (until cancelled) or `big`.

    UnaryStream knows `flood`, too, which never stops.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.waiting = asyncio.Event()
        """Set while a call waits."""
        self.release = asyncio.Event()
        """Lets waiting calls go on."""
        self.cleaned = 0
        """Calls that were cut short and cleaned up after themselves."""
        self.cleaned_by_itself: bool | None = None
        """Whether the last UnaryStream cleaned up in the task of its call; None before."""
        self.metadata: dict[str, str | bytes] = {}

    async def act(self, wish: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        self.calls += 1
        self.metadata = dict(context.invocation_metadata() or ())
        match wish:
            case b"typed":
                raise InvalidArgumentError.of([Violation("a.b", "is 3, at most 2"), Violation("c", "is absent")])
            case b"many":
                raise InvalidArgumentError.of([Violation(f"field[{i}]", "x" * 50) for i in range(2_000)])
            case b"exhausted":
                raise ResourceExhaustedError("full", retry_after_s=1.5, metadata={"limit": "7"})
            case b"crash":
                raise KeyError("secret-path")
            case b"abort":
                await context.abort(grpc.StatusCode.NOT_FOUND, "gone")
            case b"wait":
                self.waiting.set()
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cleaned += 1
                    raise
            case b"big":
                return b"x" * (200 * 1024)
        return wish

    async def unary_unary(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return await self.act(request, context)

    async def unary_stream(
        self,
        request: bytes,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[bytes]:
        begun_by = asyncio.current_task()
        try:
            yield b"first"
            while request == b"flood":
                yield b"x" * 1024
            yield await self.act(request, context)
        finally:
            self.cleaned_by_itself = asyncio.current_task() is begun_by

    async def stream_unary(
        self,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> bytes:
        return b"".join([await self.act(request, context) async for request in requests])

    async def stream_stream(
        self,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self.act(request, context)


def register(behaviour: Behaviour, server: grpc.aio.Server) -> None:
    """What the generated code does for a real service."""
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                FULL_NAME,
                {
                    "UnaryUnary": grpc.unary_unary_rpc_method_handler(behaviour.unary_unary),
                    "UnaryStream": grpc.unary_stream_rpc_method_handler(behaviour.unary_stream),
                    "StreamUnary": grpc.stream_unary_rpc_method_handler(behaviour.stream_unary),
                    "StreamStream": grpc.stream_stream_rpc_method_handler(behaviour.stream_stream),
                },
            ),
        )
    )


async def call(channel: Any, kind: str, wish: bytes, *, timeout: float = PATIENCE_S, **more: Any) -> list[bytes]:
    """Calls one method with one request and returns all responses."""
    path = f"/{FULL_NAME}/{kind}"

    async def requests() -> AsyncIterator[bytes]:
        yield wish

    make: dict[str, Callable[[], Any]] = {
        "UnaryUnary": lambda: channel.unary_unary(path)(wish, timeout=timeout, **more),
        "UnaryStream": lambda: channel.unary_stream(path)(wish, timeout=timeout, **more),
        "StreamUnary": lambda: channel.stream_unary(path)(requests(), timeout=timeout, **more),
        "StreamStream": lambda: channel.stream_stream(path)(requests(), timeout=timeout, **more),
    }
    made = make[kind]()
    try:
        return [response async for response in made] if kind.endswith("Stream") else [await made]
    finally:
        made.cancel()
