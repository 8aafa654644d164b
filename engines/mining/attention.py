# SPDX-License-Identifier: Apache-2.0
"""Attention over packed rows, from the q/k/v products to what the o product reads: recorded, or as one kernel.

Recorded, it is matmul, mask, softmax, matmul, since TensorRT 10.6 has no attention layer, with rotary positions before
them. Its builder makes about ten kernels of that where the mask depends on an input (docs/gpu-truth.md). The kernel of
our own reads queries, keys and values once and writes the result once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from engines.graph.ir import DTYPES, Graph, Tensor

if TYPE_CHECKING:
    from engines.mining.layer import Layer
    from engines.model_config import ModelShape

MASKED = -30000.0
"""Added to scores of pairs that must not see each other: finite in every format used, and exp() of it is 0."""
Q, K, V = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"


class Attention(Protocol):
    """What layers of a network have in common."""

    def __call__(self, layer: Layer, normed: Tensor) -> Tensor:
        """Records q/k/v products and attention.

        Args:
            layer: The layer.
            normed: Its normed input as products read it, [tokens, hidden_size].

        Returns:
            [tokens, heads * head_size], in the network's number format or in FP8.
        """


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """One product for queries, keys and values in the checkpoint's order, and one kernel for all the rest."""

    positions: Tensor | None
    segments: Tensor | None
    cosine: Tensor
    sine: Tensor

    @classmethod
    def begin(
        cls, graph: Graph, shape: ModelShape, positions: Tensor | None, segments: Tensor | None, row_tokens: int
    ) -> FusedAttention:
        """Records what layers share: cosine and sine by position."""
        cosine, sine = _turns(shape, row_tokens)
        return cls(positions, segments, graph.constant("rope_cosine", cosine), graph.constant("rope_sine", sine))

    def __call__(self, layer: Layer, normed: Tensor) -> Tensor:
        """See `Attention`."""
        shape = layer.shape
        return layer.graph.packed_attention(
            "attention_out",
            layer.product("qkv_proj", normed, Q, K, V),
            self.positions,
            self.segments,
            self.cosine,
            self.sine,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            row_tokens=layer.row_tokens,
            output_scale=layer.result_scale("o"),
        )


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """Operations that every builder knows."""

    mask: Tensor
    cosine: Tensor
    sine: Tensor

    @classmethod
    def begin(
        cls,
        graph: Graph,
        shape: ModelShape,
        positions: Tensor | None,
        segments: Tensor | None,
        row_tokens: int,
        dtype: str,
    ) -> RecordedAttention:
        """Records what layers share: the mask, and cosine and signed sine of each token."""
        mask = _mask(graph, segments, row_tokens, dtype)
        return cls(mask, *_rope(graph, shape, positions, row_tokens))

    def __call__(self, layer: Layer, normed: Tensor) -> Tensor:
        """See `Attention`."""
        graph, shape, tokens = layer.graph, layer.shape, layer.row_tokens
        groups, mask = shape.heads // shape.kv_heads, self.mask
        q = self._rotated(layer, "q", normed, Q, shape.heads)
        k = self._rotated(layer, "k", normed, K, shape.kv_heads)
        v = layer.product("v_proj", normed, V)
        v = graph.reshape("v_heads", v, ("rows", tokens, shape.kv_heads, shape.head_size))
        v = graph.transpose("v_by_head", v, (0, 2, 1, 3))
        if groups > 1:
            q = graph.reshape("q_groups", q, ("rows", shape.kv_heads, groups, tokens, shape.head_size))
            k, v = (
                graph.reshape(f"{name}_group", t, ("rows", shape.kv_heads, 1, tokens, shape.head_size))
                for name, t in (("k", k), ("v", v))
            )
            mask = graph.reshape("mask_groups", mask, (mask.shape[0], 1, 1, tokens, tokens))
        scale = graph.constant("scale", np.full((1,) * len(q.shape), shape.head_size**-0.5, DTYPES[layer.dtype]))
        scores = graph.elementwise("scaled", "mul", graph.matmul("scores", q, k, transpose_b=True), scale)
        scores = graph.elementwise("masked", "add", scores, mask)
        attended = graph.matmul("attend", graph.softmax("attention", scores, axis=len(scores.shape) - 1), v)
        if groups > 1:
            attended = graph.reshape("heads", attended, ("rows", shape.heads, tokens, shape.head_size))
        attended = graph.transpose("by_token", attended, (0, 2, 1, 3))
        return graph.reshape("attention_out", attended, ("tokens", shape.heads * shape.head_size))

    def _rotated(self, layer: Layer, name: str, normed: Tensor, weight: str, heads: int) -> Tensor:
        """Rotary positions: both halves of a head times cosine, plus the halves exchanged times signed sine.

        Returns:
            [rows, heads, row_tokens, head_size].
        """
        graph, tokens, half = layer.graph, layer.row_tokens, layer.shape.head_size // 2
        x = layer.product(f"{name}_proj", normed, weight, arranged=partial(_halves_first, heads=heads))
        halves = graph.reshape(f"{name}_halves", x, ("rows", tokens, 2, heads, half))
        wide = graph.cast(f"{name}_wide", halves, "float32")
        order = graph.constant(f"{name}_order", np.array([1, 0], np.int32))
        exchanged = graph.gather(f"{name}_exchanged", wide, order, axis=2)
        turned = graph.elementwise(f"{name}_sine", "mul", exchanged, self.sine)
        upright = graph.elementwise(f"{name}_cosine", "mul", wide, self.cosine)
        rotated = graph.elementwise(f"{name}_rotated", "add", upright, turned)
        narrow = graph.transpose(f"{name}_by_head", graph.cast(f"{name}_narrow", rotated, layer.dtype), (0, 3, 1, 2, 4))
        return graph.reshape(f"{name}_heads", narrow, ("rows", heads, tokens, layer.shape.head_size))


def _halves_first(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Orders the rows of a projection by half, head, place instead of head, half, place.

    Rotary positions exchange the halves of every head. So laid out, that exchanges two long runs of memory instead of
    many short ones. Scores do not change, since queries and keys are ordered alike within a head.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(0, 1).reshape(rows, columns)


def _turns(shape: ModelShape, row_tokens: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosine and sine of every position and frequency, [row_tokens, head_size / 2]."""
    half = shape.head_size // 2
    frequency = shape.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = np.arange(row_tokens, dtype=np.float64)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rope(graph: Graph, shape: ModelShape, positions: Tensor | None, row_tokens: int) -> tuple[Tensor, Tensor]:
    half = shape.head_size // 2
    cosine, sine = _turns(shape, row_tokens)
    signed = np.stack((-sine, sine), axis=1)
    if positions is None:
        return (
            graph.constant("cosine_of", cosine.reshape(1, row_tokens, 1, 1, half)),
            graph.constant("sine_of", signed.reshape(1, row_tokens, 2, 1, half)),
        )
    gathered_cosine = graph.gather("cosine", graph.constant("rope_cosine", cosine), positions, axis=0)
    gathered_sine = graph.gather("sine", graph.constant("rope_sine", signed), positions, axis=0)
    return (
        graph.reshape("cosine_of", gathered_cosine, ("rows", row_tokens, 1, 1, half)),
        graph.reshape("sine_of", gathered_sine, ("rows", row_tokens, 2, 1, half)),
    )


def _mask(graph: Graph, segments: Tensor | None, row_tokens: int, dtype: str) -> Tensor:
    earlier = np.tril(np.ones((1, 1, row_tokens, row_tokens), np.bool_))
    if segments is None:
        return graph.constant("mask", np.where(earlier, 0.0, MASKED).astype(DTYPES[dtype]))
    queries = graph.reshape("mask_queries", segments, ("rows", 1, row_tokens, 1))
    keys = graph.reshape("mask_keys", segments, ("rows", 1, 1, row_tokens))
    same = graph.elementwise("mask_same", "equal", queries, keys)
    allowed = graph.elementwise("mask_allowed", "and", same, graph.constant("mask_earlier", earlier))
    shape = (1, 1, 1, 1)
    zero = graph.constant("mask_zero", np.zeros(shape, DTYPES[dtype]))
    masked = graph.constant("mask_masked", np.full(shape, MASKED, DTYPES[dtype]))
    return graph.select("mask", allowed, zero, masked)
