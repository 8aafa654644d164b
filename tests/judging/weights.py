# SPDX-License-Identifier: Apache-2.0
"""Real weights in small: two layers and some tokens of the bundled model, written the way converters write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy

from engines.audit.model import geometry_of, open_tensors, read_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[Any]

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN = 9, 3, 64, 576
TOKENS = 1024
LAYERS = 2
_TRAINED = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
_GGUF = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "attention_norm": "attn_norm", "mlp_norm": "ffn_norm",
}  # fmt: skip
_VENDOR = {
    "o": "attention.dense", "gate": "mlp.fc", "up": "mlp.gate", "down": "mlp.proj",
    "attention_norm": "input_layernorm", "mlp_norm": "post_layernorm",
}  # fmt: skip


@dataclass(slots=True)
class Weights:
    """Matrices `[outputs, inputs]` and norms by role, float32, in the order of trained checkpoints."""

    by_role: dict[str, Array]

    def copy(self) -> Weights:
        """The same, to be spoiled."""
        return Weights({role: values.copy() for role, values in self.by_role.items()})

    def __getitem__(self, role: str) -> Array:
        return self.by_role[role]

    def __setitem__(self, role: str, values: Array) -> None:
        self.by_role[role] = values


def real(model: Path, layers: tuple[int, ...] = (0, 1)) -> Weights:
    """Some layers of a real model, numbered anew from 0."""
    with open_tensors(model) as file:
        views = read_model(file, geometry_of(file)).views
        found = {}
        for role, view in views.items():
            first, _, rest = role.partition(".")
            number, _, name = rest.partition(".")
            if first == "layers" and int(number) in layers:
                found[f"layers.{layers.index(int(number))}.{name}"] = view.read(file, 0, view.rows)
        found["embedding"] = views["embedding"].read(file, 0, TOKENS)
        found["final_norm"] = views["final_norm"].read(file, 0, 1)
    return Weights({role: values[0] if values.shape[0] == 1 else values for role, values in found.items()})


def with_biases(weights: Weights, seed: int = 3) -> Weights:
    """The same with biases of queries, keys and values, `[outputs, 1]`: the shape of a model of the qwen2 family."""
    rng = np.random.default_rng(seed)
    found = weights.copy()
    for layer in range(LAYERS):
        for name, deviation in (("q", 2.0), ("k", 8.0), ("v", 0.1)):
            rows = weights[f"layers.{layer}.{name}"].shape[0]
            drawn = rng.standard_normal((rows, 1), dtype=np.float32) * np.float32(deviation)
            found[f"layers.{layer}.{name}.bias"] = drawn
    return found


def interleaved(rows: Array, heads: int) -> Array:
    """Rows of query or key heads in the order of GGUF files, element by element."""
    size = rows.shape[0] // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for place in range(size // 2):
            for half in range(2):
                out[head * size + 2 * place + half] = rows[head * size + half * size // 2 + place]
    return out


def write_trained(path: Path, weights: Weights, dtype: str = "float32", *, form: str = "plain") -> Path:
    """A folder with a safetensors checkpoint; `form` is `plain`, `fused` or `kernel` (rows and columns exchanged)."""
    tensors: dict[str, Array] = {}
    for role, values in weights.by_role.items():
        first, _, rest = role.partition(".")
        number, _, name = rest.partition(".")
        if first != "layers":
            whole = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}[role]
            tensors[f"{whole}.weight"] = values
        elif name.endswith(".bias"):
            tensors[f"model.layers.{number}.{_TRAINED[name.removesuffix('.bias')]}.bias"] = values[:, 0]
        elif form == "kernel" and values.ndim == 2:
            tensors[f"model.layers.{number}.{_TRAINED[name]}.kernel"] = values.T
        elif form != "fused" or name not in ("q", "k", "v", "gate", "up"):
            tensors[f"model.layers.{number}.{_TRAINED[name]}.weight"] = values
    for layer in range(LAYERS) if form == "fused" else ():
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.self_attn.qkv_proj.weight"] = np.concatenate(
            [weights[f"layers.{layer}.{each}"] for each in ("q", "k", "v")]
        )
        tensors[f"{prefix}.mlp.gate_up_proj.weight"] = np.concatenate(
            [weights[f"layers.{layer}.{each}"] for each in ("gate", "up")]
        )
    form_of = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    return _folder(path, {name: np.ascontiguousarray(values).astype(form_of) for name, values in tensors.items()})


def write_vendor(
    path: Path,
    weights: Weights,
    *,
    order: tuple[str, ...] = ("q", "k", "v"),
    unit_scale_of: str = "",
    cache_scales: tuple[float, ...] = (0.021, 0.034),
) -> Path:
    """A checkpoint as TensorRT-LLM reads it: FP8 with a scale a tensor, and queries, keys and values fused."""
    tensors: dict[str, Array] = {}

    def add(linear: str, values: Array) -> None:
        scale = np.float32(np.abs(values).max() / 448)
        tensors[f"{linear}.weight"] = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        kept = np.float32(1.0) if linear.endswith(unit_scale_of or "none") else scale
        tensors[f"{linear}.weights_scaling_factor"] = np.array([kept])
        tensors[f"{linear}.activation_scaling_factor"] = np.array([np.float32(0.05)])

    for layer in range(LAYERS):
        prefix = f"transformer.layers.{layer}"
        add(f"{prefix}.attention.qkv", np.concatenate([weights[f"layers.{layer}.{each}"] for each in order]))
        if f"layers.{layer}.q.bias" in weights.by_role:
            biases = np.concatenate([weights[f"layers.{layer}.{each}.bias"][:, 0] for each in order])
            tensors[f"{prefix}.attention.qkv.bias"] = biases.astype(ml_dtypes.bfloat16)
        tensors[f"{prefix}.attention.kv_cache_scaling_factor"] = np.array([np.float32(cache_scales[layer])])
        for name, linear in _VENDOR.items():
            values = weights[f"layers.{layer}.{name}"]
            if values.ndim == 2:
                add(f"{prefix}.{linear}", values)
            else:
                tensors[f"{prefix}.{linear}.weight"] = values.astype(ml_dtypes.bfloat16)
    tensors["transformer.vocab_embedding.weight"] = weights["embedding"].astype(ml_dtypes.bfloat16)
    tensors["transformer.ln_f.weight"] = weights["final_norm"].astype(ml_dtypes.bfloat16)
    padding = np.zeros((24, HIDDEN), dtype=ml_dtypes.bfloat16)
    tensors["lm_head.weight"] = np.concatenate([weights["embedding"].astype(ml_dtypes.bfloat16), padding])
    return _folder(path, tensors)


def write_gguf(
    path: Path,
    weights: Weights,
    kind: gguf.GGMLQuantizationType,
    *,
    vocabulary_of: Path | None = None,
    architecture: str = "llama",
) -> Path:
    """A GGUF file; rotary halves are interleaved in the architecture `llama` alone.

    With `vocabulary_of` it is one that libllama can load and quantise.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_SIZE)
    if vocabulary_of is not None:
        _copy_vocabulary(writer, vocabulary_of)
    for role, values in weights.by_role.items():
        first, _, rest = role.partition(".")
        number, _, name = rest.partition(".")
        if first != "layers":
            whole = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}[role]
            _add(writer, f"{whole}.weight", values, kind)
            continue
        linear, _, bias = name.partition(".")
        heads = {"q": HEADS, "k": KV_HEADS}.get(linear) if architecture == "llama" else None
        stored = interleaved(values, heads) if heads else values
        _add(writer, f"blk.{number}.{_GGUF[linear]}.{bias or 'weight'}", stored[:, 0] if bias else stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: Array, kind: gguf.GGMLQuantizationType) -> None:
    if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _copy_vocabulary(writer: gguf.GGUFWriter, model: Path) -> None:
    fields = gguf.GGUFReader(model).fields
    writer.add_vocab_size(TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(fields["tokenizer.ggml.tokens"].contents()[:TOKENS])
    writer.add_token_types(fields["tokenizer.ggml.token_type"].contents()[:TOKENS])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents()[:64])
    writer.add_eos_token_id(2)


def _folder(path: Path, tensors: Mapping[str, Array]) -> Path:
    path.mkdir()
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(each) for name, each in tensors.items()}, path / "model.safetensors"
    )
    document = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": HIDDEN}
    (path / "config.json").write_text(json.dumps(document))
    return path
