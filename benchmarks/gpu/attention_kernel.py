# SPDX-License-Identifier: Apache-2.0
"""Checks the attention kernel on a card against PyTorch, and times it beside the bytes that it must move.

    python3 -m benchmarks.gpu.attention_kernel BUILD/plugins/libifab_plugins.so

Needs PyTorch, numpy, the library and a card; no TensorRT. Every case prints the smallest cosine of a token's result and
the largest error; the exit status is 1 where one is wrong. Times are medians, 32 heads of 128, rows of 128 tokens; the
bytes are q, k, v and positions once, and the result once.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu.kernel_times import SETS, bytes_of, show

FP8_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Case:
    """Extents of one attention; `scale` 0 gives bfloat16."""

    rows: int
    heads: int
    kv_heads: int
    head_size: int
    row_tokens: int
    packed: bool
    scale: float


class Kernel:
    """The library's kernel on PyTorch's current stream."""

    def __init__(self, path: str) -> None:
        self._launch = ctypes.CDLL(path).ifab_attention_launch
        self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = [
            *[ctypes.c_void_p] * 6,
            ctypes.c_int64,
            *[ctypes.c_int32] * 4,
            ctypes.c_float,
            ctypes.c_void_p,
        ]

    def __call__(self, case: Case, feeds: dict[str, Any], output: Any) -> None:
        """Enqueues one launch; raises RuntimeError with the library's sentence where it is refused."""
        packed = [feeds[name].data_ptr() if case.packed else None for name in ("positions", "segments")]
        problem = self._launch(
            feeds["qkv"].data_ptr(),
            *packed,
            feeds["cosine"].data_ptr(),
            feeds["sine"].data_ptr(),
            output.data_ptr(),
            case.rows,
            case.heads,
            case.kv_heads,
            case.head_size,
            case.row_tokens,
            case.scale,
            torch.cuda.current_stream().cuda_stream,
        )
        if problem is not None:
            raise RuntimeError(problem.decode())


def make_feeds(case: Case, seed: int) -> dict[str, Any]:
    """Random q, k, v; rows of two prompts and padding; tables of a base of 10,000."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tokens, half = case.row_tokens, case.head_size // 2
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    qkv = torch.randn(case.rows * tokens, width, generator=generator, device="cuda").to(torch.bfloat16)
    frequency = 10000.0 ** (-np.arange(half) / half)
    angle = np.arange(tokens)[:, None] * frequency
    segments = np.empty((case.rows, tokens), np.int32)
    positions = np.empty((case.rows, tokens), np.int32)
    for row in range(case.rows):
        first, second = tokens // 3 + row % 5, tokens - tokens // 5
        segments[row] = np.where(np.arange(tokens) < first, 0, np.where(np.arange(tokens) < second, 1, -1))
        positions[row] = np.where(segments[row] == 0, np.arange(tokens), np.arange(tokens) - first)
        positions[row][segments[row] < 0] = 0
    arrays = {"positions": positions, "segments": segments}
    arrays |= {"cosine": np.cos(angle).astype(np.float32), "sine": np.sin(angle).astype(np.float32)}
    return {"qkv": qkv} | {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}


def reference(case: Case, feeds: dict[str, Any]) -> Any:
    """PyTorch's attention of the same, float32 [tokens, heads * head_size]."""
    rows, tokens, size = case.rows, case.row_tokens, case.head_size
    split = feeds["qkv"].view(rows, tokens, -1, size).transpose(1, 2)
    q, k, v = split.split((case.heads, case.kv_heads, case.kv_heads), 1)
    order = torch.arange(tokens, device="cuda")
    places = feeds["positions"].long() if case.packed else order.expand(rows, -1)
    cosine, sine = (torch.cat((feeds[n][places],) * 2, -1)[:, None] for n in ("cosine", "sine"))

    def rotate(x: Any) -> Any:
        wide = x.float()
        turned = torch.cat((-wide[..., size // 2 :], wide[..., : size // 2]), -1)
        return (wide * cosine + turned * sine).to(torch.bfloat16)

    allowed = (order[:, None] >= order)[None, None]
    if case.packed:
        segments = feeds["segments"]
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1).float() for x in (rotate(k), v))
    out = functional.scaled_dot_product_attention(rotate(q).float(), k, v, attn_mask=allowed)
    return out.transpose(1, 2).reshape(rows * tokens, -1)


def empty_output(case: Case) -> Any:
    """Memory for a result."""
    dtype = torch.float8_e4m3fn if case.scale > 0.0 else torch.bfloat16
    return torch.empty(case.rows * case.row_tokens, case.heads * case.head_size, dtype=dtype, device="cuda")


def wrong(kernel: Kernel, case: Case) -> bool:
    """Runs a case, prints what came out, and says whether it is wrong."""
    feeds = make_feeds(case, 11)
    output = empty_output(case)
    kernel(case, feeds, output)
    torch.cuda.synchronize()
    expected, got = reference(case, feeds), output.float()
    if case.scale > 0.0:
        got = got * case.scale
        expected = expected.clamp(-FP8_LARGEST * case.scale, FP8_LARGEST * case.scale)
    cosine = functional.cosine_similarity(got, expected).min().item()
    error = (got - expected).abs().max().item()
    limit, least = (0.05, 0.9999) if case.scale == 0.0 else (0.1 * expected.abs().max().item(), 0.998)
    bad = not (cosine >= least and error <= limit)
    print(f"{'WRONG' if bad else 'ok   '} cosine {cosine:.6f} error {error:.5f}  {case}", flush=True)
    return bad


def timed(kernel: Kernel, case: Case, repeats: int) -> None:
    """Prints the time of a launch beside the bytes that it moves."""
    sets = [(make_feeds(case, seed), empty_output(case)) for seed in range(SETS)]
    feeds, output = sets[0]
    read = [feeds["qkv"], feeds["cosine"], feeds["sine"]]
    read += [feeds["positions"], feeds["segments"]] if case.packed else []
    label = f"{case.rows:3} rows {'packed' if case.packed else 'own   '} {'fp8 ' if case.scale else 'bf16'}"
    show(label, [partial(kernel, case, *each) for each in sets], bytes_of(*read, output), repeats)


def main() -> None:
    """Checks, then measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    kernel = Kernel(arguments.library)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print(torch.cuda.get_device_name(), flush=True)
    extents = [
        (3, 4, 4, 128, 128),
        (2, 8, 2, 128, 128),
        (2, 8, 1, 64, 128),
        (3, 4, 4, 64, 16),
        (2, 4, 1, 128, 48),
        (2, 4, 2, 64, 272),
        (2, 4, 4, 128, 512),
        (1, 2, 1, 128, 8192),
        (64, 32, 32, 128, 128),
    ]
    failed = 0
    for extent, packed, scale in itertools.product(extents, (True, False), (0.0, 0.01, 0.002)):
        failed += wrong(kernel, Case(*extent, packed=packed, scale=scale))
    for packed, scale, rows in itertools.product((True, False), (0.0, 0.01), (8, 16, 64)):
        timed(kernel, Case(rows, 32, 32, 128, 128, packed, scale), arguments.repeats)
    print(f"{failed} wrong")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
