# SPDX-License-Identifier: Apache-2.0
"""The network of the Llama family without cache and head, in the operations of `engines.graph.ir`.

Inputs, all int32: `input_ids`, `positions`, `segments` [rows, row_tokens], `last_rows` [prompts]. A prompt lies in one
row; its tokens share a segment number there and are numbered from 0 in `positions`. `last_rows` holds, for each prompt,
row * row_tokens + the place of its last token. Padding has segment -1. A network that is not packed has no `positions`
and no `segments`: each prompt has a row of its own and begins it, and what lies behind it changes nothing.

Outputs: `hidden` [prompts, hidden_size], the state after the final norm; `layer_<i>` likewise, the residual stream
after layer i, for each further layer asked for.

Attention is matmul, mask, softmax, matmul, because 10.6 has no attention layer; its builder fuses the four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from engines.graph.ir import DTYPES, Graph, Tensor

if TYPE_CHECKING:
    from engines.model_config import ModelShape

MASKED = -30000.0
"""Added to scores of pairs that must not see each other: finite in every format used, and exp() of it is 0."""


class Weights(Protocol):
    """Where weights come from: one array a name of the checkpoint, in its own number format."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Returns a weight; raises KeyError where there is none of that name."""


@dataclass(frozen=True, slots=True)
class Fp8Scales:
    """Per-tensor scales of the inputs of every quantised matrix product, by the product's name in the network.

    A scale is the largest magnitude seen while calibrating, divided by 448.
    """

    activations: dict[str, float]


QUANTIZED_INPUTS = {"input_norm.weighted": "qkv", "attention_out": "o", "mlp_norm.weighted": "mlp", "gated": "down"}
"""Operations of a layer whose results are inputs of quantised products, and what `Fp8Scales` calls those."""


@dataclass(slots=True)
class _Layer:
    graph: Graph
    shape: ModelShape
    weights: Weights
    index: int
    dtype: str
    scales: Fp8Scales | None
    row_tokens: int

    def weight(self, name: str) -> npt.NDArray[Any]:
        return self.weights[f"model.layers.{self.index}.{name}.weight"]


def build_network(
    shape: ModelShape,
    weights: Weights,
    *,
    row_tokens: int = 128,
    packed: bool = True,
    dtype: str = "bfloat16",
    scales: Fp8Scales | None = None,
    layers: tuple[int, ...] = (-1,),
) -> Graph:
    """Records the network.

    Args:
        shape: The model's figures.
        weights: The checkpoint.
        row_tokens: Tokens of one row; the longest prompt.
        packed: Whether prompts share rows. Where they do not, mask and positions are constants, which the builder fuses
            further: faster for prompts that fill their rows, slower for others.
        dtype: Number format of activations and, without `scales`, of weights.
        scales: Where given, every weight product runs in FP8 (e4m3) behind explicit quantise and dequantise.
        layers: Which states to return, -1 for the one after the final norm.

    Returns:
        The graph, with dynamic extents `rows` and `prompts`.
    """
    graph = Graph()
    ids = graph.input("input_ids", "int32", ("rows", row_tokens))
    positions, segments = (
        graph.input(name, "int32", ("rows", row_tokens)) if packed else None for name in ("positions", "segments")
    )
    last_rows = graph.input("last_rows", "int32", ("prompts",))
    embedding = graph.constant("embedding", _as(weights["model.embed_tokens.weight"], dtype))
    x = graph.gather("embedded", embedding, ids, axis=0)
    x = graph.reshape("tokens", x, ("tokens", shape.hidden_size))
    mask = _mask(graph, segments, row_tokens, dtype)
    rope = _rope(graph, shape, positions, row_tokens)
    for index in range(shape.layers):
        layer = _Layer(graph, shape, weights, index, dtype, scales, row_tokens)
        with graph.scope(f"layers_{index}"):
            x = _layer(layer, x, mask, rope)
        if index in layers:
            graph.output(f"layer_{index}", graph.gather(f"last_{index}", x, last_rows, axis=0))
    if -1 in layers:
        last = graph.gather("last", x, last_rows, axis=0)
        graph.output(
            "hidden", _norm(graph, "final_norm", last, weights["model.norm.weight"], shape.norm_epsilon, dtype)
        )
    return graph


def _layer(layer: _Layer, x: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    graph, shape, weight = layer.graph, layer.shape, layer.weight
    normed = _norm(graph, "input_norm", x, weight("input_layernorm"), shape.norm_epsilon, layer.dtype)
    normed = _quantized(layer, "qkv", normed)
    q = _linear(layer, "q_proj", _halves_first(weight("self_attn.q_proj"), shape.heads), normed)
    k = _linear(layer, "k_proj", _halves_first(weight("self_attn.k_proj"), shape.kv_heads), normed)
    v = _linear(layer, "v_proj", weight("self_attn.v_proj"), normed)
    attended = _quantized(layer, "o", _attention(layer, q, k, v, mask, rope))
    x = graph.elementwise("attended", "add", x, _linear(layer, "o_proj", weight("self_attn.o_proj"), attended))
    normed = _norm(graph, "mlp_norm", x, weight("post_attention_layernorm"), shape.norm_epsilon, layer.dtype)
    normed = _quantized(layer, "mlp", normed)
    gate, up = (_linear(layer, f"{word}_proj", weight(f"mlp.{word}_proj"), normed) for word in ("gate", "up"))
    silu = graph.elementwise("silu", "mul", gate, graph.sigmoid("gate_sigmoid", gate))
    product = _quantized(layer, "down", graph.elementwise("gated", "mul", silu, up))
    return graph.elementwise("out", "add", x, _linear(layer, "down_proj", weight("mlp.down_proj"), product))


def _attention(layer: _Layer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    graph, shape, tokens = layer.graph, layer.shape, layer.row_tokens
    groups = shape.heads // shape.kv_heads
    q = _rotate(layer, "q", q, shape.heads, rope)
    k = _rotate(layer, "k", k, shape.kv_heads, rope)
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


def _halves_first(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Orders the rows of a projection by half, head, place instead of head, half, place.

    Rotary positions exchange the halves of every head. So laid out, that exchanges two long runs of memory instead of
    many short ones. Scores do not change, since queries and keys are ordered alike within a head.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(0, 1).reshape(rows, columns)


def _rotate(layer: _Layer, name: str, x: Tensor, heads: int, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: both halves of a head times cosine, plus the halves exchanged times signed sine.

    Takes [tokens, 2 * heads * half] as `_halves_first` orders it; returns [rows, heads, row_tokens, head_size].
    """
    graph, tokens, half = layer.graph, layer.row_tokens, layer.shape.head_size // 2
    cosine, sine = rope
    split = graph.cast(f"{name}_wide", graph.reshape(f"{name}_halves", x, ("rows", tokens, 2, heads, half)), "float32")
    order = graph.constant(f"{name}_order", np.array([1, 0], np.int32))
    turned = graph.elementwise(f"{name}_sine", "mul", graph.gather(f"{name}_exchanged", split, order, axis=2), sine)
    rotated = graph.elementwise(
        f"{name}_rotated", "add", graph.elementwise(f"{name}_cosine", "mul", split, cosine), turned
    )
    narrow = graph.transpose(f"{name}_by_head", graph.cast(f"{name}_narrow", rotated, layer.dtype), (0, 3, 1, 2, 4))
    return graph.reshape(f"{name}_heads", narrow, ("rows", heads, tokens, layer.shape.head_size))


def _rope(graph: Graph, shape: ModelShape, positions: Tensor | None, row_tokens: int) -> tuple[Tensor, Tensor]:
    half = shape.head_size // 2
    frequency = shape.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = np.arange(row_tokens, dtype=np.float64)[:, None] * frequency
    cosine = np.cos(angle).astype(np.float32)
    signed = np.stack((-np.sin(angle), np.sin(angle)), axis=1).astype(np.float32)
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


def _norm(graph: Graph, name: str, x: Tensor, weight: npt.NDArray[Any], epsilon: float, dtype: str) -> Tensor:
    with graph.scope(name):
        wide = graph.cast("wide", x, "float32")
        square = graph.mean("mean", graph.elementwise("square", "mul", wide, wide), axis=1)
        offset = graph.constant("epsilon", np.full((1, 1), epsilon, np.float32))
        root = graph.unary("root", "sqrt", graph.elementwise("above_zero", "add", square, offset))
        normed = graph.cast("normed", graph.elementwise("scaled", "div", wide, root), dtype)
        return graph.elementwise("weighted", "mul", normed, graph.constant("weight", _as(weight, dtype)[None, :]))


def _quantized(layer: _Layer, name: str, x: Tensor) -> Tensor:
    """Passes an activation through FP8, once for all products that read it."""
    if layer.scales is None:
        return x
    graph = layer.graph
    scale = graph.constant(
        f"{name}_scale", np.array(layer.scales.activations[f"layers_{layer.index}.{name}"], np.float32)
    )
    quantized = graph.quantize(f"{name}_fp8", x, scale)
    return graph.dequantize(f"{name}_real", quantized, scale, layer.dtype)


def _linear(layer: _Layer, name: str, weight: npt.NDArray[Any], x: Tensor) -> Tensor:
    graph = layer.graph
    if layer.scales is None:
        w = graph.constant(f"{name}_weight", _as(weight, layer.dtype))
    else:
        wide = weight.astype(np.float32)
        scale = max(float(np.abs(wide).max()), 1e-12) / 448.0
        fp8 = graph.constant(f"{name}_weight", (wide / scale).astype(ml_dtypes.float8_e4m3fn))
        w = graph.dequantize(
            f"{name}_weight_real", fp8, graph.constant(f"{name}_weight_scale", np.array(scale, np.float32)), layer.dtype
        )
    return graph.matmul(name, x, w, transpose_b=True)


def _as(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    return array if array.dtype == DTYPES[dtype] else array.astype(DTYPES[dtype])
