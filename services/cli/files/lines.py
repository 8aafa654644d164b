# SPDX-License-Identifier: Apache-2.0
"""Lines of a byte stream, in memory that does not depend on how long a line is.

A byte order mark at the start of the stream and the carriage return before a line's end are no part of a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.cli.running import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE_BYTES_MAX = 8 * 1024 * 1024
"""Longest line that is read, in bytes; half of what one message to a broker may have."""
_CHUNK_BYTES = 256 * 1024
_UTF8_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LOOKED_AT_BYTES = 4
"""Beginning of a text that shows, without a mark, that a character has two or four bytes: one of them is zero."""


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Returns up to `size` bytes, none at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank."""

    number: int
    """From 1."""
    data: bytes | None
    """Its bytes, without its end; None where it is longer than the limit."""
    size_bytes: int


def read_lines(stream: Readable, *, limit_bytes: int = LINE_BYTES_MAX) -> Iterator[Line]:
    """Yields the lines of a stream that hold more than blanks; of one above the limit only its size.

    Raises:
        CommandError: The stream is text of two or four bytes a character.
    """
    for number, (data, size) in enumerate(_cut(stream, limit_bytes), start=1):
        if data is None:
            yield Line(number, None, size)
            continue
        line = data
        if number == 1:
            if line.startswith(_WIDE_MARKS) or 0 in line[:_LOOKED_AT_BYTES]:
                raise CommandError("rows are UTF-8, and the file begins as UTF-16 or UTF-32 does")
            line = line.removeprefix(_UTF8_MARK)
        line = line.removesuffix(b"\r")
        if line and not line.isspace():
            yield Line(number, line, size)


def _cut(stream: Readable, limit_bytes: int) -> Iterator[tuple[bytes | None, int]]:
    pending: list[bytes] = []
    size = 0
    while chunk := stream.read(_CHUNK_BYTES):
        first, *rest = chunk.split(b"\n")
        size += len(first)
        pending.append(first)
        if size > limit_bytes:
            pending.clear()
        if not rest:
            continue
        yield (b"".join(pending) if size <= limit_bytes else None), size
        for line in rest[:-1]:
            yield (line if len(line) <= limit_bytes else None), len(line)
        pending, size = [rest[-1]], len(rest[-1])
    if size:
        yield (b"".join(pending) if size <= limit_bytes else None), size
