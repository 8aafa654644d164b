# SPDX-License-Identifier: Apache-2.0
"""One layer while it is recorded: its weights, its products in 16 bits or FP8, and which parts of it are one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from engines.graph.fused_kernels import FP8_LARGEST, to_fp8
from engines.graph.ir import DTYPES, Graph, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import ml_dtypes

    from engines.model_config import ModelShape

_LEAST = 1e-12
"""Stands for the largest magnitude of a weight that is 0 everywhere."""


class Weights(Protocol):
    """Where weights come from: one array a name of the checkpoint, in its own number format."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Returns a weight; raises KeyError where there is none of that name."""


@runtime_checkable
class QuantizedWeights(Protocol):
    """Weights that come in FP8 as well, for who has a faster way to it than NumPy."""

    def fp8(self, names: tuple[str, ...]) -> tuple[npt.NDArray[ml_dtypes.float8_e4m3fn], float]:
        """Returns weights below each other in e4m3, and the one scale by which they are multiplied."""


@dataclass(frozen=True, slots=True)
class Fp8Scales:
    """Per-tensor scales of the inputs of every quantised matrix product, by the product's name in the network.

    A scale is the largest magnitude seen while calibrating, divided by 448.
    """

    activations: dict[str, float]


PARTS: Final = ("attention", "norm", "gated_unit")
"""What of a layer can be a kernel of our own."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """Which parts of a layer are one kernel of our own each, which a builder takes as a plugin; the rest is recorded.

    With `attention`, queries, keys and values also come of one product, and with `gated_unit` its two inputs do.
    """

    attention: bool = False
    norm: bool = False
    gated_unit: bool = False
    fp8_results: bool = True
    """Whether in an FP8 network a kernel's result leaves it as FP8; otherwise in 16 bits, quantised by the builder."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are kernels of our own."""
        return tuple(part for part in PARTS if getattr(self, part))

    @property
    def all_parts(self) -> bool:
        """Whether every part that can be is a kernel of our own."""
        return self.parts == PARTS


RECORDED = Fusion()
"""Nothing but operations that every builder knows."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What recording one layer needs.

    Attributes:
        graph: Where operations are recorded.
        shape: The model's figures.
        weights: The checkpoint.
        index: Of the layer.
        dtype: Number format of activations and, without `scales`, of weights.
        scales: Of the inputs of products; None where products are in `dtype`.
        row_tokens: Tokens of a row.
        fusion: Which parts are one kernel each.
    """

    graph: Graph
    shape: ModelShape
    weights: Weights
    index: int
    dtype: str
    scales: Fp8Scales | None
    row_tokens: int
    fusion: Fusion

    def weight(self, name: str) -> npt.NDArray[Any]:
        """A weight of this layer in the network's number format, such as `input_layernorm`."""
        return as_dtype(self.weights[self._full(name)], self.dtype)

    def result_scale(self, product: str) -> float:
        """Scale with which a kernel hands its result to a product in FP8; 0 where it leaves in 16 bits."""
        if self.scales is None or not self.fusion.fp8_results:
            return 0.0
        return self.scales.activations[self._key(product)]

    def input_of(self, product: str, x: Tensor) -> Tensor:
        """An activation as products read it: in FP8 it passes through that format, once for all that read it."""
        if self.scales is None:
            return x
        factor = np.array(self.scales.activations[self._key(product)], np.float32)
        scale = self.graph.constant(f"{product}_scale", factor)
        narrow = x if x.dtype == "fp8_e4m3" else self.graph.quantize(f"{product}_fp8", x, scale)
        return self.graph.dequantize(f"{product}_real", narrow, scale, self.dtype)

    def product(
        self,
        name: str,
        x: Tensor,
        *weights: str,
        arranged: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = lambda weight: weight,
    ) -> Tensor:
        """Product with a weight, or with several below each other, whose results then stand beside each other.

        Args:
            name: Of the operation.
            x: [tokens, inner].
            weights: Names within the layer, such as `self_attn.q_proj`.
            arranged: Orders the rows of the weight anew.
        """
        graph, names = self.graph, tuple(map(self._full, weights))
        if self.scales is None:
            value = as_dtype(_below_each_other(self.weights, names), self.dtype)
            w = graph.constant(f"{name}_weight", arranged(value))
        else:
            narrow, scale = _fp8(self.weights, names)
            w = graph.dequantize(
                f"{name}_weight_real",
                graph.constant(f"{name}_weight", arranged(narrow)),
                graph.constant(f"{name}_weight_scale", np.array(scale, np.float32)),
                self.dtype,
            )
        return graph.matmul(name, x, w, transpose_b=True)

    def _key(self, product: str) -> str:
        return f"layers_{self.index}.{product}"

    def _full(self, name: str) -> str:
        return f"model.layers.{self.index}.{name}.weight"


def as_dtype(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """An array in a number format of `engines.graph.ir`; itself where it has that already."""
    return array if array.dtype == DTYPES[dtype] else array.astype(DTYPES[dtype])


def _below_each_other(weights: Weights, names: tuple[str, ...]) -> npt.NDArray[Any]:
    return weights[names[0]] if len(names) == 1 else np.concatenate([weights[name] for name in names])


def _fp8(weights: Weights, names: tuple[str, ...]) -> tuple[npt.NDArray[ml_dtypes.float8_e4m3fn], float]:
    if isinstance(weights, QuantizedWeights):
        return weights.fp8(names)
    wide = _below_each_other(weights, names).astype(np.float32)
    scale = max(float(np.abs(wide).max()), _LEAST) / FP8_LARGEST
    return to_fp8(wide, scale), scale
