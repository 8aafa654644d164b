# SPDX-License-Identifier: Apache-2.0
"""GGUF files, opened for reading tensors a few rows at a time.

Only the header is read, and of it only what a model's shape needs: vocabularies are skipped. Every count and size is
held against the size of the file before anything is allocated for it.
"""

from __future__ import annotations

import os
import struct
from typing import IO, TYPE_CHECKING, Any, Final

import gguf

from engines.audit.storage import BLOCKED, PLAIN, Stored, TensorFile, row_bytes
from engines.plain_file import descriptor_of
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Struct formats of metadata values by their number in the file."""
_STRING: Final = 8
_ARRAY: Final = 9
_DIMENSIONS_MAX: Final = 4
_KEPT_ITEMS: Final = 64
"""Longest array that is kept; longer ones are vocabularies."""
_DTYPES: Final = {kind.value: kind.name.lower() for kind in gguf.GGMLQuantizationType}


def open_gguf(path: Path) -> TensorFile:
    """Opens a GGUF file.

    Raises:
        OSError: It cannot be opened.
        FailedPreconditionError: It is none, is damaged or cut short, or is of the other byte order.
    """
    descriptor = descriptor_of(path)
    try:
        with path.open("rb") as file:
            metadata, tensors = _Header(path, file, os.fstat(descriptor).st_size).parse()
        return TensorFile(path, [descriptor], tensors, metadata)
    except BaseException:
        os.close(descriptor)
        raise


class _Header:
    """Reads forward through the header; every read is checked against the file's size."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        if self._take(4) != MAGIC:
            raise self._wrong("it does not begin with GGUF")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise self._wrong("it is written in the other byte order (big-endian)")
        if version not in _VERSIONS:
            raise self._wrong(f"its version is {version}, expected one of {', '.join(map(str, _VERSIONS))}")
        tensor_count, value_count = self._count("tensors", 24), self._count("metadata values", 13)
        metadata: dict[str, Any] = {}
        for _ in range(value_count):
            name = self._text()
            metadata[name] = self._value(self._number("<I"))
        listed = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment is {alignment!r}, expected a power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, Stored] = {}
        for name, shape, dtype, offset in listed:
            if name in tensors:
                raise self._wrong(f"the tensor {name} is listed twice")
            tensors[name] = self._placed(name, shape, dtype, start + offset)
        return metadata, tensors

    def _entry(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self._text()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise self._wrong(f"{name} has {dimensions} dimensions, expected 1 to {_DIMENSIONS_MAX}")
        extents = [self._number("<Q") for _ in range(dimensions)]
        kind, offset = self._number("<I"), self._number("<Q")
        dtype = _DTYPES.get(kind, "")
        if dtype not in PLAIN and dtype not in BLOCKED:
            raise self._wrong(f"{name} is of the unknown type {kind}")
        return name, tuple(reversed(extents)), dtype, offset

    def _placed(self, name: str, shape: tuple[int, ...], dtype: str, offset: int) -> Stored:
        values = 1
        for extent in shape:
            values *= extent
        if not 1 <= values <= self._size * 64:
            raise self._wrong(f"{name} has the shape {list(shape)}, which the file cannot hold")
        try:
            row_bytes(dtype, shape[-1])
        except ValueError as error:
            raise self._wrong(f"{name}: {error}") from error
        stored = Stored(name, shape, dtype, 0, offset)
        if stored.offset + stored.size_bytes > self._size:
            raise self._wrong(f"{name} ends at byte {stored.offset + stored.size_bytes}, and the file at {self._size}")
        return stored

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise self._wrong(f"a metadata value is of the unknown type {kind}")
        item = self._number("<I")
        if item in _SCALARS:
            size = struct.calcsize(_SCALARS[item])
            count = self._count("items of a metadata array", size)
            if count <= _KEPT_ITEMS:
                return [self._number(_SCALARS[item]) for _ in range(count)]
            self._take(count * size)
            return None
        if item != _STRING:
            raise self._wrong(f"a metadata array holds the type {item}, expected numbers or texts")
        count = self._count("items of a metadata array", 8)
        if count <= _KEPT_ITEMS:
            return [self._text() for _ in range(count)]
        for _ in range(count):
            self._take(self._number("<Q"))
        return None

    def _count(self, what: str, least_bytes: int) -> int:
        count = int(self._number("<Q"))
        if count * least_bytes > self._size - self._at:
            raise self._wrong(f"it says that it has {count} {what}, which do not fit into its {self._size} bytes")
        return count

    def _text(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", "replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            raise self._wrong(f"its header wants {size} bytes at byte {self._at}, and the file has {self._size}")
        self._at += size
        return self._file.read(size)

    def _wrong(self, why: str) -> FailedPreconditionError:
        return FailedPreconditionError(f"{self._path} is no GGUF file that can be read: {why}")
