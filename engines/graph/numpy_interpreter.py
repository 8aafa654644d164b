# SPDX-License-Identifier: Apache-2.0
"""Computes a recorded network in NumPy, operation by operation, on a machine without a GPU.

Arithmetic runs in float32 and every result is rounded to the number format that its operation states, so that a wrong
type, a missing cast or a scale applied twice shows as it would on a card. Matrix products accumulate in float32. Values
are dropped after their last use, so that a model takes its weights and one layer's work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engines.graph.fused_kernels import KERNELS, to_fp8
from engines.graph.ir import DTYPES, Graph, GraphError, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Array = npt.NDArray[Any]


def run(
    graph: Graph, feeds: Mapping[str, Array], *, watch: Callable[[Operation, Array], None] | None = None
) -> dict[str, Array]:
    """Computes all outputs.

    Args:
        graph: The network.
        feeds: One array an input, by name, with the declared type and extents.
        watch: Called with each operation and its result, for comparisons inside the network.

    Returns:
        Arrays of the outputs, by name.

    Raises:
        GraphError: A feed is missing, or a type or extent differs from what the network declares.
    """
    extents: dict[str, int] = {}
    values: dict[str, Array] = {}
    for tensor in graph.inputs:
        if tensor.name not in feeds:
            raise GraphError(f"input {tensor.name} was not given")
        value = feeds[tensor.name]
        if value.dtype != DTYPES[tensor.dtype]:
            raise GraphError(f"input {tensor.name} is {value.dtype}, must be {tensor.dtype}")
        _bind(tensor.name, tensor.shape, value.shape, extents)
        values[tensor.name] = value
    last_use = {tensor.name: at for at, operation in enumerate(graph.operations) for tensor in operation.inputs}
    kept = {tensor.name for tensor in graph.outputs}
    for at, operation in enumerate(graph.operations):
        arguments = [values[tensor.name] for tensor in operation.inputs]
        results = (
            (graph.constants[operation.output.name],)
            if operation.kind == "constant"
            else _compute(operation, arguments, extents)
        )
        for tensor, result in zip((operation.output, *operation.beside), results, strict=True):
            if result.dtype != DTYPES[tensor.dtype]:
                raise GraphError(f"{operation.kind} {tensor.name} gave {result.dtype}, declared {tensor.dtype}")
            _bind(tensor.name, tensor.shape, result.shape, extents)
            values[tensor.name] = result
        if watch is not None:
            watch(operation, results[0])
        for tensor in operation.inputs:
            if last_use[tensor.name] == at and tensor.name not in kept:
                values.pop(tensor.name, None)
    return {tensor.name: values[tensor.name] for tensor in graph.outputs}


def _bind(name: str, declared: tuple[int | str, ...], actual: tuple[int, ...], extents: dict[str, int]) -> None:
    if len(declared) != len(actual):
        raise GraphError(f"{name} has extents {actual}, declared {declared}")
    for extent, value in zip(declared, actual, strict=True):
        known = extents.setdefault(extent, value) if isinstance(extent, str) else extent
        if known != value:
            raise GraphError(f"{name} has extents {actual}, declared {declared} with {extent} = {known}")


def _compute(operation: Operation, arguments: list[Array], extents: dict[str, int]) -> tuple[Array, ...]:
    if operation.kind not in KERNELS:
        return (_compute_one(operation, arguments, extents),)
    first, *beside = KERNELS[operation.kind](operation, arguments)
    scale = operation.settings["output_scale"]
    first = to_fp8(first, scale) if scale else first.astype(DTYPES[operation.output.dtype])
    return (first, *(x.astype(DTYPES[tensor.dtype]) for x, tensor in zip(beside, operation.beside, strict=True)))


def _compute_one(operation: Operation, arguments: list[Array], extents: dict[str, int]) -> Array:
    settings = operation.settings
    target = DTYPES[operation.output.dtype]
    match operation.kind:
        case "identity":
            return arguments[0]
        case "gather":
            return np.take(arguments[0], arguments[1], axis=settings["axis"])
        case "reshape":
            return arguments[0].reshape(_resolve(operation, arguments[0].size, extents))
        case "transpose":
            return np.transpose(arguments[0], settings["permutation"])
        case "cast":
            return arguments[0].astype(target)
        case "select":
            return np.where(arguments[0], arguments[1], arguments[2]).astype(target)
        case "elementwise" if settings["op"] in _LOGIC:
            result: Array = _LOGIC[settings["op"]](arguments[0], arguments[1])
            return result
        case "quantize":
            return to_fp8(arguments[0].astype(np.float32), arguments[1].astype(np.float32))
    return _in_float(operation, [argument.astype(np.float32) for argument in arguments]).astype(target)


def _in_float(operation: Operation, arguments: list[Array]) -> Array:
    settings, first = operation.settings, arguments[0]
    result: Array
    match operation.kind:
        case "matmul":
            a = np.swapaxes(first, -1, -2) if settings["transpose_a"] else first
            b = np.swapaxes(arguments[1], -1, -2) if settings["transpose_b"] else arguments[1]
            result = a @ b
        case "elementwise":
            result = _ARITHMETIC[settings["op"]](first, arguments[1])
        case "unary":
            result = _UNARY[settings["op"]](first)
        case "sigmoid":
            result = 1.0 / (1.0 + np.exp(-first))
        case "mean":
            result = first.mean(axis=settings["axis"], keepdims=True)
        case "softmax":
            exponent = np.exp(first - first.max(axis=settings["axis"], keepdims=True))
            result = exponent / exponent.sum(axis=settings["axis"], keepdims=True)
        case "dequantize":
            result = first * arguments[1]
        case kind:
            raise GraphError(f"the interpreter does not know the operation {kind}")
    return result


def _resolve(operation: Operation, size: int, extents: dict[str, int]) -> tuple[int, ...]:
    shape = [extents.get(extent, -1) if isinstance(extent, str) else extent for extent in operation.output.shape]
    if -1 not in shape and int(np.prod(shape)) != size:
        raise GraphError(f"reshape {operation.name}: {size} values do not fit {operation.output.shape}")
    return tuple(shape)


_LOGIC: dict[str, Callable[..., Array]] = {"equal": np.equal, "greater": np.greater, "and": np.logical_and}
_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}
_UNARY: dict[str, Callable[..., Array]] = {
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
    "exp": np.exp,
    "negate": np.negative,
}
