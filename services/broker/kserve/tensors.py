# SPDX-License-Identifier: Apache-2.0
"""Tensors of the KServe v2 protocol: values in and out, in either of the protocol's two forms.

A tensor's values come as typed lists (`contents`) or as little-endian bytes (`raw_input_contents`). A BYTES tensor as
raw bytes is, for each element, its length as an unsigned 32-bit number and then its bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import contract_pb2
from services.common.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ifabric.kserve.v2 import inference_pb2

TEXT_INPUT = "text_input"
"""Input: the prompt as text, BYTES, one element."""
INPUT_IDS = "input_ids"
"""Input: the prompt as token ids, INT32 or INT64, `[n]` or `[1, n]`."""
TEXT_OUTPUT = "text_output"
"""Output: the text, BYTES `[1]`."""
OUTPUT_IDS = "output_ids"
"""Output: the token ids, INT32 `[n]`."""
LOGPROBS = "output_logprobs"
"""Output: log-probability of each token, FP32 `[n]`."""
HIDDEN_STATES = "hidden_states"
"""Output: the payload, in its own type and shape."""

DATATYPES: dict[int, str] = {
    contract_pb2.PAYLOAD_DTYPE_FLOAT32: "FP32",
    contract_pb2.PAYLOAD_DTYPE_FLOAT16: "FP16",
    contract_pb2.PAYLOAD_DTYPE_BFLOAT16: "BF16",
}
"""The protocol's names for number formats of payloads."""
_ID_TYPES: dict[str, tuple[str, int]] = {"INT32": ("<i4", 4), "INT64": ("<i8", 8)}
"""Number format and bytes of a value, by the protocol's name."""
_LISTS = {"BYTES": "bytes_contents", "INT32": "int_contents", "INT64": "int64_contents"}
"""Where values of a type stand in `contents`."""
_LENGTH = struct.Struct("<I")
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor to send."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    """Little-endian values."""


def text_output(text: str) -> Output:
    """Makes the tensor of a text."""
    data = text.encode()
    return Output(TEXT_OUTPUT, "BYTES", (1,), _LENGTH.pack(len(data)) + data)


def id_output(ids: Sequence[int]) -> Output:
    """Makes the tensor of token ids."""
    return Output(OUTPUT_IDS, "INT32", (len(ids),), np.asarray(ids, "<i4").tobytes())


def logprob_output(values: Sequence[float]) -> Output:
    """Makes the tensor of log-probabilities."""
    return Output(LOGPROBS, "FP32", (len(values),), np.asarray(values, "<f4").tobytes())


def write(outputs: Iterable[Output], response: inference_pb2.ModelInferResponse) -> None:
    """Adds tensors to a response."""
    for output in outputs:
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        response.raw_output_contents.append(output.data)


def read_text(
    tensor: inference_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None, violations: list[Violation]
) -> str:
    """Reads the one element of a BYTES tensor as UTF-8.

    Args:
        tensor: What came.
        raw: Its values as bytes; None where they are in the tensor.
        violations: What is wrong is added here, and "" returned.
    """
    field = f"inputs.{tensor.name}"
    if tensor.datatype != "BYTES":
        violations.append(Violation(f"{field}.datatype", f"is {tensor.datatype[:32]!r}; it is BYTES"))
        return ""
    shape = list(tensor.shape)
    if shape not in ([1], [1, 1]):
        violations.append(Violation(f"{field}.shape", f"is {shape[:8]}; a call is one request: [1] or [1, 1]"))
        return ""
    if raw is None and _misplaced(tensor, violations):
        return ""
    elements = list(tensor.contents.bytes_contents) if raw is None else _elements(raw)
    if elements is None or len(elements) != 1:
        count = "cannot be read as elements with lengths" if elements is None else f"has {len(elements)} elements"
        violations.append(Violation(field, f"{count}; its shape says 1"))
        return ""
    try:
        return elements[0].decode()
    except UnicodeDecodeError as error:
        violations.append(Violation(field, f"is no UTF-8 from byte {error.start} on"))
        return ""


def read_ids(
    tensor: inference_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None, violations: list[Violation]
) -> bytes:
    """Reads token ids, `[n]` or `[1, n]`, and returns them as packed little-endian int32.

    Args:
        tensor: What came.
        raw: Its values as bytes; None where they are in the tensor.
        violations: What is wrong is added here, and b"" returned.
    """
    field = f"inputs.{tensor.name}"
    if tensor.datatype not in _ID_TYPES:
        violations.append(Violation(f"{field}.datatype", f"is {tensor.datatype[:32]!r}; it is INT32 or INT64"))
        return b""
    dtype, size = _ID_TYPES[tensor.datatype]
    shape = list(tensor.shape)
    if len(shape) not in (1, 2) or min(shape) < 0 or (len(shape) == 2 and shape[0] != 1):
        violations.append(Violation(f"{field}.shape", f"is {shape[:8]}; a call is one request: [n] or [1, n]"))
        return b""
    if raw is None:
        if _misplaced(tensor, violations):
            return b""
        ids = np.array(getattr(tensor.contents, _LISTS[tensor.datatype]), dtype=dtype)
    elif len(raw) % size:
        violations.append(Violation(field, f"has {len(raw)} bytes; a value has {size}"))
        return b""
    else:
        ids = np.frombuffer(raw, dtype=dtype)
    if len(ids) != math.prod(shape):
        violations.append(Violation(field, f"has {len(ids)} values; its shape says {math.prod(shape)}"))
        return b""
    if len(ids) and (ids.min() < _INT32.min or ids.max() > _INT32.max):
        violations.append(Violation(field, "holds a value that is no 32-bit number, so no token id"))
        return b""
    packed: bytes = ids.astype("<i4", copy=False).tobytes()
    return packed


def _misplaced(tensor: inference_pb2.ModelInferRequest.InferInputTensor, violations: list[Violation]) -> bool:
    """Whether `contents` has values in a list that is not the type's; those are named, and would be left out."""
    right = _LISTS[tensor.datatype]
    wrong = [descriptor.name for descriptor, _ in tensor.contents.ListFields() if descriptor.name != right]
    violations += [
        Violation(f"inputs.{tensor.name}.contents.{name}", f"is set; {tensor.datatype} values stand in {right}")
        for name in wrong
    ]
    return bool(wrong)


def _elements(raw: bytes) -> list[bytes] | None:
    """The elements of a raw BYTES tensor; None where their lengths do not add up."""
    found: list[bytes] = []
    at = 0
    while at < len(raw):
        if at + _LENGTH.size > len(raw):
            return None
        (size,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if at + size > len(raw):
            return None
        found.append(raw[at : at + size])
        at += size
    return found
