# SPDX-License-Identifier: Apache-2.0
"""Tensors as files store them, read a few rows at a time.

A `Stored` says where a tensor lies; a `TensorFile` holds the open files and gives rows as float32. Nothing is mapped
and nothing is kept: reading a file of any size takes the memory of the rows that are asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import gguf
import ml_dtypes
import numpy as np

from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    Rows = npt.NDArray[np.float32]

PLAIN: Final[dict[str, Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
    "i16": np.dtype("<i2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
}
"""Number formats with one value after the other, by the names used here; all little-endian."""
BLOCKED: Final[dict[str, gguf.GGMLQuantizationType]] = {
    kind.name.lower(): kind
    for kind in gguf.GGMLQuantizationType
    if kind.name.lower() not in PLAIN and gguf.GGML_QUANT_SIZES[kind][0] > 1
}
"""Formats of GGUF files that store values in blocks with common scales."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    """Extents, outermost first; the last one runs fastest in the file."""
    dtype: str
    """A key of PLAIN or BLOCKED."""
    file: int
    """Which of the files it lies in."""
    offset: int
    """Of its first byte in that file."""

    @property
    def columns(self) -> int:
        """Values of a row: the innermost extent, 1 for a tensor without extents."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """All outer extents together."""
        return int(np.prod(self.shape[:-1], dtype=np.int64)) if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return row_bytes(self.dtype, self.columns)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return self.rows * self.row_bytes


class TensorFile:
    """Open files with tensors; a context manager. Reads from several threads at once are safe.

    Attributes:
        path: What was opened: a file or a folder.
        tensors: Every tensor by name.
        metadata: What the file or its configuration says of the model, by dotted name.
        descriptors: The open files.
        bytes_read: Bytes read so far.
    """

    def __init__(
        self, path: Path, files: list[int], tensors: Mapping[str, Stored], metadata: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.tensors = tensors
        self.metadata = metadata
        self.bytes_read = 0
        self.descriptors = tuple(files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(os.fstat(descriptor).st_size for descriptor in self.descriptors)

    def rows(self, stored: Stored, start: int, stop: int) -> Rows:
        """Rows `start` to `stop` as float32 `[stop - start, columns]`.

        Raises:
            FailedPreconditionError: The file ends early, or its format cannot be turned into numbers here.
        """
        return decode(self.raw(stored, start, stop), stored.dtype, stored.columns)

    def raw(self, stored: Stored, start: int, stop: int) -> bytes:
        """The bytes of rows `start` to `stop`.

        Raises:
            FailedPreconditionError: The file ends early.
        """
        return self._read(stored, start * stored.row_bytes, (stop - start) * stored.row_bytes)

    def columns(self, stored: Stored, start: int, stop: int) -> Rows:
        """Columns `start` to `stop`, as rows: float32 `[stop - start, rows]`. For plain formats only.

        Raises:
            FailedPreconditionError: The file ends early, or the format stores blocks.
        """
        if stored.dtype not in PLAIN:
            raise FailedPreconditionError(f"{self.path}: {stored.name} is {stored.dtype}, which has no columns to read")
        width = PLAIN[stored.dtype].itemsize
        strips = [
            self._read(stored, row * stored.row_bytes + start * width, (stop - start) * width)
            for row in range(stored.rows)
        ]
        return np.ascontiguousarray(decode(b"".join(strips), stored.dtype, stop - start).T)

    def _read(self, stored: Stored, offset: int, size: int) -> bytes:
        data = os.pread(self.descriptors[stored.file], size, stored.offset + offset)
        while 0 < len(data) < size:
            more = os.pread(self.descriptors[stored.file], size - len(data), stored.offset + offset + len(data))
            if not more:
                break
            data += more
        if len(data) != size:
            raise FailedPreconditionError(f"{self.path}: the file ends inside {stored.name}")
        self.bytes_read += size
        return data


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes that a row takes.

    Raises:
        ValueError: The row does not fill its blocks.
    """
    if dtype in PLAIN:
        return columns * int(PLAIN[dtype].itemsize)
    values, size = gguf.GGML_QUANT_SIZES[BLOCKED[dtype]]
    if columns % values:
        raise ValueError(f"rows of {columns} values do not fill blocks of {values}, which {dtype} has")
    return columns // values * int(size)


def decode(data: bytes, dtype: str, columns: int) -> Rows:
    """The numbers in rows of bytes, as float32 `[rows, columns]`. Numbers too large for float32 become infinite.

    Raises:
        FailedPreconditionError: The format cannot be turned into numbers here.
    """
    with np.errstate(all="ignore"):
        if dtype in PLAIN:
            return np.frombuffer(data, PLAIN[dtype]).astype(np.float32).reshape(-1, columns)
        packed = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(dtype, columns))
        try:
            values = gguf.quants.dequantize(packed, BLOCKED[dtype])
        except NotImplementedError as error:
            raise FailedPreconditionError(f"tensors of the format {dtype} cannot be turned into numbers") from error
        return np.ascontiguousarray(values, np.float32).reshape(-1, columns)
