# SPDX-License-Identifier: Apache-2.0
"""Small servers that speak other protocols, on loopback, for clients that must speak them too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from engines.targets.kserve_messages import SERVICE, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(slots=True)
class OpenAiServer:
    """`POST /v1/completions`, streamed in chunks; refuses with 503 what is over `room`."""

    room: int = 10_000
    token_s: float = 0.0005
    drops: bool = False
    """Ends connections in the middle of an answer."""
    counts: bool = True
    """Tells the tokens that it generated in a last event."""
    url: str = ""
    asked: int = 0
    in_flight: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open: set[asyncio.Task[None]] = field(default_factory=set)
    """Connections that are served."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            self.open.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length:")
        )
        body = json.loads(await reader.readexactly(length))
        self.asked += 1
        self.bodies.append(body)
        if not head.startswith("POST /v1/completions "):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
        elif self.in_flight >= self.room:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull")
        else:
            self.in_flight += 1
            try:
                await self._stream(writer, body["max_tokens"])
            finally:
                self.in_flight -= 1
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(tokens):
            await asyncio.sleep(self.token_s)
            self._event(writer, {"choices": [{"text": f" w{number}"}]})
            await writer.drain()
            if self.drops and number == 1:
                return
        if self.counts:
            self._event(writer, {"choices": [], "usage": {"completion_tokens": tokens}})
        data = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

    @staticmethod
    def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(document).encode() + b"\n\n"
        # In two chunks, cut inside a line, as networks do.
        for part in (data[:9], data[9:]):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))


@asynccontextmanager
async def openai_server(**options: Any) -> AsyncIterator[OpenAiServer]:
    """Runs one on a free port."""
    served = OpenAiServer(**options)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with server:
            yield served
    finally:
        left = list(served.open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@dataclass(slots=True)
class KServeServer:
    """One text model, `text_input` in and `text_output` out, streamed or whole."""

    address: str = ""
    requests: list[Any] = field(default_factory=list)

    async def stream(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """ModelStreamInfer."""
        async for request in requests:
            prompt, tokens = self._read(request)
            if prompt == "fail":
                yield ModelStreamInferResponse(error_message="the model fell over")
                return
            for number in range(tokens):
                yield ModelStreamInferResponse(infer_response=self._text(f" w{number}"))

    async def whole(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """ModelInfer."""
        prompt, tokens = self._read(request)
        if prompt == "fail":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model fell over")
        return self._text(" w" * tokens)

    def _read(self, request: Any) -> tuple[str, int]:
        self.requests.append(request)
        contents = {
            tensor.name: content for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        (length,) = struct.unpack_from("<I", contents["text_input"])
        text = contents["text_input"][4:].decode()
        assert length == len(text.encode())
        return text, struct.unpack("<i", contents["max_tokens"])[0]

    @staticmethod
    def _text(text: str) -> Any:
        response = ModelInferResponse()
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(struct.pack("<I", len(text)) + text.encode())
        return response


@asynccontextmanager
async def kserve_server() -> AsyncIterator[KServeServer]:
    """Runs one on a free port."""
    served = KServeServer()
    server = grpc.aio.server()
    handlers = {
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
            served.stream, ModelInferRequest.FromString, ModelStreamInferResponse.SerializeToString
        ),
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            served.whole, ModelInferRequest.FromString, ModelInferResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    served.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield served
    finally:
        await server.stop(0)
