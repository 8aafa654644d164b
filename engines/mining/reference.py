# SPDX-License-Identifier: Apache-2.0
"""The Llama family written plainly: one prompt, float64, no packing, no graph. What the network is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engines.mining.layer import Weights
    from engines.model_config import ModelShape

Array = npt.NDArray[Any]


def hidden_states(shape: ModelShape, weights: Weights, token_ids: npt.NDArray[np.int32]) -> list[Array]:
    """States of the last token of one prompt.

    Args:
        shape: The model's figures.
        weights: The checkpoint, in any number format.
        token_ids: The prompt, shape [n].

    Returns:
        float64 arrays [hidden_size]: the residual stream after each layer in order, then the state after the final
        norm.
    """

    def weight(name: str) -> Array:
        return weights[name].astype(np.float64)

    def norm(x: Array, name: str) -> Array:
        normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.norm_epsilon) * weight(name)
        return normed

    count, half = len(token_ids), shape.head_size // 2
    angle = np.arange(count)[:, None] * shape.rope_theta ** (-np.arange(half) / half)
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(x: Array) -> Array:
        left, right = x[..., :half], x[..., half:]
        return np.concatenate((left * cosine - right * sine, right * cosine + left * sine), -1)

    x = weight("model.embed_tokens.weight")[token_ids]
    states: list[Array] = []
    for index in range(shape.layers):
        prefix = f"model.layers.{index}"
        normed = norm(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (
            (normed @ weight(f"{prefix}.self_attn.{word}_proj.weight").T).reshape(count, -1, shape.head_size)
            for word in "qkv"
        )
        q, k = rotate(q), rotate(k)
        group = shape.heads // shape.kv_heads
        heads = []
        for head in range(shape.heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(shape.head_size)
            scores[np.triu_indices(count, 1)] = -np.inf
            share = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(share / share.sum(-1, keepdims=True) @ v[:, head // group])
        x = x + np.concatenate(heads, -1) @ weight(f"{prefix}.self_attn.o_proj.weight").T
        normed = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate = normed @ weight(f"{prefix}.mlp.gate_proj.weight").T
        product = gate / (1 + np.exp(-gate)) * (normed @ weight(f"{prefix}.mlp.up_proj.weight").T)
        x = x + product @ weight(f"{prefix}.mlp.down_proj.weight").T
        states.append(x[-1])
    states.append(norm(x, "model.norm.weight")[-1])
    return states
