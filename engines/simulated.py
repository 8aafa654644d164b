# SPDX-License-Identifier: Apache-2.0
"""Engine directories of the simulated backend, and what such an engine will answer.

A simulated engine computes nothing: its tokens are hashes of the whole prompt, so that tests can say in advance what
every request must bring, and a stream that got crossed, a head that got lost or a restart at the wrong place shows.
`write_simulated_engine` makes the directory that a worker or the native library loads; `Simulation` recomputes the
answers. The formulas are those of `native/backends/simulated/formula.h`.

The tokenizer is byte-level: ids 0 to 255 are bytes, 256 is the end token `<|end|>`, the rest are words such as
` w300`, which only the engine emits.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NOT_APPLICABLE = "not_applicable"
BYTE_TOKENS = 256
END_TOKEN = 256
"""Id of `<|end|>`."""

STALL, THROW, SLOW_STEP, KILL_PROCESS = "stall", "throw", "slow_step", "kill_process"
NO_ROOM, FAIL_REQUEST, WRONG_ORDER, PAYLOAD_FAILS = "no_room", "fail_request", "wrong_order", "payload_fails"
"""Kinds of fault; `native/backends/simulated/config.h` says what each does."""


@dataclass(frozen=True, slots=True)
class StepFault:
    """A fault that begins with a step: `stall`, `throw`, `slow_step` or `kill_process`."""

    kind: str
    step: int
    """Number of the step, from 1."""
    count: int = 0
    """Steps of a stall, 0 for "until a progress-only step"; milliseconds of a slow step."""


@dataclass(frozen=True, slots=True)
class RequestFault:
    """A fault that hits requests."""

    kind: str
    trigger: str
    """`prompt_token`: the prompt contains the id `value`. `one_in`: the prompt's hash says so, for one in `value`."""
    value: int
    count: int = 0
    """As for StepFault; for `no_room`, how many admissions, 0 for "until a progress-only step"."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """Everything that a simulated engine's directory says. The numbers here suit tests; none is a library's default."""

    engine_id: str = "simulated-test"
    seed: int = 1
    vocab_size: int = 512
    """At least 257: every byte and the end token."""
    hidden_size: int = 64
    layers: int = 4
    max_input_tokens: int = 1024
    max_sequence_tokens: int = 1280
    max_output_tokens: int = 256
    """0 for an engine that generates nothing; it needs `payload_dtype`."""
    slots: int = 16
    step_token_budget: int = 512
    splits_prompts: bool = True
    kv_block_tokens: int | None = 16
    """None for an engine without cache."""
    kv_pool_blocks: int | None = 2048
    longest_step_ms: int = 10_000
    samples_max: int = 8
    scoring: bool = True
    payload_dtype: str | None = None
    """`float32`, `float16` or `bfloat16`: finished requests carry `hidden_size` values. None for no payload."""
    end_one_in: int = 0
    """One token in so many is the end token; 0 for none."""
    time_mode: str = "virtual"
    """`virtual`: steps take no time. `real`: they take theirs, times `time_scale`."""
    time_scale: float = 1.0
    load_ms: int = 0
    step_us: int = 500
    prompt_token_ns: int = 2_000
    generated_token_ns: int = 20_000
    context_token_ns: int = 0
    step_faults: Sequence[StepFault] = ()
    request_faults: Sequence[RequestFault] = ()
    contract_changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted path -> value, put into contract.json last; `absent` takes the field out. For contracts that are wrong."""
    simulated_changes: Mapping[str, Any] = field(default_factory=dict)
    """The same for simulated.json."""


ABSENT = object()
"""As a value of `contract_changes` and `simulated_changes`: the field is taken out."""


def write_simulated_engine(directory: Path, **overrides: Any) -> SimulatedEngine:
    """Writes contract.json, simulated.json and tokenizer.json of a simulated engine into a directory.

    Args:
        directory: Made where it does not exist; files of these names are replaced.
        overrides: Fields of SimulatedEngine that are to differ.

    Returns:
        What was written.
    """
    engine = replace(SimulatedEngine(), **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    simulated = _changed(_simulated_document(engine), engine.simulated_changes)
    texts = {
        "simulated.json": json.dumps(simulated, indent=1) + "\n",
        "tokenizer.json": json.dumps(_tokenizer_document(engine.vocab_size)) + "\n",
    }
    for name, text in texts.items():
        (directory / name).write_bytes(text.encode())
    contract = _changed(_contract_document(engine, texts), engine.contract_changes)
    (directory / "contract.json").write_bytes((json.dumps(contract, indent=1) + "\n").encode())
    return engine


class Simulation:
    """What a simulated engine answers, recomputed."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._ends = [END_TOKEN] if engine.max_output_tokens > 0 else []

    def tokens(
        self, prompt: Sequence[int], max_tokens: int, *, seed: int = 0, sample: int = 0, stop_ids: Sequence[int] = ()
    ) -> list[int]:
        """Tokens of one sample, without the one that stops it.

        Args:
            prompt: Token ids.
            max_tokens: Most tokens.
            seed: That of the request's sampling.
            sample: Which sample, from 0.
            stop_ids: Ids that end the sample beside the end token.
        """
        stops = {*stop_ids, *self._ends}
        tokens: list[int] = []
        while len(tokens) < max_tokens and (token := self._token(prompt, seed, sample, len(tokens))) not in stops:
            tokens.append(token)
        return tokens

    def logprobs(self, prompt: Sequence[int], count: int, *, seed: int = 0, sample: int = 0) -> list[float]:
        """Log-probabilities of the first tokens of one sample."""
        return [_logprob(self._word(prompt, seed, sample, k)) for k in range(count)]

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Log-probabilities of the prompt's tokens; that of the first is 0."""
        return [0.0] + [_logprob(self.chain(prompt[: i + 1])) for i in range(1, len(prompt))]

    def payload(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """Values of the payload; exact in the payload's number format, and so as float32.

        Raises:
            ValueError: The engine has no payload.
        """
        bits = {"float32": 24, "float16": 11, "bfloat16": 8}.get(self._engine.payload_dtype or "")
        if bits is None:
            raise ValueError(f"{self._engine.engine_id} has no payload")
        chain = self.chain(prompt)
        words = [_mix(chain ^ i) >> (64 - bits) for i in range(self._engine.hidden_size)]
        return np.array([word / 2 ** (bits - 1) - 1 for word in words], dtype=np.float32)

    def hit_by_one_in(self, prompt: Sequence[int], value: int) -> bool:
        """Whether a fault with trigger `one_in` and that value hits the prompt."""
        return value > 0 and _mix(self.chain(prompt) ^ value) % value == 0

    def chain(self, prompt: Sequence[int]) -> int:
        """The hash of a prompt."""
        chain = _mix(self._engine.seed)
        for token in prompt:
            chain = _mix(chain ^ int(token))
        return chain

    def _word(self, prompt: Sequence[int], seed: int, sample: int, k: int) -> int:
        return _mix(_mix(_mix(self.chain(prompt) ^ seed) ^ sample) ^ k)

    def _token(self, prompt: Sequence[int], seed: int, sample: int, k: int) -> int:
        word = self._word(prompt, seed, sample, k)
        if self._engine.end_one_in > 0 and self._ends and (word >> 32) % self._engine.end_one_in == 0:
            return self._ends[0]
        token = word % (self._engine.vocab_size - len(self._ends))
        for end in self._ends:
            token += token >= end
        return token


def _mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _logprob(word: int) -> float:
    return -((word >> 20) & 0xFFF) / 512


def _simulated_document(engine: SimulatedEngine) -> dict[str, Any]:
    payload = {"values": engine.hidden_size, "dtype": engine.payload_dtype} if engine.payload_dtype else NOT_APPLICABLE
    return {
        "simulated_version": 1,
        "seed": engine.seed,
        "vocab_size": engine.vocab_size,
        "hidden_size": engine.hidden_size,
        "layers": engine.layers,
        "slots": engine.slots,
        "sequence_tokens": engine.max_sequence_tokens,
        "step_token_budget": engine.step_token_budget,
        "splits_prompts": engine.splits_prompts,
        "kv_block_tokens": NOT_APPLICABLE if engine.kv_block_tokens is None else engine.kv_block_tokens,
        "kv_pool_blocks": NOT_APPLICABLE if engine.kv_block_tokens is None else engine.kv_pool_blocks,
        "samples_max": engine.samples_max,
        "scoring": engine.scoring,
        "payload": payload,
        "end_one_in": engine.end_one_in,
        "time": {
            "mode": engine.time_mode,
            "scale": engine.time_scale if engine.time_mode == "real" else NOT_APPLICABLE,
            "load_ms": engine.load_ms,
            "step_us": engine.step_us,
            "prompt_token_ns": engine.prompt_token_ns,
            "generated_token_ns": engine.generated_token_ns,
            "context_token_ns": engine.context_token_ns,
        },
        "step_faults": [{"kind": it.kind, "step": it.step, "count": it.count} for it in engine.step_faults],
        "request_faults": [
            {"kind": it.kind, "trigger": it.trigger, "value": it.value, "count": it.count}
            for it in engine.request_faults
        ],
    }


def _contract_document(engine: SimulatedEngine, texts: Mapping[str, str]) -> dict[str, Any]:
    cached = engine.kv_block_tokens is not None
    payload: Any = NOT_APPLICABLE
    if engine.payload_dtype:
        payload = {"shape": [engine.hidden_size], "dtype": engine.payload_dtype, "layers": [-1]}
    return {
        "contract_version": 1,
        "engine_id": engine.engine_id,
        "files": [
            {"path": name, "size_bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in texts.items()
        ],
        "model": {
            "architecture": "simulated",
            "layers": engine.layers,
            "hidden_size": engine.hidden_size,
            "vocab_size": engine.vocab_size,
            "weights_dtype": "none",
            "activations_dtype": "none",
            "kv_cache_dtype": "none" if cached else NOT_APPLICABLE,
        },
        "tokenizer": {"file": "tokenizer.json", "end_token_ids": [END_TOKEN] if engine.max_output_tokens else []},
        "card": {
            "family": "cpu",
            "compute_capability": NOT_APPLICABLE,
            "memory_bytes": 64 << 20,
            "count": 1,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
        },
        "limits": {
            "max_input_tokens": engine.max_input_tokens,
            "max_sequence_tokens": engine.max_sequence_tokens,
            "max_output_tokens": engine.max_output_tokens,
            "slots": engine.slots,
            "step_token_budget": engine.step_token_budget,
            "built_step_token_budget": engine.step_token_budget,
            "kv_block_tokens": engine.kv_block_tokens if cached else NOT_APPLICABLE,
            "kv_cache_memory_fraction": NOT_APPLICABLE,
            "host_cache_bytes": 0,
            "beams": 1,
            "longest_step_ms": engine.longest_step_ms,
        },
        "capabilities": {
            "guided_decoding": [],
            "samples_max": engine.samples_max,
            "scoring": engine.scoring,
            "reproducible": True,
            "payload": payload,
        },
        "runtime": {"name": "simulated", "version": "1"},
        "build": {
            "tool": "engines.simulated",
            "tool_version": "1",
            "flags": [],
            "calibration": NOT_APPLICABLE,
            "date": "2026-01-01",
        },
    }


def _changed(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = document
        for parent in parents:
            place = place[parent]
        if value is ABSENT:
            del place[name]
        else:
            place[name] = value
    return document


def _tokenizer_document(vocab_size: int) -> dict[str, Any]:
    vocab = {_byte_character(byte): byte for byte in range(BYTE_TOKENS)}
    vocab["<|end|>"] = END_TOKEN
    # The first character stands for a space.
    vocab.update({f"{_byte_character(32)}w{token}": token for token in range(END_TOKEN + 1, vocab_size)})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": END_TOKEN,
                "content": "<|end|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


@functools.cache
def _byte_character(byte: int) -> str:
    """The character by which byte-level tokenizers write a byte: itself where it can be seen, else one from U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in seen:
        return chr(byte)
    hidden = [it for it in range(BYTE_TOKENS) if it not in seen]
    return chr(0x100 + hidden.index(byte))
