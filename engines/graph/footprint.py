# SPDX-License-Identifier: Apache-2.0
"""What a recorded network holds in memory at once while a builder's plan of it runs: an estimate before there is one.

Builders keep few of the recorded values: a chain of element-by-element operations becomes one kernel, and only what
goes into or comes out of a matrix product or a kernel of our own, what several kernels read, and the network's outputs
lie in memory. That is the rule here. Each such value lives from the kernel that makes it to the last that reads it,
kernels run in recorded order, and the peak is the most that lives at once. Where a product wants scratch memory of its
own, a builder takes more than this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from engines.graph.ir import DTYPES
from engines.graph.plugins import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engines.graph.ir import Graph, Operation, Tensor

_SAME_MEMORY: Final = ("reshape", "identity", "dequantize")
"""Operations that no kernel is made for: views, and what a product does to its FP8 inputs itself."""
_RECOMPUTED: Final = ("cast",)
"""Cheap enough that every kernel that reads the result makes it anew."""

_OWN_KERNEL: Final = frozenset(("matmul", *NAMES))
"""Operations that are a kernel, whatever stands before and behind them: inputs and result lie in memory."""


def peak_bytes(graph: Graph, extents: Mapping[str, int]) -> int:
    """Most bytes of intermediate values that live at once; neither inputs, constants nor outputs are counted.

    Args:
        graph: The network.
        extents: Size of every dynamic extent that its values name.

    Raises:
        KeyError: An extent is missing.
    """
    made_by = {operation.output.name: operation for operation in graph.operations}
    kept = _kept(graph, made_by)
    apart = {_memory(tensor.name, made_by) for tensor in (*graph.inputs, *graph.outputs)}
    last: dict[str, int] = {}
    for place, operation in enumerate(graph.operations):
        if operation.output.name in kept:
            last |= dict.fromkeys(_read(operation, kept, made_by), place)
    most = now = 0
    sizes: dict[str, int] = {}
    for place, operation in enumerate(graph.operations):
        name = operation.output.name
        if name not in kept:
            continue
        if name not in apart:
            sizes[name] = _bytes(operation.output, extents)
            now += sizes[name]
        most = max(most, now)
        for ended in [each for each in sizes if last.get(each, -1) <= place and each != name]:
            now -= sizes.pop(ended)
    return most


def _kept(graph: Graph, made_by: Mapping[str, Operation]) -> frozenset[str]:
    """Names of the values that lie in memory."""
    readers: dict[str, list[str]] = {}
    for operation in graph.operations:
        for tensor in operation.inputs:
            readers.setdefault(_memory(tensor.name, made_by), []).append(operation.kind)
    found = set()
    for operation in graph.operations:
        name = operation.output.name
        if operation.kind == "constant" or operation.kind in _SAME_MEMORY:
            continue
        kinds = [kind for kind in readers.get(name, []) if kind not in _SAME_MEMORY]
        several = len(kinds) > 1 and operation.kind not in _RECOMPUTED
        if operation.kind in _OWN_KERNEL or not _OWN_KERNEL.isdisjoint(kinds) or several:
            found.add(name)
    found.update(_memory(tensor.name, made_by) for tensor in graph.outputs)
    return frozenset(found)


def _memory(name: str, made_by: Mapping[str, Operation]) -> str:
    """The value in whose memory another one lies."""
    while name in made_by and made_by[name].kind in _SAME_MEMORY:
        name = made_by[name].inputs[0].name
    return name


def _read(operation: Operation, kept: frozenset[str], made_by: Mapping[str, Operation]) -> set[str]:
    """Values in memory that the kernel which ends with an operation reads."""
    found: set[str] = set()
    waiting = [_memory(tensor.name, made_by) for tensor in operation.inputs]
    while waiting:
        name = waiting.pop()
        if name in kept:
            found.add(name)
        elif name in made_by:
            waiting += [_memory(tensor.name, made_by) for tensor in made_by[name].inputs]
    return found


def _bytes(tensor: Tensor, extents: Mapping[str, int]) -> int:
    sizes = (extents[extent] if isinstance(extent, str) else extent for extent in tensor.shape)
    return math.prod(sizes) * DTYPES[tensor.dtype].itemsize
