# SPDX-License-Identifier: Apache-2.0
"""What kernels of our own compute, in NumPy, with the roundings that they make.

Each takes a recorded operation and the values of its inputs, and returns float32, one array an output, which the
interpreter rounds to the output's number format. The kernels compute in float32 between the roundings that are written
out here: queries and keys once they are rotated, the exponentials that weigh the values, sums and what is normed.
Attention is exact in the order of its terms, where a kernel goes block by block; so a kernel agrees with this to its
last bits, not bit by bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engines.graph.ir import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engines.graph.ir import Operation

Array = npt.NDArray[Any]

FP8_LARGEST = 448.0
"""Largest finite value of e4m3."""


def to_fp8(values: Array, scale: Array | float) -> Array:
    """Values over a scale in FP8 (e4m3), those beyond its range held at its ends."""
    return np.clip(values / scale, -FP8_LARGEST, FP8_LARGEST).astype(DTYPES["fp8_e4m3"])


def packed_attention(operation: Operation, arguments: Sequence[Array]) -> tuple[Array, ...]:
    """See `Graph.packed_attention`; softmax is relative to the largest score of a row, and divided by at the end."""
    said = operation.settings
    heads, kv_heads, size, tokens = (said[name] for name in ("heads", "kv_heads", "head_size", "row_tokens"))
    qkv, *packing, cosine, sine = arguments
    by_row = qkv.reshape(-1, tokens, heads + 2 * kv_heads, size)
    narrow, groups = qkv.dtype, heads // kv_heads
    if packing:
        positions, segments = packing
        cosine, sine = cosine[positions], sine[positions]
        allowed = np.tril(segments[:, :, None] == segments[:, None, :])
    else:
        cosine, sine = cosine[None], sine[None]
        allowed = np.tril(np.ones((1, tokens, tokens), np.bool_))

    def rotated(x: Array) -> Array:
        left, right = np.split(x.astype(np.float32), 2, axis=-1)
        c, s = cosine[:, :, None], sine[:, :, None]
        turned = np.concatenate((left * c - right * s, right * c + left * s), axis=-1)
        result: Array = turned.astype(narrow).astype(np.float32)
        return result

    def by_head(x: Array, count: int) -> Array:
        # A head of keys stands before each of its heads of queries.
        return x.reshape(-1, tokens, kv_heads, count, size).transpose(0, 2, 3, 1, 4)

    q = by_head(rotated(by_row[:, :, :heads]), groups)
    k = by_head(rotated(by_row[:, :, heads : heads + kv_heads]), 1)
    v = by_head(by_row[:, :, heads + kv_heads :].astype(np.float32), 1)
    scores = np.where(allowed[:, None, None], q @ k.swapaxes(-1, -2) * np.float32(size**-0.5), -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    attended = weight.astype(narrow).astype(np.float32) @ v / weight.sum(-1, keepdims=True)
    return (attended.transpose(0, 3, 1, 2, 4).reshape(len(qkv), heads * size),)


def gated_unit(_operation: Operation, arguments: Sequence[Array]) -> tuple[Array, ...]:
    """See `Graph.gated_unit`."""
    gate, up = np.split(arguments[0].astype(np.float32), 2, axis=-1)
    return (gate / (1.0 + np.exp(-gate)) * up,)


def norm(operation: Operation, arguments: Sequence[Array]) -> tuple[Array, ...]:
    """See `Graph.norm` and `Graph.added_norm`; a sum is rounded to the type of its terms, and so is the normed."""
    *terms, weight = arguments
    narrow = terms[0].dtype
    wide: Array = np.sum([term.astype(np.float32) for term in terms], axis=0).astype(narrow).astype(np.float32)
    root = np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(operation.settings["epsilon"]))
    normed = (wide / root).astype(narrow).astype(np.float32) * weight.astype(np.float32)
    return (normed, wide) if operation.beside else (normed,)


KERNELS: dict[str, Callable[[Operation, Sequence[Array]], tuple[Array, ...]]] = {
    "packed_attention": packed_attention,
    "gated_unit": gated_unit,
    "norm": norm,
}
"""Operation -> what its kernel computes."""
