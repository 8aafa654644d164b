# SPDX-License-Identifier: Apache-2.0
"""Safetensors files and checkpoint folders, opened for reading tensors a few rows at a time.

A folder holds one file, several with an index (`*.safetensors.index.json`), or one a rank (`rank0.safetensors`), and
often `config.json` beside them. Headers are held against the size of their file before anything is believed.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any, Final

from engines.audit.storage import PLAIN, Stored, TensorFile
from engines.plain_file import descriptor_of
from services.common.errors import FailedPreconditionError, NotFoundError, UnimplementedError

if TYPE_CHECKING:
    from pathlib import Path

SUFFIX: Final = ".safetensors"
_HEADER_MAX: Final = 100 << 20
"""Longest header that the format allows, in bytes."""
_CONFIG_MAX: Final = 4 << 20
_FILES_MAX: Final = 1024
_DTYPES: Final = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8_e4m3",
    "F8_E5M2": "f8_e5m2",
    "I8": "i8",
    "U8": "u8",
    "I16": "i16",
    "I32": "i32",
    "I64": "i64",
    "BOOL": "u8",
}


def open_safetensors(path: Path) -> TensorFile:
    """Opens a safetensors file, or a folder with such files.

    Raises:
        NotFoundError: The folder holds no such file.
        FailedPreconditionError: A file is none, is damaged or cut short, or files contradict each other.
        UnimplementedError: It is a checkpoint that is split over ranks.
        OSError: A file cannot be opened.
    """
    paths = _files_of(path) if path.is_dir() else [path]
    descriptors: list[int] = []
    tensors: dict[str, Stored] = {}
    try:
        for number, each in enumerate(paths):
            descriptors.append(descriptor_of(each))
            for stored in _parse(each, descriptors[-1], number):
                if stored.name in tensors:
                    raise FailedPreconditionError(f"{path}: the tensor {stored.name} is in two files")
                tensors[stored.name] = stored
        return TensorFile(path, descriptors, tensors, _configuration(path if path.is_dir() else path.parent))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _files_of(folder: Path) -> list[Path]:
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        raise NotFoundError(f"{folder} holds no {SUFFIX} file")
    if len(found) > _FILES_MAX:
        raise FailedPreconditionError(f"{folder} holds {len(found)} {SUFFIX} files, expected at most {_FILES_MAX}")
    if sum(each.stem.startswith("rank") for each in found) > 1:
        raise UnimplementedError(f"{folder} is split over {len(found)} ranks: convert with one rank to have it audited")
    return found


def _parse(path: Path, descriptor: int, number: int) -> list[Stored]:
    size = os.fstat(descriptor).st_size

    def wrong(why: str) -> FailedPreconditionError:
        return FailedPreconditionError(f"{path} is no safetensors file that can be read: {why}")

    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(size - 8, _HEADER_MAX):
        raise wrong(f"its header would have {length} bytes, and the file has {size}")
    try:
        header = json.loads(os.pread(descriptor, length, 8), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise wrong(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise wrong("its header is no JSON object")
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        stored = _stored(name, entry, number, 8 + length)
        if stored is None:
            raise wrong(f"{name!r} is not described as a tensor is")
        if stored.offset + stored.size_bytes > size:
            raise wrong(f"{name} ends at byte {stored.offset + stored.size_bytes}, and the file at {size}")
        found.append(stored)
    ordered = sorted(found, key=lambda each: each.offset)
    for one, other in itertools.pairwise(ordered):
        if one.offset + one.size_bytes > other.offset:
            raise wrong(f"{one.name} and {other.name} share bytes")
    return found


def _stored(name: str, entry: Any, number: int, start: int) -> Stored | None:
    """The tensor that a header entry describes; None where it describes none."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if dtype in _DTYPES:
            if not all(type(extent) is int and 0 < extent < 1 << 40 for extent in shape):
                return None
            values = 1
            for extent in shape:
                values *= extent
            if begin >= 0 and end - begin == values * int(PLAIN[_DTYPES[dtype]].itemsize):
                return Stored(name, tuple(shape), _DTYPES[dtype], number, start + begin)
    return None


def _configuration(folder: Path) -> dict[str, Any]:
    """What `config.json` beside the weights says, with dotted names such as `quantization.quant_algo`."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        text = file.read(_CONFIG_MAX + 1)
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise FailedPreconditionError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise FailedPreconditionError(f"{path} is no JSON object")
    flat: dict[str, Any] = {}
    for name, value in {**document, **document.get("pretrained_config", {})}.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return flat


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"the key {name!r} stands twice")
        out[name] = value
    return out
