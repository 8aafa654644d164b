# SPDX-License-Identifier: Apache-2.0
"""The engine directory of a mining plan: plan, `tensorrt.json`, tokenizer and the contract that binds them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engines.contract_text import NOT_APPLICABLE, BuiltFrom, contract_text
from engines.cpu import FileFacts
from engines.publish import Workplace, workplace
from engines.sources import digest
from services.common import schema
from services.common.contract import CONTRACT_FILE, engine_digest
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from pathlib import Path

    from engines.model_config import ModelShape

CONFIGURATION_FILE = "tensorrt.json"
PLAN_FILE = "mining.plan"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class MiningEngine:
    """What a plan was built for."""

    engine_id: str
    shape: ModelShape
    row_tokens: int
    """Tokens of one row; the longest prompt."""
    rows: int
    """Rows of the largest launch: times `row_tokens`, the per-step token budget."""
    slots: int
    """Prompts that may be in the batcher at once: what two launches take, or more."""
    weights_dtype: str
    activations_dtype: str
    layers: tuple[int, ...]
    """Layers whose states the plan returns, as in the contract's payload."""
    card_family: str
    compute_capability: str
    card_memory_bytes: int
    """Memory that the engine needs on the card."""
    longest_step_ms: int
    runtime_version: str
    flags: tuple[str, ...]
    calibration: str | None
    plugins: tuple[Path, ...] = ()
    """Libraries with the plugins that the plan uses; copied into the directory, so that workers need no others."""


def write_directory(target: Path, engine: MiningEngine, plan: bytes, tokenizer: bytes) -> str:
    """Publishes an engine directory, whole or not at all.

    Args:
        target: The directory; replaced where it is an engine directory already.
        engine: What the plan was built for.
        plan: The serialized plan.
        tokenizer: The bytes of `tokenizer.json`.

    Returns:
        The engine digest.

    Raises:
        FailedPreconditionError: Configuration or contract would be refused: all findings are named; or something that
            is no engine directory lies at the target.
        ResourceExhaustedError: The disk has no room.
    """
    with workplace(target) as place:
        inputs = hashlib.sha256(repr(engine).encode())
        for content in (plan, tokenizer, *(path.read_bytes() for path in engine.plugins)):
            inputs.update(hashlib.sha256(content).digest())
        place.begin(inputs.hexdigest(), len(plan) + len(tokenizer) + (64 << 20))
        place.step(PLAN_FILE, partial(_write, plan))
        publish_steps(place, engine, tokenizer)
    return engine_digest(target)


def publish_steps(place: Workplace, engine: MiningEngine, tokenizer: bytes) -> None:
    """Writes everything but the plan, which is in its place, and publishes the directory.

    Raises:
        FailedPreconditionError: Configuration or contract would be refused: all findings are named.
    """
    stated = {"tensorrt_version": 1, "plan": PLAN_FILE, "plugins": [path.name for path in engine.plugins]}
    configuration = json.dumps(stated, indent=2).encode() + b"\n"
    if findings := schema.check_text("tensorrt", configuration)[1]:
        raise FailedPreconditionError(f"{CONFIGURATION_FILE} would be refused: " + "; ".join(map(str, findings)))
    libraries = {path.name: path.read_bytes() for path in engine.plugins}
    for name, content in {CONFIGURATION_FILE: configuration, TOKENIZER_FILE: tokenizer, **libraries}.items():
        place.step(name, partial(_write, content))
    made = {name: place.path(name) for name in (PLAN_FILE, CONFIGURATION_FILE, TOKENIZER_FILE, *libraries)}
    facts = {name: FileFacts(path.stat().st_size, digest(path)) for name, path in made.items()}
    place.step(CONTRACT_FILE, partial(_write, _contract(engine, facts)))
    place.publish([*made, CONTRACT_FILE])


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _contract(engine: MiningEngine, files: dict[str, FileFacts]) -> bytes:
    shape, budget = engine.shape, engine.rows * engine.row_tokens
    one = [shape.hidden_size]
    return contract_text(
        engine_id=engine.engine_id,
        files=files,
        model={
            "architecture": "llama",
            "layers": shape.layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "weights_dtype": engine.weights_dtype,
            "activations_dtype": engine.activations_dtype,
            "kv_cache_dtype": NOT_APPLICABLE,
        },
        tokenizer={"file": TOKENIZER_FILE, "end_token_ids": []},
        card={
            "family": engine.card_family,
            "compute_capability": engine.compute_capability,
            "memory_bytes": engine.card_memory_bytes,
            "count": 1,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
        },
        limits={
            "max_input_tokens": engine.row_tokens,
            "max_sequence_tokens": engine.row_tokens,
            "max_output_tokens": 0,
            "slots": engine.slots,
            "step_token_budget": budget,
            "built_step_token_budget": budget,
            "kv_block_tokens": NOT_APPLICABLE,
            "kv_cache_memory_fraction": NOT_APPLICABLE,
            "host_cache_bytes": 0,
            "beams": 1,
            "longest_step_ms": engine.longest_step_ms,
        },
        capabilities={
            "guided_decoding": [],
            "samples_max": 1,
            "scoring": False,
            "reproducible": False,
            "payload": {
                "shape": one if len(engine.layers) == 1 else [len(engine.layers), *one],
                "dtype": engine.activations_dtype,
                "layers": list(engine.layers),
            },
        },
        runtime={"name": "tensorrt", "version": engine.runtime_version},
        built=BuiltFrom(engine.flags, engine.calibration),
    )
