# SPDX-License-Identifier: Apache-2.0
"""Stands in for TensorRT-LLM's programs, which need a card: the same flags, the same files, weights that are noise.

Run as `quantize.py` or `trtllm-build`, by the name of the link. What is asked of it beside its flags stands in
`standin.json` beside it: changes of what it writes, by dotted path, and what to do instead of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

HERE = Path(__file__).absolute().parent
QUANTIZE = [
    "model_dir", "dtype", "qformat", "kv_cache_dtype", "calib_dataset", "calib_size", "calib_max_seq_length",
    "seed", "tp_size", "pp_size", "output_dir",
]  # fmt: skip
BUILD = [
    "checkpoint_dir", "output_dir", "max_batch_size", "max_num_tokens", "max_input_len", "max_seq_len",
    "max_beam_width", "kv_cache_type", "tokens_per_block", "remove_input_padding", "gpt_attention_plugin",
    "context_fmha", "use_paged_context_fmha", "use_fp8_context_fmha", "gemm_plugin", "use_fused_mlp",
    "multiple_profiles", "reduce_fusion", "logits_dtype", "profiling_verbosity", "workers",
]  # fmt: skip


def main() -> int:
    """Does what the program of this name would."""
    asked: dict[str, Any] = json.loads((HERE / "standin.json").read_text())
    quantizing = Path(sys.argv[0]).name == "quantize.py"
    parser = argparse.ArgumentParser()
    for name in QUANTIZE if quantizing else BUILD:
        if name not in asked.get("without", ()):
            parser.add_argument(f"--{name}")
    said = parser.parse_args()
    with (HERE / "calls.txt").open("a") as calls:
        calls.write(f"{Path(sys.argv[0]).name}\n")
    output = Path(said.output_dir)
    output.mkdir(parents=True)
    if asked.get("hang"):
        time.sleep(600)
    if asked.get("fail"):
        print("loading\n[TRT] [E] out of memory\n")
        return 3
    (quantize if quantizing else build)(said, output, asked.get("changes", {}))
    return 0


def quantize(said: argparse.Namespace, output: Path, changes: dict[str, Any]) -> None:
    """Writes a checkpoint of as many ranks as asked for."""
    config = json.loads((Path(said.model_dir) / "config.json").read_text())
    layers, tp = config["num_hidden_layers"], int(said.tp_size)
    document = {
        "num_hidden_layers": layers,
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "mapping": {"tp_size": tp, "pp_size": int(said.pp_size)},
    }
    (output / "config.json").write_text(json.dumps(changed(document, changes)))
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        prefix = f"transformer.layers.{layer}"
        for linear in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"):
            for scale in ("weights_scaling_factor", "activation_scaling_factor"):
                tensors[f"{prefix}.{linear}.{scale}"] = np.array([0.01], np.float32)
        tensors[f"{prefix}.attention.kv_cache_scaling_factor"] = np.array([0.02], np.float32)
    for name, value in changes.items():
        if name in tensors or name.endswith("scaling_factor"):
            for tensor in [each for each in tensors if each.endswith(name)]:
                if value is None:
                    del tensors[tensor]
                else:
                    tensors[tensor] = np.array([value], np.float32)
    for rank in range(tp * int(said.pp_size)):
        safetensors.numpy.save_file(tensors, output / f"rank{rank}.safetensors")


def build(said: argparse.Namespace, output: Path, changes: dict[str, Any]) -> None:
    """Writes an engine's files."""
    checkpoint = json.loads((Path(said.checkpoint_dir) / "config.json").read_text())
    on = {"enable": True, "disable": False}
    document = {
        "version": "1.2.1",
        "pretrained_config": checkpoint,
        "build_config": {
            "max_batch_size": int(said.max_batch_size),
            "max_num_tokens": int(said.max_num_tokens),
            "max_seq_len": int(said.max_seq_len),
            "plugin_config": {
                "tokens_per_block": int(said.tokens_per_block),
                "paged_kv_cache": said.kv_cache_type == "paged",
                "use_paged_context_fmha": on[said.use_paged_context_fmha],
                "use_fp8_context_fmha": on[said.use_fp8_context_fmha],
            },
        },
    }
    ranks = checkpoint["mapping"]["tp_size"] * checkpoint["mapping"]["pp_size"]
    for rank in range(changes.get("ranks", ranks)):
        (output / f"rank{rank}.engine").write_bytes(b"engine of rank %d" % rank)
    (output / "config.json").write_text(json.dumps(changed(document, changes)))


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The document with other values at dotted paths that it has."""
    for path, value in changes.items():
        *parts, last = path.split(".")
        place: Any = document
        for part in parts:
            place = place.get(part, {})
        if last in place:
            place[last] = value
    return document


if __name__ == "__main__":
    raise SystemExit(main())
