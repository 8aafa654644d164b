# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in safetensors files: opened strictly, read in place, and known by their digests.

    weights = Checkpoint.open(Path("model"))
    weights["model.norm.weight"]        an array that reads from the file when it is used

One file, or several with `model.safetensors.index.json`. A file is eight bytes of length, a JSON header, and the
tensors' bytes. Everything that a header says is checked before a byte of a tensor is touched: it comes from strangers,
and an offset that is believed is a read outside of the file. Arrays are views on mapped files and cannot be written.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from engines.plain_file import open_plain
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
HEADER_BYTES_MAX: Final = 64 << 20
"""Longest header that is read: about half a million tensors."""
TENSORS_MAX: Final = 1 << 20
FILES_MAX: Final = 1024
RANK_MAX: Final = 8

_LENGTH = struct.Struct("<Q")
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies."""

    file: str
    dtype: str
    """As the file says: `BF16`, `F16`, `F32`, `F8_E4M3`."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes in the file."""
    end: int


class Checkpoint:
    """The tensors of a checkpoint, by name; use as a context, or close it."""

    def __init__(self, directory: Path, places: Mapping[str, TensorPlace]) -> None:
        """Maps the files; `open` and `open_file` are the ways in."""
        self.directory = directory
        self.places = dict(places)
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Opens the checkpoint in a directory.

        Raises:
            NotFoundError: There is no checkpoint in it.
            FailedPreconditionError: A file is cut off, is no safetensors file, or says something that cannot be: one
                sentence with the file, the tensor, what it says and what is allowed.
        """
        index = directory / INDEX_FILE
        if not index.is_file():
            if not (directory / SINGLE_FILE).is_file():
                raise NotFoundError(f"neither {SINGLE_FILE} nor {INDEX_FILE} in {directory}: name a checkpoint")
            return cls(directory, read_header(directory / SINGLE_FILE))
        places: dict[str, TensorPlace] = {}
        expected = _index(index)
        for name in sorted(set(expected.values())):
            for tensor, place in read_header(directory / name).items():
                if expected.get(tensor) != name:
                    raise _error(index, f"tensor {tensor!r} is in {name}, and the index says {expected.get(tensor)}")
                places[tensor] = place
        if missing := sorted(expected.keys() - places.keys()):
            raise _error(index, f"tensor {missing[0]!r} and {len(missing) - 1} more are in no file")
        return cls(directory, places)

    @classmethod
    def open_file(cls, path: Path) -> Checkpoint:
        """Opens one safetensors file, whatever its name; raises as `open` does."""
        return cls(path.parent, read_header(path))

    def __enter__(self) -> Checkpoint:
        """Opens nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        self.close()

    def close(self) -> None:
        """Closes the files; arrays that are still in use keep theirs open."""
        self._maps.clear()

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor."""
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self.places)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A tensor in its own number format, read from the file where it is used.

        Raises:
            KeyError: There is no such tensor.
            FailedPreconditionError: The file has gone or cannot be mapped.
        """
        place = self.places[name]
        dtype = _DTYPES[place.dtype]
        count = math.prod(place.shape)
        if count == 0:
            return np.zeros(place.shape, dtype)
        array = np.frombuffer(self._map(place.file), dtype, count, place.begin)
        return array.reshape(place.shape)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Demands that a tensor is there and has these extents.

        Raises:
            FailedPreconditionError: It is not, or has others.
        """
        place = self.places.get(name)
        if place is None:
            raise FailedPreconditionError(f"{self.directory} has no tensor {name}")
        if place.shape != shape:
            raise FailedPreconditionError(
                f"{self.directory}: tensor {name} has the extents {list(place.shape)}, expected {list(shape)}"
            )

    def files(self) -> list[Path]:
        """All files, in order of their names."""
        return [self.directory / name for name in sorted({place.file for place in self.places.values()})]

    def digest(self) -> str:
        """SHA-256 over the names and digests of all files, which takes as long as reading them."""
        whole = hashlib.sha256()
        for path in self.files():
            with open_plain(path) as file:
                whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return whole.hexdigest()

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            path = self.directory / name
            try:
                with open_plain(path) as file:
                    self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise _error(path, f"it cannot be mapped: {error}") from error
        return self._maps[name]


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Reads and checks the header of one file.

    Raises:
        NotFoundError: There is no such file.
        FailedPreconditionError: See `Checkpoint.open`.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH.size)
            if len(prefix) < _LENGTH.size:
                raise _error(path, f"it has {size} bytes, too few for a header")
            (length,) = _LENGTH.unpack(prefix)
            if length > min(HEADER_BYTES_MAX, size - _LENGTH.size):
                most = min(HEADER_BYTES_MAX, size - _LENGTH.size)
                raise _error(path, f"its header says {length} bytes, at most {most}: cut off, or no safetensors file")
            text = file.read(length)
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}") from error
    except OSError as error:
        raise _error(path, f"it cannot be read: {error.strerror}") from error
    begin = _LENGTH.size + length
    places = dict(_places(path, _object(path, text), begin, size))
    if len(places) > TENSORS_MAX:
        raise _error(path, f"it has {len(places)} tensors, at most {TENSORS_MAX} are read")
    _check_cover(path, places, begin, size)
    return places


def _places(path: Path, header: dict[str, Any], begin: int, size: int) -> Iterator[tuple[str, TensorPlace]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _error(path, f"tensor {name!r} has other members than dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise _error(path, f"tensor {name!r} has the number format {dtype!r}, known are {', '.join(_DTYPES)}")
        if not _naturals(shape) or len(shape) > RANK_MAX:
            raise _error(path, f"tensor {name!r} has a shape that is not up to {RANK_MAX} whole numbers from 0")
        if not _naturals(offsets) or len(offsets) != 2:
            raise _error(path, f"tensor {name!r} has data_offsets that are not two whole numbers from 0")
        first, last = offsets
        needed = math.prod(shape) * _DTYPES[dtype].itemsize
        if last - first != needed:
            raise _error(path, f"tensor {name!r} has {last - first} bytes, and {dtype} of {shape} takes {needed}")
        if begin + last > size:
            raise _error(path, f"tensor {name!r} ends at byte {begin + last}, and the file has {size}: it is cut off")
        yield name, TensorPlace(path.name, dtype, tuple(shape), begin + first, begin + last)


def _check_cover(path: Path, places: Mapping[str, TensorPlace], begin: int, size: int) -> None:
    """Every byte belongs to one tensor: nothing is hidden between them, and none shares another's."""
    at = begin
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != at:
            raise _error(path, f"tensor {name!r} begins at byte {place.begin}, expected {at}, where the last one ends")
        at = place.end
    if at != size:
        raise _error(path, f"{size - at} bytes behind the last tensor belong to none")


def _index(path: Path) -> dict[str, str]:
    try:
        with open_plain(path) as file:
            text = file.read(HEADER_BYTES_MAX + 1)
    except OSError as error:
        raise _error(path, f"it cannot be read: {error.strerror}") from error
    if len(text) > HEADER_BYTES_MAX:
        raise _error(path, f"it has more than {HEADER_BYTES_MAX} bytes")
    weight_map = _object(path, text).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > TENSORS_MAX:
        raise _error(path, f"it has no weight_map of 1 to {TENSORS_MAX} tensors")
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and name.endswith(".safetensors") and "/" not in name and "\\" not in name
        if not plain or name.startswith("."):
            raise _error(path, f"tensor {tensor!r} is in {name!r}, which is no plain file name ending in .safetensors")
    if len(set(weight_map.values())) > FILES_MAX:
        raise _error(path, f"it names {len(set(weight_map.values()))} files, at most {FILES_MAX} are read")
    return weight_map


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"its header is no JSON document: {error}") from error
    if not isinstance(parsed, dict):
        raise _error(path, "its header is no JSON object")
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        (twice, _), *_rest = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r} is given twice")
    return made


def _no_constant(literal: str) -> Any:
    raise ValueError(f"{literal} is no number")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 62 for each in value)


def _error(path: Path, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"{path}: {why[:500]}")
