# SPDX-License-Identifier: Apache-2.0
"""The documents of an engine for the embedded runtime: `llama.json` and `contract.json`, from tier and model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engines.contract_text import NOT_APPLICABLE, BuiltFrom, contract_text
from services.common import schema
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engines.llama_tool import ModelReport
    from engines.tier import CpuTier

CONFIGURATION_FILE: Final = "llama.json"
WEIGHTS_FILE: Final = "model.gguf"
TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
FILES: Final = (CONFIGURATION_FILE, WEIGHTS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
"""Every file of the directory but the contract."""

_BLOCK_TOKENS = 64
"""Unit in which the runtime shares and cuts prompts."""
_CACHE_GRANULE = 256
"""The runtime rounds the tokens of a sequence up to a multiple of this."""
_CACHE_TYPES: Final = {"float16": ("f16", 2.0), "q8_0": ("q8_0", 34 / 32)}
"""What the runtime calls a cache's number format, and bytes a value."""
_WORKSPACE_BYTES = 192 << 20
"""Graph buffers and code of the runtime, beside what grows with the step; generous."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A finished file of the directory."""

    size_bytes: int
    sha256: str


def configuration(tier: CpuTier) -> bytes:
    """The text of `llama.json`.

    Raises:
        FailedPreconditionError: The tier asks for what the runtime cannot be: all findings are named.
    """
    document: dict[str, Any] = {
        "llama_version": 1,
        "gguf": WEIGHTS_FILE,
        "device": "cpu",
        "kv_layout": tier.cache.layout,
        "slots": tier.limits.slots,
        "resident_heads": tier.cache.resident_heads,
        "sequence_tokens": tier.sequence_tokens,
        "pool_tokens": NOT_APPLICABLE if tier.cache.layout == "streams" else _pool_tokens(tier),
        "step_token_budget": tier.limits.step_token_budget,
        "threads": tier.card.threads,
        "batch_threads": tier.card.batch_threads,
        "kv_type": _CACHE_TYPES[tier.cache.dtype][0] if tier.cache.dtype in _CACHE_TYPES else tier.cache.dtype,
        "reproducible": tier.capabilities.reproducible,
        "payload": NOT_APPLICABLE,
    }
    if tier.capabilities.payload_layers:
        document["payload"] = {"layers": list(tier.capabilities.payload_layers), "dtype": "float32"}
    text = json.dumps(document, indent=2).encode() + b"\n"
    if findings := schema.check_text("llama", text)[1]:
        raise FailedPreconditionError(f"{CONFIGURATION_FILE} would be refused: " + "; ".join(map(str, findings)))
    return text


def contract(
    tier: CpuTier,
    model: ModelReport,
    files: Mapping[str, FileFacts],
    *,
    end_token_ids: Sequence[int],
    kv_width: int,
    flags: Sequence[str],
) -> bytes:
    """The text of `contract.json`.

    Args:
        tier: What the engine is to be.
        model: What the runtime says of the finished weights.
        files: Every other file of the directory.
        end_token_ids: What ends a generation.
        kv_width: Values that one token adds to the keys of one layer, and as many to its values.
        flags: Settings that shaped the result, as `name=value`.

    Raises:
        FailedPreconditionError: The contract would be refused: all findings are named.
    """
    limits, capabilities = tier.limits, tier.capabilities
    layers = list(capabilities.payload_layers)
    shape = [model.hidden_size] if len(layers) == 1 else [len(layers), model.hidden_size]
    return contract_text(
        engine_id=tier.engine_id,
        files=files,
        model={
            "architecture": model.architecture,
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "weights_dtype": model.weights_dtype,
            "activations_dtype": "float32",
            "kv_cache_dtype": tier.cache.dtype,
        },
        tokenizer={"file": TOKENIZER_FILE, "end_token_ids": list(end_token_ids)},
        card={
            "family": tier.card.family,
            "compute_capability": NOT_APPLICABLE,
            "memory_bytes": memory_bytes(tier, model, kv_width),
            "count": 1,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
        },
        limits={
            "max_input_tokens": limits.max_input_tokens,
            "max_sequence_tokens": tier.sequence_tokens,
            "max_output_tokens": limits.max_output_tokens,
            "slots": limits.slots,
            "step_token_budget": limits.step_token_budget,
            "built_step_token_budget": limits.step_token_budget,
            "kv_block_tokens": _BLOCK_TOKENS,
            "kv_cache_memory_fraction": NOT_APPLICABLE,
            "host_cache_bytes": 0,
            "beams": 1,
            "longest_step_ms": limits.longest_step_ms,
        },
        capabilities={
            "guided_decoding": list(capabilities.guided_decoding),
            "samples_max": capabilities.samples_max,
            "scoring": capabilities.scoring,
            "reproducible": capabilities.reproducible,
            "payload": {"shape": shape, "dtype": "float32", "layers": layers} if layers else NOT_APPLICABLE,
        },
        runtime={"name": model.runtime_name, "version": model.runtime_version},
        built=BuiltFrom(flags, None),
    )


def memory_bytes(tier: CpuTier, model: ModelReport, kv_width: int) -> int:
    """Memory that the engine needs, in bytes: weights, cache of every sequence and resident head, one step's work.

    A step keeps, for each of its tokens, a row of the vocabulary and some rows of the hidden state.
    """
    sequences = tier.limits.slots + tier.cache.resident_heads
    tokens = -(-tier.sequence_tokens // _CACHE_GRANULE) * _CACHE_GRANULE * sequences
    cache = tokens * 2 * model.layers * kv_width * _CACHE_TYPES[tier.cache.dtype][1]
    step = tier.limits.step_token_budget * 4 * (model.vocab_size + 32 * model.hidden_size)
    return model.weights_bytes + int(cache) + step + _WORKSPACE_BYTES


def _pool_tokens(tier: CpuTier) -> int:
    return -(-tier.sequence_tokens * tier.limits.slots // _CACHE_GRANULE) * _CACHE_GRANULE
