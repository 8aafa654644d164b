# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, contracts and requests for the front door's tests."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import contract_pb2, generation_pb2

ROOT = Path(__file__).resolve().parents[2]
END = "<|end|>"
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox runs on and on.",
    "Numbers 12, 345 and 6789; code: for (int i = 0; i < n; ++i) { sum += a[i]; }",
    "Grüße aus Köln, naïve café, 聪明的狐狸, 👩‍🚀 fliegt 🚀 zum Mond.",
] * 4


@functools.cache
def byte_level(*, size: int = 420, without: str = "", beginning: bool = False) -> bytes:
    """A byte-level BPE tokenizer, as the bytes of its document.

    Args:
        size: Size of the vocabulary.
        without: Characters of the byte alphabet that get no token.
        beginning: Whether it puts a control token in front of every text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[END, "<|start|>"], show_progress=False
    )
    tokenizer.train_from_iterator([] if without else _CORPUS, trainer)
    if beginning:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", tokenizer.token_to_id("<|start|>"))]
        )
    return tokenizer.to_str().encode()


@functools.cache
def byte_fallback() -> bytes:
    """A tokenizer in the way of SentencePiece: words, a fall-back to single bytes, no byte-level alphabet."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁th"]
    merges = [("▁", "t"), ("▁t", "h")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.to_str().encode()


def built_tokenizers() -> list[Path]:
    """Tokenizers of engines that were built here; empty on a machine that built none."""
    return sorted((ROOT / "build" / "engines").glob("*/tokenizer.json"))


@functools.cache
def tokenizer_of(document: bytes) -> Tokenizer:
    return Tokenizer.from_str(document.decode())


def vocab_size(document: bytes) -> int:
    return int(tokenizer_of(document).get_vocab_size())


def ids_of(document: bytes, text: str) -> list[int]:
    return list(tokenizer_of(document).encode(text).ids)


def contract(document: bytes | None = None, **changes: Any) -> contract_pb2.EngineContract:
    """A complete contract of a small engine that generates.

    Args:
        document: Its tokenizer.
        changes: `engine_id`, and any field of limits, capabilities or model, by name.
    """
    document = byte_level() if document is None else document
    made = contract_pb2.EngineContract(
        contract_version=1,
        engine_id=changes.pop("engine_id", "small"),
        model=contract_pb2.ModelFacts(
            architecture="llama",
            layers=2,
            hidden_size=8,
            vocab_size=vocab_size(document),
            weights_dtype="f32",
            activations_dtype="f32",
        ),
        tokenizer=contract_pb2.TokenizerFacts(file="tokenizer.json", end_token_ids=[0]),
        limits=contract_pb2.EngineLimits(
            max_input_tokens=64,
            max_sequence_tokens=96,
            max_output_tokens=48,
            slots=4,
            step_token_budget=64,
            built_step_token_budget=64,
            host_cache_bytes=0,
            beams=1,
            longest_step_ms=1000,
        ),
        capabilities=contract_pb2.EngineCapabilities(
            samples_max=4, scoring=True, reproducible=True, payload=contract_pb2.MaybePayload(not_applicable=True)
        ),
    )
    made.files.add(path="tokenizer.json", size_bytes=len(document), sha256=hashlib.sha256(document).hexdigest())
    for name, value in changes.items():
        owner = next(part for part in (made.limits, made.capabilities, made.model) if hasattr(part, name))
        if isinstance(value, list):
            getattr(owner, name).extend(value)
        else:
            setattr(owner, name, value)
    return made


def mining_contract(document: bytes | None = None, **changes: Any) -> contract_pb2.EngineContract:
    """The contract of an engine that generates nothing and carries 8 float32."""
    made = contract(
        document, **{"engine_id": "miner", "max_output_tokens": 0, "max_input_tokens": 32, "samples_max": 1} | changes
    )
    made.capabilities.payload.value.shape.append(8)
    made.capabilities.payload.value.dtype = contract_pb2.PAYLOAD_DTYPE_FLOAT32
    made.capabilities.payload.value.layers.append(-1)
    return made


def request(
    prompt: list[int] | str | bytes | None = None,
    *,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> broker_service_pb2.GenerationRequest:
    """A good request, but for what the arguments change. `max_tokens=None` leaves it absent."""
    form: dict[str, Any] = {}
    prompt = [5, 6, 7] if prompt is None else prompt
    if isinstance(prompt, str):
        form["text"] = prompt
    elif isinstance(prompt, bytes):
        form["packed_token_ids"] = prompt
    else:
        form["tokens"] = broker_service_pb2.TokenIds(ids=prompt)
    values: dict[str, Any] = {"request_id": "r1", "max_tokens": 8} | fields
    if sampling is not None:
        values["sampling"] = generation_pb2.SamplingParameters(**sampling)
    return broker_service_pb2.GenerationRequest(
        prompt=broker_service_pb2.Prompt(**form), **{name: value for name, value in values.items() if value is not None}
    )
