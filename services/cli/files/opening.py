# SPDX-License-Identifier: Apache-2.0
"""What a file of rows is, and its plain bytes.

What a file holds decides how it is read, never its name: `rows.jsonl` may be gzip, and `rows.jsonl.gz` plain. A file is
read at least twice, once to know it (`survey`), then to send it; it must be the same every time, and one that changes
meanwhile is refused. Files beyond this machine are named by URL and opened with fsspec, where that is installed.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import zlib
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import zstandard

from services.cli.files.lines import Readable, read_lines
from services.cli.running import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN, GZIP, ZSTD, PARQUET = "plain", "gzip", "zstd", "parquet"
_MAGIC = {
    b"\x1f\x8b": GZIP,
    b"\x28\xb5\x2f\xfd": ZSTD,
    # A frame that is skipped: what compresses with several threads, or so that one can seek, begins with one.
    **{bytes([low]) + b"\x2a\x4d\x18": ZSTD for low in range(0x50, 0x60)},
    b"PAR1": PARQUET,
}
_SUFFIXES = {".gz": GZIP, ".gzip": GZIP, ".zst": ZSTD, ".zstd": ZSTD, ".parquet": PARQUET}
_READ_BYTES = 1024 * 1024
_ZSTD_BYTES = 512
"""Compressed bytes that are decompressed at once: four of them may stand for 128 KiB."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file of rows, looked at."""

    name: str
    """Path or URL, as given."""
    packing: str
    """`plain`, `gzip`, `zstd` or `parquet`: what its first bytes say."""
    version: str
    """Changes when the file changes."""

    @property
    def stem(self) -> str:
        """Its name without folders and endings, in characters that a job's id may have."""
        base = self.name.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
        return "".join(each if each.isascii() and (each.isalnum() or each in "_-") else "-" for each in base) or "rows"

    @property
    def note(self) -> str:
        """One sentence where the name says other than the content; empty where it does not."""
        said = _SUFFIXES.get(Path(self.name).suffix.lower(), PLAIN)
        return "" if said == self.packing else f"{self.name} is {self.packing}, not {said} as its name says"

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """Opens the file and gives its plain bytes; what is Parquet comes as it is.

        Raises:
            CommandError: The file cannot be opened, its compressed data is damaged or breaks off, or it is not what it
                was (said when the file is left, too).
        """
        with closing(_open(self.name)) as raw:
            self.check()
            yield _plain(self, raw)
            self.check()

    def check(self) -> None:
        """Makes sure that the file is what it was when it was looked at.

        Raises:
            CommandError: It has changed.
        """
        if _version(self.name) != self.version:
            raise CommandError(f"{self.name} changed while it was read; run the command again when it is complete")


@dataclass(frozen=True, slots=True)
class Survey:
    """What one reading of a file says."""

    sha256: str
    """Digest of its bytes, as they lie there."""
    lines: int
    """Lines that are not blank."""


def look(name: str) -> Source:
    """Finds out what a file is by its first bytes.

    Raises:
        CommandError: There is no such file, it cannot be read twice, or a URL needs a package that is not installed.
    """
    version = _version(name)
    with closing(_open(name)) as raw:
        head = raw.read(4)
    return Source(name, next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), PLAIN), version)


def survey(source: Source) -> Survey:
    """Reads the whole file once, in little memory: its digest and, where it has lines, how many.

    Raises:
        CommandError: It cannot be read to its end, or changed meanwhile.
    """
    with closing(_open(source.name)) as raw:
        hashing = _Hashing(raw)
        lines = 0
        if source.packing != PARQUET:
            lines = sum(1 for _ in read_lines(_plain(source, cast("BinaryIO", hashing))))
        while hashing.read(_READ_BYTES):
            pass
    source.check()
    return Survey(hashing.sha256.hexdigest(), lines)


class _Hashing:
    """A file whose bytes are digested as they are read."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        data = self._raw.read(size)
        self.sha256.update(data)
        return data


class _Damaged:
    """Turns what decompressors raise into one sentence with the file's name."""

    def __init__(self, source: Source, inner: Readable) -> None:
        self._source = source
        self._inner = inner

    def read(self, size: int, /) -> bytes:
        try:
            return self._inner.read(size)
        except EOFError:
            raise CommandError(f"{self._source.name}: the {self._source.packing} data breaks off") from None
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise CommandError(f"{self._source.name}: the {self._source.packing} data is damaged: {error}") from error


class _Zstd:
    """Plain bytes of zstd frames. The library's own reader takes a frame that breaks off for a whole one."""

    def __init__(self, raw: Readable) -> None:
        self._raw = raw
        self._context = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._packed = b""
        self._ready = bytearray()

    def read(self, size: int, /) -> bytes:
        while not self._ready:
            packed = self._packed or self._raw.read(_ZSTD_BYTES)
            self._packed = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError
                break
            self._frame = self._frame or self._context.decompressobj()
            self._ready += self._frame.decompress(packed)
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        data = bytes(self._ready[:size])
        del self._ready[:size]
        return data


def _plain(source: Source, raw: BinaryIO) -> Readable:
    match source.packing:
        case "gzip":
            return _Damaged(source, cast("Readable", gzip.GzipFile(fileobj=raw, mode="rb")))
        case "zstd":
            return _Damaged(source, _Zstd(raw))
        case _:
            return raw


def _is_url(name: str) -> bool:
    return "://" in name


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise CommandError(f"{url}: URLs need the extra `files` (pip install 'inference-fabric[files]')") from None
    try:
        file_system, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CommandError(f"{url}: {error}") from error
    return file_system, path


def _open(name: str) -> BinaryIO:
    if _is_url(name):
        file_system, path = _file_system(name)
        try:
            return cast("BinaryIO", file_system.open(path, "rb"))
        except OSError as error:
            raise CommandError(f"{name}: {error}") from error
    return open(name, "rb")


def _version(name: str) -> str:
    if _is_url(name):
        file_system, path = _file_system(name)
        try:
            return str(file_system.ukey(path))
        except OSError as error:
            raise CommandError(f"{name}: there is no such file") from error
    found = os.stat(name)
    if not stat.S_ISREG(found.st_mode):
        raise CommandError(f"{name} is not a regular file; rows are read twice, so write them into one first")
    return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
