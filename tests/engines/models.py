# SPDX-License-Identifier: Apache-2.0
"""Models of the Llama family: figures of well-known sizes, and small ones whose weights are random."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from engines.model_config import ModelConfig, ModelShape

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

DENSE_7B = ModelConfig(ModelShape(32, 4096, 11008, 32, 32, 128, 32000, 1e-5, 10_000.0), False, 4096, (2,))
GROUPED_8B = ModelConfig(ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 1e-5, 500_000.0), False, 131_072, (128_001,))
GROUPED_70B = ModelConfig(ModelShape(80, 8192, 28672, 64, 8, 128, 128256, 1e-5, 500_000.0), False, 131_072, (128_001,))
SMALL = ModelShape(2, 64, 128, 4, 2, 16, 101, 1e-5, 10_000.0)


def config_document(shape: ModelShape) -> dict[str, Any]:
    """A `config.json` of a model with these figures."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def make_weights(shape: ModelShape, dtype: Any, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Random weights under the names of a checkpoint."""
    rng = np.random.default_rng(seed)
    hidden, inner, kv = shape.hidden_size, shape.intermediate_size, shape.kv_heads * shape.head_size
    found = {
        "model.embed_tokens.weight": rng.normal(size=(shape.vocab_size, hidden)),
        "model.norm.weight": rng.normal(1, 0.1, hidden),
    }
    for index in range(shape.layers):
        prefix = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{name}.weight"] = rng.normal(1, 0.1, hidden)
        for name, out in (("q", shape.heads * shape.head_size), ("k", kv), ("v", kv)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = rng.normal(0, 0.1, (out, hidden))
        found[f"{prefix}.self_attn.o_proj.weight"] = rng.normal(0, 0.1, (hidden, shape.heads * shape.head_size))
        for name in ("gate", "up"):
            found[f"{prefix}.mlp.{name}_proj.weight"] = rng.normal(0, 0.1, (inner, hidden))
        found[f"{prefix}.mlp.down_proj.weight"] = rng.normal(0, 0.1, (hidden, inner))
    return {name: value.astype(dtype) for name, value in found.items()}


def write_checkpoint(directory: Path, shape: ModelShape, dtype: Any, *, parts: int = 1, seed: int = 0) -> None:
    """Writes a checkpoint by the public package, in one file or several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = make_weights(shape, dtype, seed)
    (directory / "config.json").write_text(json.dumps(config_document(shape)))
    if parts == 1:
        safetensors.numpy.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for part in range(parts):
        name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = {key: weights[key] for key in list(weights)[part::parts]}
        safetensors.numpy.save_file(mine, directory / name)
        weight_map |= dict.fromkeys(mine, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
