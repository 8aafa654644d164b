# SPDX-License-Identifier: Apache-2.0
"""A dense model of seven billion random F16 weights as an engine directory of the embedded runtime, on a card.

Random weights compute exactly as long as trained ones; what they say means nothing. The extents are those of the
Llama family's 7B: 32 layers, 4,096 hidden, 11,008 intermediate, 32 heads of 128 without groups, 32,000 tokens.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np

from engines.contract_text import NOT_APPLICABLE, BuiltFrom, contract_text
from engines.cpu import FileFacts
from engines.simulated import write_simulated_engine
from engines.sources import digest

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 32, 4096, 11008, 32, 32_000
GRANULE = 256


@dataclass(frozen=True, slots=True)
class CardEngine:
    """What one engine directory is to say."""

    slots: int
    resident_heads: int
    max_input_tokens: int
    max_output_tokens: int
    step_token_budget: int
    layout: str = "streams"
    pool_tokens: int = 0
    threads: int = 8
    kv_type: str = "f16"
    layers: int = LAYERS
    payload_layers: tuple[int, ...] = ()
    """Whose states a request of an engine that generates nothing gives, float32; none where it generates."""

    @property
    def sequence_tokens(self) -> int:
        """Prompt and output of one sequence."""
        return self.max_input_tokens + self.max_output_tokens


def write_model(path: Path, layers: int = LAYERS) -> None:
    """Writes the weights, 13.5 GB in F16; every matrix is cut from one random block, each from another place."""
    rng = np.random.default_rng(5)
    block = (rng.standard_normal(1 << 24, dtype=np.float32) * 0.02).astype(np.float16)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("dense-7b-random")
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_F16))
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    _vocabulary(writer)
    shapes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            shapes[f"blk.{layer}.{name}.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"blk.{layer}.ffn_down.weight"] = (HIDDEN, INTERMEDIATE)
    norms = ["output_norm.weight", *(f"blk.{i}.{n}_norm.weight" for i in range(layers) for n in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor_info(name, (HIDDEN,), np.dtype(np.float32), HIDDEN * 4)
    for name, shape in shapes.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float16), shape[0] * shape[1] * 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(HIDDEN, np.float32))
    for number, shape in enumerate(shapes.values()):
        size = shape[0] * shape[1]
        turned = np.roll(block, -9973 * number)
        writer.write_tensor_data(np.resize(turned, size).reshape(shape))
    writer.close()


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    """The vocabulary of `write_simulated_engine`: bytes, an end token, and words that nothing is ever split into."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = [names[byte] for byte in range(256)] + ["<|end|>"]
    tokens += [f"\u0120w{number}" for number in range(len(tokens), VOCABULARY)]
    types = [int(gguf.TokenType.NORMAL)] * VOCABULARY
    types[256] = int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["e r", "i n"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)


def write_directory(directory: Path, model: Path, engine: CardEngine, *, card: str, capability: str) -> None:
    """Writes an engine directory around the weights, which are linked, not copied.

    Raises:
        FailedPreconditionError: A document would be refused: all findings are named.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_simulated_engine(directory, vocab_size=VOCABULARY)
    (directory / "simulated.json").unlink()
    weights = directory / "model.gguf"
    weights.unlink(missing_ok=True)
    os.link(model, weights)
    (directory / "llama.json").write_bytes(_configuration(engine))
    files = {name: _facts(directory / name) for name in ("llama.json", "tokenizer.json")}
    files["model.gguf"] = _facts(weights, kept=model.with_suffix(".sha256"))
    (directory / "contract.json").write_bytes(_contract(engine, files, card, capability))


def cache_bytes(engine: CardEngine) -> int:
    """What the engine's cache takes on the card."""
    each = -(-engine.sequence_tokens // GRANULE) * GRANULE
    return (engine.pool_tokens or each * (engine.slots + engine.resident_heads)) * cell_bytes(engine)


def stream_bytes(engine: CardEngine) -> int:
    """What one sequence's stream takes of it: what is copied where one begins with what another holds."""
    return -(-engine.sequence_tokens // GRANULE) * GRANULE * cell_bytes(engine)


def cell_bytes(engine: CardEngine) -> int:
    """What one token takes of the cache: a key and a value in each layer."""
    values = 2 * engine.layers * HIDDEN
    return values * 2 if engine.kv_type == "f16" else values * 34 // 32


def _facts(path: Path, kept: Path | None = None) -> FileFacts:
    """Size and digest of a file; the digest of many gigabytes is made once and kept beside them."""
    size = path.stat().st_size
    if kept is not None and kept.exists() and kept.read_text().startswith(f"{size} "):
        return FileFacts(size, kept.read_text().split()[1])
    facts = FileFacts(size, digest(path))
    if kept is not None:
        kept.write_text(f"{size} {facts.sha256}")
    return facts


def _configuration(engine: CardEngine) -> bytes:
    document = {
        "llama_version": 1,
        "gguf": "model.gguf",
        "device": "cuda",
        "kv_layout": engine.layout,
        "slots": engine.slots,
        "resident_heads": engine.resident_heads,
        "sequence_tokens": engine.sequence_tokens,
        "pool_tokens": engine.pool_tokens if engine.layout == "unified" else NOT_APPLICABLE,
        "step_token_budget": engine.step_token_budget,
        "threads": engine.threads,
        "batch_threads": engine.threads,
        "kv_type": engine.kv_type,
        "reproducible": False,
        "payload": {"layers": list(engine.payload_layers), "dtype": "float32"}
        if engine.payload_layers
        else NOT_APPLICABLE,
    }
    return json.dumps(document, indent=1).encode()


def _contract(engine: CardEngine, files: dict[str, FileFacts], card: str, capability: str) -> bytes:
    shape = [HIDDEN] if len(engine.payload_layers) == 1 else [len(engine.payload_layers), HIDDEN]
    payload = {"shape": shape, "dtype": "float32", "layers": list(engine.payload_layers)}
    generates = engine.max_output_tokens > 0
    weights = 2 * (2 * VOCABULARY * HIDDEN + engine.layers * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE))
    memory = weights + cache_bytes(engine) + (2 << 30)
    return contract_text(
        engine_id="dense-7b-f16-random",
        files=files,
        model={
            "architecture": "llama",
            "layers": engine.layers,
            "hidden_size": HIDDEN,
            "vocab_size": VOCABULARY,
            "weights_dtype": "f16",
            "activations_dtype": "float32",
            "kv_cache_dtype": "float16" if engine.kv_type == "f16" else engine.kv_type,
        },
        tokenizer={"file": "tokenizer.json", "end_token_ids": [256] if generates else []},
        card={
            "family": card,
            "compute_capability": capability,
            "memory_bytes": memory,
            "count": 1,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
        },
        limits={
            "max_input_tokens": engine.max_input_tokens,
            "max_sequence_tokens": engine.sequence_tokens,
            "max_output_tokens": engine.max_output_tokens,
            "slots": engine.slots,
            "step_token_budget": engine.step_token_budget,
            "built_step_token_budget": engine.step_token_budget,
            "kv_block_tokens": 64,
            "kv_cache_memory_fraction": NOT_APPLICABLE,
            "host_cache_bytes": 0,
            "beams": 1,
            "longest_step_ms": 20_000,
        },
        capabilities={
            "guided_decoding": ["json_schema", "regex", "grammar"] if generates else [],
            "samples_max": 8 if generates else 1,
            "scoring": True,
            "reproducible": False,
            "payload": payload if engine.payload_layers else NOT_APPLICABLE,
        },
        runtime={"name": "llama.cpp", "version": os.environ["IFAB_LIBLLAMA_VERSION"]},
        built=BuiltFrom(("weights=random",), None),
    )
