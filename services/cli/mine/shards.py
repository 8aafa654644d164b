# SPDX-License-Identifier: Apache-2.0
"""Shard files: payloads of many rows as one tensor, in the safetensors format.

A payload goes to the disk as it comes; nothing is held but the digest. The header, whose size is fixed before the
number of rows is known, is written last. A file has its name only when it is whole and on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ifabric.engine.v1 import contract_pb2

if TYPE_CHECKING:
    from pathlib import Path

TENSOR = "hidden_states"
"""Name of the tensor; its first extent is the rows, the others are the payload's."""
_SUFFIX = ".safetensors"
_PART = ".part"
_HEADER_BYTES = 1024
_READ_BYTES = 4 * 1024 * 1024
_DTYPES = {
    contract_pb2.PAYLOAD_DTYPE_FLOAT32: ("F32", 4),
    contract_pb2.PAYLOAD_DTYPE_FLOAT16: ("F16", 2),
    contract_pb2.PAYLOAD_DTYPE_BFLOAT16: ("BF16", 2),
}


@dataclass(frozen=True, slots=True)
class Form:
    """What all payloads of a run are like."""

    dtype: int
    """A number of `ifabric.engine.v1.PayloadDtype`."""
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Size of one payload, in bytes."""
        return prod(self.shape) * _DTYPES[self.dtype][1]  # type: ignore[index]  # a number is what the enum is

    def header(self, rows: int, engine_digest: str) -> bytes:
        """The header of a file with so many rows, padded to its fixed size."""
        document = {
            "__metadata__": {"format": "pt", "engine_digest": engine_digest},
            TENSOR: {
                "dtype": _DTYPES[self.dtype][0],  # type: ignore[index]
                "shape": [rows, *self.shape],
                "data_offsets": [0, rows * self.row_bytes],
            },
        }
        room = _HEADER_BYTES - 8
        return room.to_bytes(8, "little") + json.dumps(document).encode().ljust(room)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that is whole."""

    number: int
    file: str
    size_bytes: int
    sha256: str
    """Digest of the whole file."""


class ShardWriter:
    """One shard while it is written.

    Raises:
        OSError: The disk is full, or the like.
    """

    def __init__(self, folder: Path, number: int, form: Form, engine_digest: str) -> None:
        self._folder = folder
        self._number = number
        self._form = form
        self._engine_digest = engine_digest
        self._name = f"shard-{number:05}{_SUFFIX}"
        self._file = (folder / (self._name + _PART)).open("w+b")
        self._file.write(bytes(_HEADER_BYTES))
        self._rows = 0

    def append(self, data: bytes) -> None:
        """Adds a payload of the run's form."""
        self._file.write(data)
        self._rows += 1

    def close(self) -> Shard:
        """Makes the file whole, gives it its name, and returns once both are on the disk."""
        with self._file as file:
            file.seek(0)
            file.write(self._form.header(self._rows, self._engine_digest))
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            file.seek(0)
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
        os.rename(self._folder / (self._name + _PART), self._folder / self._name)
        sync_folder(self._folder)
        return Shard(self._number, self._name, size, digest.hexdigest())

    def abandon(self) -> None:
        """Leaves the file; the next run deletes it."""
        self._file.close()


def sync_folder(folder: Path) -> None:
    """Returns once the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, counted: set[str]) -> None:
    """Deletes what a crash left: parts, and shards that do not count."""
    for path in folder.glob("shard-*"):
        if path.name not in counted and path.name.endswith((_SUFFIX, _SUFFIX + _PART)):
            path.unlink()
