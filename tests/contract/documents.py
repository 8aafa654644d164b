# SPDX-License-Identifier: Apache-2.0
"""Good contracts to start from, and an engine directory that agrees with one."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Plain = dict[str, Any]

FILES = {"engine.json": b'{"engine": 1}\n', "weights/part-1.bin": bytes(range(256)), "tokenizer.json": b"{}\n"}


def generation() -> Plain:
    """A CPU engine that generates text."""
    return {
        "contract_version": 1,
        "engine_id": "smollm2-135m-instruct-q8_0-cpu",
        "files": [
            {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in FILES.items()
        ],
        "model": {
            "architecture": "llama",
            "layers": 30,
            "hidden_size": 576,
            "vocab_size": 49152,
            "weights_dtype": "q8_0",
            "activations_dtype": "float32",
            "kv_cache_dtype": "float16",
        },
        "tokenizer": {"file": "tokenizer.json", "end_token_ids": [2]},
        "card": {
            "family": "cpu",
            "compute_capability": "not_applicable",
            "memory_bytes": 1_500_000_000,
            "count": 1,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
        },
        "limits": {
            "max_input_tokens": 1024,
            "max_sequence_tokens": 1280,
            "max_output_tokens": 256,
            "slots": 16,
            "step_token_budget": 512,
            "built_step_token_budget": 512,
            "kv_block_tokens": 64,
            "kv_cache_memory_fraction": "not_applicable",
            "host_cache_bytes": 0,
            "beams": 1,
            "longest_step_ms": 10_000,
        },
        "capabilities": {
            "guided_decoding": ["json_schema", "grammar"],
            "samples_max": 8,
            "scoring": True,
            "reproducible": True,
            "payload": "not_applicable",
        },
        "runtime": {"name": "llama.cpp", "version": "0.3.36"},
        "build": {
            "tool": "ifab engine build",
            "tool_version": "0.1.0",
            "flags": ["quantization=q8_0"],
            "calibration": "not_applicable",
            "date": "2026-11-29",
        },
    }


def hidden_states() -> Plain:
    """The same engine, which answers with a hidden state and no tokens."""
    contract = generation()
    contract["engine_id"] += "-hidden"
    contract["tokenizer"]["end_token_ids"] = []
    contract["limits"] |= {"max_input_tokens": 128, "max_sequence_tokens": 128, "max_output_tokens": 0}
    contract["capabilities"] |= {
        "guided_decoding": [],
        "payload": {"shape": [576], "dtype": "float32", "layers": [-1]},
    }
    return contract


def card_set() -> Plain:
    """An engine on two cards, with a cache sized by fraction, and hidden states of two layers without a cache."""
    contract = hidden_states()
    contract["engine_id"] = "7b-fp8-hidden-2x"
    contract["model"] |= {"layers": 32, "hidden_size": 4096, "weights_dtype": "fp8_e4m3"}
    contract["model"] |= {"activations_dtype": "bfloat16", "kv_cache_dtype": "not_applicable"}
    contract["card"] |= {"family": "nvidia-h200", "compute_capability": "9.0", "count": 2, "tensor_parallel": 2}
    contract["limits"] |= {"kv_block_tokens": "not_applicable", "slots": 2000, "step_token_budget": 131_072}
    contract["limits"] |= {"built_step_token_budget": 262_144}
    contract["capabilities"]["payload"] = {"shape": [2, 4096], "dtype": "bfloat16", "layers": [15, -1]}
    contract["build"]["calibration"] = "cnn_dailymail 512x"
    return contract


def with_cache_fraction() -> Plain:
    """A card engine that takes a share of the card's memory for its cache."""
    contract = generation()
    contract["card"] |= {"family": "nvidia-rtx-5090", "compute_capability": "12.0"}
    contract["limits"] |= {"kv_cache_memory_fraction": 0.85, "host_cache_bytes": 1 << 33}
    return contract


def all_good() -> list[Plain]:
    """One contract of each kind."""
    return [generation(), hidden_states(), card_set(), with_cache_fraction()]


def changed(contract: Plain, path: str, value: Any) -> Plain:
    """A copy with one field replaced; `path` is names joined by dots."""
    out = copy.deepcopy(contract)
    *parents, last = path.split(".")
    target = out
    for parent in parents:
        target = target[parent]
    target[last] = value
    return out


def write_engine_directory(directory: Path, contract: Plain | None = None) -> Path:
    """Writes FILES and a contract, by default one that agrees with them; returns the directory."""
    for path, data in FILES.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    (directory / "contract.json").write_text(json.dumps(contract or generation(), indent=1))
    return directory
