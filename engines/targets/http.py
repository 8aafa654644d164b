# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 request whose answer is read line by line as it comes: what server-sent events need, and no more.

Every read and the whole of it have limits, and a header or line that is too long is an error, so that no server can
make the client wait or grow without bound.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from services.common import reasons
from services.common.errors import (
    DeadlineExceededError,
    FabricError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

_LINE_MAX: Final = 1 << 20
_HEADERS_MAX: Final = 128
_BODY_SHOWN: Final = 300
"""Bytes of an error's body that become part of the message."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    path: str
    """Without a slash at its end."""

    @classmethod
    def of(cls, url: str) -> Address:
        """Reads `http://host:port/path`.

        Raises:
            InvalidArgumentError: It is none.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme != "http" or not parts.hostname:
            raise InvalidArgumentError.of([Violation("url", f"is {url!r}; expected http://HOST:PORT")])
        return cls(parts.hostname, port, parts.path.rstrip("/"))


async def post_lines(address: Address, path: str, body: bytes, *, limit_s: float) -> AsyncGenerator[bytes]:
    """Sends JSON and yields the lines of the answer as they come, without their ends.

    Args:
        address: The server.
        path: Below the address' own path.
        body: JSON.
        limit_s: Time for all of it, in seconds.

    Raises:
        UnavailableError: Nobody listens, or the connection broke.
        DeadlineExceededError: The time is up.
        FabricError: The server answered with an error status.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=_LINE_MAX)
            head = (
                f"POST {address.path}{path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
                "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            status, chunked = await _head(reader)
            data = _chunks(reader) if chunked else _plain(reader)
            if status != 200:
                raise await _failure(status, data)
            rest = b""
            async for piece in data:
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LINE_MAX:
                    raise UnavailableError(f"the server sent a line of more than {_LINE_MAX} bytes")
                for line in lines:
                    yield line.rstrip(b"\r")
            if rest:
                yield rest
    except TimeoutError:
        raise DeadlineExceededError(f"the server did not end its answer within {limit_s:g} s") from None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise UnavailableError(
            f"the connection to {address.host}:{address.port} failed: {error}", reason=reasons.PEER_UNREACHABLE
        ) from error
    finally:
        if writer is not None:
            writer.transport.abort()  # an answer that is left early must not be waited for
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    words = (await reader.readuntil(b"\n")).split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise UnavailableError("the server does not speak HTTP/1.1")
    chunked = False
    for _ in range(_HEADERS_MAX):
        line = (await reader.readuntil(b"\n")).strip().lower()
        if not line:
            return int(words[1]), chunked
        chunked |= line.startswith(b"transfer-encoding:") and line.endswith(b"chunked")
    raise UnavailableError(f"the server sent more than {_HEADERS_MAX} headers")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        line = (await reader.readuntil(b"\n")).split(b";")[0].strip()
        try:
            size = int(line, 16)
        except ValueError:
            raise UnavailableError("the server sent a chunk without a size") from None
        if not 0 <= size <= _LINE_MAX:
            raise UnavailableError(f"the server sent a chunk of {size} bytes, which is more than {_LINE_MAX}")
        if size == 0:
            return
        yield await reader.readexactly(size)
        await reader.readuntil(b"\n")


async def _plain(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(1 << 16):
        yield data


async def _failure(status: int, data: AsyncIterator[bytes]) -> FabricError:
    said = b""
    async for piece in data:
        said += piece
        if len(said) >= _BODY_SHOWN:
            break
    message = f"the server answered {status}: {said[:_BODY_SHOWN].decode('utf-8', 'replace').strip()}"
    if status in (429, 503):
        return ResourceExhaustedError(message)
    if status == 404:
        return NotFoundError(message)
    if 400 <= status < 500:
        return InvalidArgumentError(message)
    return InternalError(message)
