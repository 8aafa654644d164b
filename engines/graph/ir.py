# SPDX-License-Identifier: Apache-2.0
"""The recorded form of a network: tensors, operations, and the graph that holds them in order.

Shapes are tuples of extents; a string is a dynamic extent, known by that name at run time. Number formats are the
words of `DTYPES`. Types are strict: no operation converts a number format silently, as in a strongly typed network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Extent = int | str
Shape = tuple[Extent, ...]

DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "int32": np.dtype(np.int32),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Number formats and their NumPy types."""

ELEMENTWISE = ("add", "sub", "mul", "div", "equal", "greater", "and")
UNARY = ("sqrt", "reciprocal", "exp", "negate")


class GraphError(ValueError):
    """An operation was given tensors that it cannot take; the message names the operation and the tensors."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the network."""

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Operation:
    """One layer: `kind` with its inputs, its settings, its output and, of few, outputs beside it."""

    kind: str
    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    settings: dict[str, Any] = field(default_factory=dict)
    beside: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Graph:
    """A network under construction. Methods append one operation and return its output tensor.

    Attributes:
        inputs: Named inputs in the order of their declaration.
        operations: In an order in which they can be computed.
        constants: Values of `constant` operations by tensor name.
        outputs: Tensors that the network returns.
    """

    inputs: list[Tensor] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    _scope: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def input(self, name: str, dtype: str, shape: Shape) -> Tensor:
        """Declares an input."""
        tensor = Tensor(self._unique(name), dtype, shape)
        self.inputs.append(tensor)
        return tensor

    def output(self, name: str, tensor: Tensor) -> Tensor:
        """Marks a value as an output under a name of its own."""
        marked = self._append("identity", name, (tensor,), tensor.dtype, tensor.shape)
        self.outputs.append(marked)
        return marked

    def constant(self, name: str, value: npt.NDArray[Any]) -> Tensor:
        """Adds a constant; the array is kept, not copied.

        Raises:
            GraphError: The array's type is not one of `DTYPES`.
        """
        for word, dtype in DTYPES.items():
            if dtype == value.dtype:
                tensor = self._append("constant", name, (), word, tuple(value.shape))
                self.constants[tensor.name] = value
                return tensor
        raise GraphError(f"constant {name}: number format {value.dtype} is none of {', '.join(DTYPES)}")

    def gather(self, name: str, data: Tensor, indices: Tensor, *, axis: int) -> Tensor:
        """Takes slices of `data` along `axis`; the extents of `indices` (int32) replace that axis."""
        if indices.dtype != "int32":
            raise GraphError(f"gather {name}: indices {indices.name} are {indices.dtype}, must be int32")
        shape = data.shape[:axis] + indices.shape + data.shape[axis + 1 :]
        return self._append("gather", name, (data, indices), data.dtype, shape, axis=axis)

    def matmul(
        self, name: str, a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False
    ) -> Tensor:
        """Matrix product over the last two axes; leading axes are equal or 1 and broadcast."""
        self._same("matmul", name, a, b)
        if len(a.shape) != len(b.shape):
            raise GraphError(f"matmul {name}: {a.name} {a.shape} and {b.name} {b.shape} differ in rank")
        rows, inner_a = (a.shape[-1], a.shape[-2]) if transpose_a else (a.shape[-2], a.shape[-1])
        inner_b, columns = (b.shape[-1], b.shape[-2]) if transpose_b else (b.shape[-2], b.shape[-1])
        if inner_a != inner_b:
            raise GraphError(f"matmul {name}: inner extents {inner_a} and {inner_b} differ")
        shape = (*_broadcast("matmul", name, a.shape[:-2], b.shape[:-2]), rows, columns)
        return self._append("matmul", name, (a, b), a.dtype, shape, transpose_a=transpose_a, transpose_b=transpose_b)

    def elementwise(self, name: str, op: str, a: Tensor, b: Tensor) -> Tensor:
        """Element by element with broadcasting of extents 1; comparisons give bool."""
        self._same("elementwise", name, a, b)
        if op not in ELEMENTWISE:
            raise GraphError(f"elementwise {name}: {op} is none of {', '.join(ELEMENTWISE)}")
        if len(a.shape) != len(b.shape):
            raise GraphError(f"elementwise {name}: {a.name} {a.shape} and {b.name} {b.shape} differ in rank")
        dtype = "bool" if op in ("equal", "greater", "and") else a.dtype
        return self._append("elementwise", name, (a, b), dtype, _broadcast(op, name, a.shape, b.shape), op=op)

    def unary(self, name: str, op: str, x: Tensor) -> Tensor:
        """Element by element."""
        if op not in UNARY:
            raise GraphError(f"unary {name}: {op} is none of {', '.join(UNARY)}")
        return self._append("unary", name, (x,), x.dtype, x.shape, op=op)

    def sigmoid(self, name: str, x: Tensor) -> Tensor:
        """Logistic function, element by element."""
        return self._append("sigmoid", name, (x,), x.dtype, x.shape)

    def mean(self, name: str, x: Tensor, *, axis: int) -> Tensor:
        """Mean over one axis, which stays with extent 1."""
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        return self._append("mean", name, (x,), x.dtype, shape, axis=axis)

    def softmax(self, name: str, x: Tensor, *, axis: int) -> Tensor:
        """Softmax over one axis."""
        return self._append("softmax", name, (x,), x.dtype, x.shape, axis=axis)

    def reshape(self, name: str, x: Tensor, shape: Shape) -> Tensor:
        """Gives other extents to the same values in the same order; at most one extent may be dynamic."""
        if sum(isinstance(extent, str) for extent in shape) > 1:
            raise GraphError(f"reshape {name}: {shape} has more than one dynamic extent")
        return self._append("reshape", name, (x,), x.dtype, shape)

    def transpose(self, name: str, x: Tensor, permutation: tuple[int, ...]) -> Tensor:
        """Orders axes anew."""
        shape = tuple(x.shape[axis] for axis in permutation)
        return self._append("transpose", name, (x,), x.dtype, shape, permutation=permutation)

    def cast(self, name: str, x: Tensor, dtype: str) -> Tensor:
        """Converts the number format."""
        if x.dtype == dtype:
            return x
        return self._append("cast", name, (x,), dtype, x.shape)

    def select(self, name: str, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """`a` where the condition (bool) holds, `b` elsewhere, with broadcasting."""
        self._same("select", name, a, b)
        shape = _broadcast("select", name, condition.shape, _broadcast("select", name, a.shape, b.shape))
        return self._append("select", name, (condition, a, b), a.dtype, shape)

    def quantize(self, name: str, x: Tensor, scale: Tensor) -> Tensor:
        """`x / scale`, rounded to FP8 (e4m3), values beyond its range held at +-448; one scale for the tensor."""
        return self._append("quantize", name, (x, scale), "fp8_e4m3", x.shape)

    def dequantize(self, name: str, x: Tensor, scale: Tensor, dtype: str) -> Tensor:
        """`x * scale` of an FP8 tensor in another number format."""
        if x.dtype != "fp8_e4m3":
            raise GraphError(f"dequantize {name}: {x.name} is {x.dtype}, must be fp8_e4m3")
        return self._append("dequantize", name, (x, scale), dtype, x.shape)

    def packed_attention(
        self,
        name: str,
        qkv: Tensor,
        positions: Tensor | None,
        segments: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        row_tokens: int,
        output_scale: float = 0.0,
    ) -> Tensor:
        """Rotary positions, causal attention and all between the q/k/v product and the o product, as one kernel.

        Args:
            name: Of the operation.
            qkv: [tokens, (heads + 2 * kv_heads) * head_size]: of each token the queries of all heads, then the keys,
                then the values; tokens are rows of `row_tokens`. bfloat16; float32, which no kernel takes, for proofs.
            positions: int32 [rows, row_tokens], a token's place in its prompt; None where prompts have rows of their
                own, so that it is the place in the row.
            segments: int32 [rows, row_tokens]: tokens see those of their own segment alone; None as for `positions`.
            cosine: float32 [row_tokens, head_size / 2], by position.
            sine: Likewise.
            heads: Heads of queries.
            kv_heads: Heads of keys and values, each for `heads / kv_heads` heads of queries.
            head_size: Values of a head.
            row_tokens: Tokens of a row.
            output_scale: 0: the result has the type of `qkv`. Above 0: it is FP8 (e4m3) of the value over this.

        Returns:
            [tokens, heads * head_size].

        Raises:
            GraphError: Types or extents do not fit.
        """
        half = head_size // 2
        expected: list[tuple[Tensor, tuple[str, ...], Shape]] = [
            (qkv, ("bfloat16", "float32"), (qkv.shape[0], (heads + 2 * kv_heads) * head_size)),
            (cosine, ("float32",), (row_tokens, half)),
            (sine, ("float32",), (row_tokens, half)),
        ]
        if (positions is None) != (segments is None):
            raise GraphError(f"packed_attention {name}: positions and segments are given together or not at all")
        packing = () if positions is None or segments is None else (positions, segments)
        expected += [(tensor, ("int32",), (tensor.shape[0], row_tokens)) for tensor in packing]
        for tensor, dtypes, shape in expected:
            if tensor.dtype not in dtypes or tensor.shape != shape:
                raise GraphError(
                    f"packed_attention {name}: {tensor.name} is {tensor.dtype} {tensor.shape}, must be "
                    f"{' or '.join(dtypes)} {shape}"
                )
        if heads % kv_heads or head_size % 2:
            raise GraphError(f"packed_attention {name}: {heads} heads of {head_size} for {kv_heads} heads of keys")
        return self._append(
            "packed_attention",
            name,
            (qkv, *packing, cosine, sine),
            self._scaled("packed_attention", name, qkv, output_scale),
            (qkv.shape[0], heads * head_size),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            row_tokens=row_tokens,
            packed=bool(packing),
            output_scale=float(output_scale),
        )

    def gated_unit(self, name: str, x: Tensor, *, output_scale: float = 0.0) -> Tensor:
        """SiLU of the first half of each row times the second half, as one kernel.

        Args:
            name: Of the operation.
            x: [tokens, 2 * inner], the gate's product and then the other.
            output_scale: As for `packed_attention`.

        Returns:
            [tokens, inner].

        Raises:
            GraphError: `x` has an odd extent, or the scale is negative.
        """
        width = x.shape[1]
        if not isinstance(width, int) or width % 2:
            raise GraphError(f"gated_unit {name}: {x.name} {x.shape} does not fall into halves")
        dtype = self._scaled("gated_unit", name, x, output_scale)
        return self._append("gated_unit", name, (x,), dtype, (x.shape[0], width // 2), output_scale=float(output_scale))

    def norm(self, name: str, x: Tensor, weight: Tensor, *, epsilon: float, output_scale: float = 0.0) -> Tensor:
        """Root-mean-square norm of each row and its weight, as one kernel.

        Args:
            name: Of the operation.
            x: [tokens, hidden].
            weight: [hidden], of the type of `x`.
            epsilon: Added to the mean of squares.
            output_scale: As for `packed_attention`.

        Raises:
            GraphError: Types or extents do not fit, or the scale is negative.
        """
        return self._norm(name, (x,), weight, epsilon, output_scale).output

    def added_norm(
        self, name: str, x: Tensor, addend: Tensor, weight: Tensor, *, epsilon: float, output_scale: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """The norm of a sum, as one kernel: see `norm`.

        Args:
            name: Of the operation.
            x: [tokens, hidden].
            addend: Of the same type and extents. The sum is rounded to that type before it is normed.
            weight: As for `norm`.
            epsilon: Likewise.
            output_scale: Likewise; of the norm alone.

        Returns:
            The sum, and its norm.

        Raises:
            GraphError: Types or extents do not fit, or the scale is negative.
        """
        self._same("norm", name, x, addend)
        if addend.shape != x.shape:
            raise GraphError(f"norm {name}: {x.name} {x.shape} and {addend.name} {addend.shape} do not fit")
        operation = self._norm(name, (x, addend), weight, epsilon, output_scale)
        return operation.beside[0], operation.output

    def _norm(
        self, name: str, terms: tuple[Tensor, ...], weight: Tensor, epsilon: float, output_scale: float
    ) -> Operation:
        x, added = terms[0], len(terms) > 1
        self._same("norm", name, x, weight)
        if weight.shape != x.shape[1:]:
            raise GraphError(f"norm {name}: {x.name} {x.shape} and {weight.name} {weight.shape} do not fit")
        dtype = self._scaled("norm", name, x, output_scale)
        full = self._unique(name)
        beside = (Tensor(self._unique(f"{name}_sum"), x.dtype, x.shape),) if added else ()
        settings = {"epsilon": float(epsilon), "added": added, "output_scale": float(output_scale)}
        operation = Operation("norm", full, (*terms, weight), Tensor(full, dtype, x.shape), settings, beside)
        self.operations.append(operation)
        return operation

    def scope(self, name: str) -> _Scope:
        """Prefixes names of operations added inside a `with` block."""
        return _Scope(self, name)

    def _append(
        self, kind: str, name: str, inputs: tuple[Tensor, ...], dtype: str, shape: Shape, **settings: Any
    ) -> Tensor:
        full = self._unique(name)
        output = Tensor(full, dtype, shape)
        self.operations.append(Operation(kind, full, inputs, output, settings))
        return output

    def _unique(self, name: str) -> str:
        full = ".".join((*self._scope, name))
        if full in self._names:
            raise GraphError(f"the name {full} is taken")
        self._names.add(full)
        return full

    @staticmethod
    def _scaled(kind: str, name: str, x: Tensor, output_scale: float) -> str:
        """Number format of what a kernel gives that may scale its result to FP8."""
        if output_scale < 0:
            raise GraphError(f"{kind} {name}: output_scale is {output_scale}, must be 0 or more")
        return "fp8_e4m3" if output_scale else x.dtype

    @staticmethod
    def _same(kind: str, name: str, a: Tensor, b: Tensor) -> None:
        if a.dtype != b.dtype:
            raise GraphError(f"{kind} {name}: {a.name} is {a.dtype}, {b.name} is {b.dtype}")


@dataclass(slots=True)
class _Scope:
    graph: Graph
    name: str

    def __enter__(self) -> None:
        self.graph._scope.append(self.name)

    def __exit__(self, *_: object) -> None:
        self.graph._scope.pop()


def _broadcast(kind: str, name: str, a: Shape, b: Shape) -> Shape:
    width = max(len(a), len(b))
    padded_a, padded_b = (1,) * (width - len(a)) + a, (1,) * (width - len(b)) + b
    shape: list[Extent] = []
    for one, other in zip(padded_a, padded_b, strict=True):
        if one != other and 1 not in (one, other):
            raise GraphError(f"{kind} {name}: extents {one} and {other} of {a} and {b} do not fit")
        shape.append(other if one == 1 else one)
    return tuple(shape)
