# SPDX-License-Identifier: Apache-2.0
"""The network of the Llama family without cache and head, in the operations of `engines.graph.ir`.

Inputs, all int32: `input_ids`, `positions`, `segments` [rows, row_tokens], `last_rows` [prompts]. A prompt lies in one
row; its tokens share a segment number there and are numbered from 0 in `positions`. `last_rows` holds, for each prompt,
row * row_tokens + the place of its last token. Padding has segment -1. A network that is not packed has no `positions`
and no `segments`: each prompt has a row of its own and begins it, and what lies behind it changes nothing.

Outputs: `hidden` [prompts, hidden_size], the state after the final norm; `layer_<i>` likewise, the residual stream
after layer i, for each further layer asked for.

Attention, norms and the gated unit are operations that every builder knows, or one kernel of our own each (`Fusion`);
both compute the same but for what is rounded in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engines.graph.ir import Graph, Tensor
from engines.mining.attention import Attention, FusedAttention, RecordedAttention
from engines.mining.layer import RECORDED, Fp8Scales, Fusion, Layer, Weights, as_dtype

if TYPE_CHECKING:
    from engines.model_config import ModelShape

QUANTIZED_INPUTS = {"input_norm.weighted": "qkv", "attention_out": "o", "mlp_norm.weighted": "mlp", "gated": "down"}
"""Operations of a layer whose results are inputs of quantised products, and what `Fp8Scales` calls those."""


def build_network(
    shape: ModelShape,
    weights: Weights,
    *,
    row_tokens: int = 128,
    packed: bool = True,
    dtype: str = "bfloat16",
    scales: Fp8Scales | None = None,
    layers: tuple[int, ...] = (-1,),
    fused: Fusion = RECORDED,
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
        fused: Which parts of a layer are one kernel each. Builders need the plugin library for them.

    Returns:
        The graph, with dynamic extents `rows` and `prompts`.
    """
    graph = Graph()
    ids = graph.input("input_ids", "int32", ("rows", row_tokens))
    positions, segments = (
        graph.input(name, "int32", ("rows", row_tokens)) if packed else None for name in ("positions", "segments")
    )
    last_rows = graph.input("last_rows", "int32", ("prompts",))
    embedding = graph.constant("embedding", as_dtype(weights["model.embed_tokens.weight"], dtype))
    x = graph.gather("embedded", embedding, ids, axis=0)
    x = graph.reshape("tokens", x, ("tokens", shape.hidden_size))
    attention: Attention = (
        FusedAttention.begin(graph, shape, positions, segments, row_tokens)
        if fused.attention
        else RecordedAttention.begin(graph, shape, positions, segments, row_tokens, dtype)
    )
    addend: Tensor | None = None
    for index in range(shape.layers):
        layer = Layer(graph, shape, weights, index, dtype, scales, row_tokens, fused)
        with graph.scope(f"layers_{index}"):
            x, addend = _layer(layer, x, addend, attention)
            if not fused.norm or index in layers or index == shape.layers - 1:
                x, addend = graph.elementwise("out", "add", x, addend), None
        if index in layers:
            graph.output(f"layer_{index}", graph.gather(f"last_{index}", x, last_rows, axis=0))
    if -1 in layers:
        last = graph.gather("last", x, last_rows, axis=0)
        weight = as_dtype(weights["model.norm.weight"], dtype)
        graph.output("hidden", _recorded_norm(graph, "final_norm", last, weight, shape.norm_epsilon, dtype))
    return graph


def _layer(layer: Layer, x: Tensor, addend: Tensor | None, attention: Attention) -> tuple[Tensor, Tensor]:
    """One layer: from the terms of its input, the second of which may be added already, to those of its output."""
    graph = layer.graph
    x, normed = _norm(layer, "input_norm", "input_layernorm", x, addend, "qkv")
    attended = layer.input_of("o", attention(layer, layer.input_of("qkv", normed)))
    addend = layer.product("o_proj", attended, "self_attn.o_proj")
    if not layer.fusion.norm:
        x, addend = graph.elementwise("attended", "add", x, addend), None
    x, normed = _norm(layer, "mlp_norm", "post_attention_layernorm", x, addend, "mlp")
    gated = layer.input_of("down", _gated_unit(layer, layer.input_of("mlp", normed)))
    return x, layer.product("down_proj", gated, "mlp.down_proj")


def _norm(
    layer: Layer, name: str, weight: str, x: Tensor, addend: Tensor | None, product: str
) -> tuple[Tensor, Tensor]:
    """What is normed, and the norm, which a product reads. An addend goes with a norm of one kernel."""
    graph, epsilon = layer.graph, layer.shape.norm_epsilon
    if not layer.fusion.norm:
        return x, _recorded_norm(graph, name, x, layer.weight(weight), epsilon, layer.dtype)
    scale = layer.result_scale(product)
    with graph.scope(name):
        constant = graph.constant("weight", layer.weight(weight))
        if addend is None:
            return x, graph.norm("weighted", x, constant, epsilon=epsilon, output_scale=scale)
        return graph.added_norm("weighted", x, addend, constant, epsilon=epsilon, output_scale=scale)


def _recorded_norm(graph: Graph, name: str, x: Tensor, weight: npt.NDArray[Any], epsilon: float, dtype: str) -> Tensor:
    with graph.scope(name):
        wide = graph.cast("wide", x, "float32")
        square = graph.mean("mean", graph.elementwise("square", "mul", wide, wide), axis=1)
        offset = graph.constant("epsilon", np.full((1, 1), epsilon, np.float32))
        root = graph.unary("root", "sqrt", graph.elementwise("above_zero", "add", square, offset))
        normed = graph.cast("normed", graph.elementwise("scaled", "div", wide, root), dtype)
        return graph.elementwise("weighted", "mul", normed, graph.constant("weight", weight[None, :]))


def _gated_unit(layer: Layer, normed: Tensor) -> Tensor:
    graph = layer.graph
    if layer.fusion.gated_unit:
        both = layer.product("gate_up_proj", normed, "mlp.gate_proj", "mlp.up_proj")
        return graph.gated_unit("gated", both, output_scale=layer.result_scale("down"))
    gate, up = (layer.product(f"{word}_proj", normed, f"mlp.{word}_proj") for word in ("gate", "up"))
    silu = graph.elementwise("silu", "mul", gate, graph.sigmoid("gate_sigmoid", gate))
    return graph.elementwise("gated", "mul", silu, up)
