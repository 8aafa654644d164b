# SPDX-License-Identifier: Apache-2.0
"""The model that mining benchmarks run: random weights of a 7-billion-parameter dense model, and its PyTorch reference.

Everything is made on the card when it is asked for. FP8 weights are made there too, so that a network of 32 layers is
recorded in seconds; the host holds what the builder reads and nothing else.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes

from engines.graph.fused_kernels import FP8_LARGEST
from engines.mining.layer import Fp8Scales
from engines.model_config import ModelShape

ROW_TOKENS = 128


def dense_7b(layers: int) -> ModelShape:
    """So many layers with the extents of a dense model of 7 billion parameters."""
    return ModelShape(layers, 4096, 11008, 32, 32, 128, 32000, 1e-5, 10000.0)


class RandomWeights:
    """Weights of a seeded model, kept on the card in bfloat16."""

    def __init__(self, shape: ModelShape, seed: int, device: str = "cuda") -> None:
        import torch

        self._kept: dict[str, Any] = {}
        generator = torch.Generator(device=device).manual_seed(seed)
        hidden, inner = shape.hidden_size, shape.intermediate_size

        def make(name: str, *extents: int, mean: float = 0.0, deviation: float = 0.02) -> None:
            value = torch.randn(*extents, generator=generator, device=device) * deviation + mean
            self._kept[name] = value.to(torch.bfloat16)

        make("model.embed_tokens.weight", shape.vocab_size, hidden, deviation=1.0)
        make("model.norm.weight", hidden, mean=1.0)
        for index in range(shape.layers):
            prefix = f"model.layers.{index}"
            make(f"{prefix}.input_layernorm.weight", hidden, mean=1.0)
            make(f"{prefix}.post_attention_layernorm.weight", hidden, mean=1.0)
            for word, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
                make(f"{prefix}.self_attn.{word}_proj.weight", heads * shape.head_size, hidden)
            make(f"{prefix}.self_attn.o_proj.weight", hidden, shape.heads * shape.head_size)
            make(f"{prefix}.mlp.gate_proj.weight", inner, hidden)
            make(f"{prefix}.mlp.up_proj.weight", inner, hidden)
            make(f"{prefix}.mlp.down_proj.weight", hidden, inner)

    def torch(self, name: str) -> Any:
        """The weight on the card."""
        return self._kept[name]

    def __getitem__(self, name: str) -> Any:
        import torch

        return self._kept[name].cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)

    def fp8(self, names: tuple[str, ...]) -> tuple[Any, float]:
        """Weights below each other in FP8 on the host, and their scale: see `engines.mining.layer.QuantizedWeights`."""
        import torch

        whole = torch.cat([self._kept[name] for name in names]).float()
        scale = max(whole.abs().max().item(), 1e-12) / FP8_LARGEST
        narrow = (whole / scale).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        return narrow.cpu().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), scale


def make_feeds(shape: ModelShape, rows: int, seed: int, device: str = "cuda") -> dict[str, Any]:
    """Full rows: one prompt of 128 tokens each."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.randint(0, shape.vocab_size, (rows, ROW_TOKENS), generator=generator, device=device, dtype=torch.int32)
    positions = torch.arange(ROW_TOKENS, device=device, dtype=torch.int32).expand(rows, -1).contiguous()
    last = torch.arange(1, rows + 1, device=device, dtype=torch.int32) * ROW_TOKENS - 1
    return {"input_ids": ids, "positions": positions, "segments": torch.zeros_like(ids), "last_rows": last}


def expected_and_scales(shape: ModelShape, weights: RandomWeights, feeds: dict[str, Any]) -> tuple[Any, Fp8Scales]:
    """What PyTorch gives for some rows, and the scales of activations that those rows ask for."""
    largest: dict[str, float] = {}
    expected = torch_reference(shape, weights, feeds, largest)
    return expected, Fp8Scales({name: value / FP8_LARGEST for name, value in largest.items()})


def torch_reference(
    shape: ModelShape, weights: RandomWeights, feeds: dict[str, Any], largest: dict[str, float] | None = None
) -> Any:
    """The same model in PyTorch; notes the largest magnitude at each input of a weight product in `largest`."""
    import torch
    from torch.nn import functional

    def note(index: int, name: str, x: Any) -> None:
        if largest is not None:
            largest[f"layers_{index}.{name}"] = x.abs().max().item()

    ids, positions, segments = (feeds[k].long() for k in ("input_ids", "positions", "segments"))
    x = functional.embedding(ids, weights.torch("model.embed_tokens.weight"))
    rows, tokens, _ = x.shape
    half = shape.head_size // 2
    frequency = shape.rope_theta ** (-torch.arange(half, device=ids.device, dtype=torch.float64) / half)
    angle = (positions[..., None].double() * frequency).float()
    cosine, sine = (torch.cat((f, f), -1)[:, None] for f in (angle.cos(), angle.sin()))
    order = torch.arange(tokens, device=ids.device)
    allowed = (segments[:, None, :, None] == segments[:, None, None, :]) & (order[:, None] >= order)

    def norm(x: Any, name: str) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon)).to(
            x.dtype
        ) * weights.torch(name)

    def rotate(x: Any) -> Any:
        wide = x.float()
        turned = torch.cat((-wide[..., half:], wide[..., :half]), -1)
        return (wide * cosine + turned * sine).to(x.dtype)

    for index in range(shape.layers):
        prefix = f"model.layers.{index}"

        def linear(x: Any, name: str, prefix: str = prefix) -> Any:
            return functional.linear(x, weights.torch(f"{prefix}.{name}.weight"))

        normed = norm(x, f"{prefix}.input_layernorm.weight")
        note(index, "qkv", normed)
        q, k, v = (
            linear(normed, f"self_attn.{w}_proj").view(rows, tokens, -1, shape.head_size).transpose(1, 2) for w in "qkv"
        )
        attended = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=allowed, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(rows, tokens, -1)
        note(index, "o", attended)
        x = x + linear(attended, "self_attn.o_proj")
        normed = norm(x, f"{prefix}.post_attention_layernorm.weight")
        note(index, "mlp", normed)
        product = functional.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj")
        note(index, "down", product)
        x = x + linear(product, "mlp.down_proj")
    last = x.reshape(rows * tokens, -1)[feeds["last_rows"].long()]
    return norm(last, "model.norm.weight")


def flops(shape: ModelShape, rows: int) -> float:
    """Floating-point operations of one launch: weight products and both attention products, all tokens."""
    attention = 2 * ROW_TOKENS * shape.heads * shape.head_size
    return product_flops(shape, rows) + 2.0 * rows * ROW_TOKENS * shape.layers * attention


def product_flops(shape: ModelShape, rows: int) -> float:
    """Floating-point operations of a launch's weight products alone."""
    return 2.0 * rows * ROW_TOKENS * shape.layers * sum(n * k for n, k in product_shapes(shape).values())


def product_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's weight products: queries, keys and values as one, gate and up as one."""
    width, inner = shape.heads * shape.head_size, shape.intermediate_size
    return {
        "qkv": (width + 2 * shape.kv_heads * shape.head_size, shape.hidden_size),
        "o": (shape.hidden_size, width),
        "gate_up": (2 * inner, shape.hidden_size),
        "down": (shape.hidden_size, inner),
    }
