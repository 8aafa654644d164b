# SPDX-License-Identifier: Apache-2.0
"""An engine directory with other settings: the same weights, another configuration, and the contract that says so."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any, Final

from engines.audit.gguf_file import open_gguf
from engines.sweep.settings import LLAMA, SIMULATED, Engine, Setting
from services.common import schema
from services.common.contract import CONTRACT_FILE, check, from_document, to_json
from services.common.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

NOT_APPLICABLE: Final = "not_applicable"
_CACHE_GRANULE: Final = 256
_CACHE_BYTES: Final = {"f16": 2.0, "q8_0": 34 / 32}


def write_variant(engine: Engine, target: Path, setting: Setting, *, engine_id: str = "") -> Path:
    """Writes the directory; large files are linked where the disk allows it, and copied elsewhere.

    Args:
        engine: The engine.
        target: Made; must not exist.
        setting: Its new settings.
        engine_id: Its new id; the old one where empty.

    Raises:
        InvalidArgumentError: The rules of contract or configuration refuse these settings: all findings are named.
        FailedPreconditionError: The place is taken.
    """
    contract = json.loads((engine.directory / CONTRACT_FILE).read_bytes())
    texts: dict[str, bytes] = {}
    if engine.configuration:
        document = _configured(engine, setting)
        texts[engine.configuration] = json.dumps(document, indent=2).encode() + b"\n"
        name = engine.configuration.removesuffix(".json")
        _refuse(engine.configuration, schema.check_text(name, texts[engine.configuration])[1])
    _contracted(engine, contract, setting, texts)
    if engine_id:
        contract["engine_id"] = engine_id
    proto = from_document(contract)
    _refuse(CONTRACT_FILE, check(proto))
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise FailedPreconditionError(f"{target} exists: name another place") from None
    for file in engine.contract.files:
        if file.path not in texts:
            _link(engine.directory / file.path, target / file.path)
    for path, text in {**texts, CONTRACT_FILE: to_json(proto)}.items():
        (target / path).write_bytes(text)
    return target


def _configured(engine: Engine, setting: Setting) -> dict[str, Any]:
    document = dict(engine.document)
    document["step_token_budget"] = setting.budget
    document["slots"] = setting.slots
    if engine.configuration == SIMULATED:
        document["splits_prompts"] = setting.chunk
        if setting.block is not None:
            pool = document["kv_pool_blocks"] * document["kv_block_tokens"]
            document["kv_block_tokens"] = setting.block
            document["kv_pool_blocks"] = max(1, pool // setting.block)
    if engine.configuration == LLAMA:
        document["resident_heads"] = setting.heads
        if document["kv_layout"] == "unified":
            tokens = document["sequence_tokens"] * setting.slots
            document["pool_tokens"] = -(-tokens // _CACHE_GRANULE) * _CACHE_GRANULE
    return document


def _contracted(engine: Engine, contract: dict[str, Any], setting: Setting, texts: dict[str, bytes]) -> None:
    limits = contract["limits"]
    limits["step_token_budget"] = setting.budget
    limits["slots"] = setting.slots
    if engine.configuration:
        # Such a runtime is not compiled for a budget: what it is set to is what it was built for.
        limits["built_step_token_budget"] = setting.budget
    if engine.configuration == SIMULATED and setting.block is not None:
        limits["kv_block_tokens"] = setting.block
    if engine.configuration == LLAMA:
        contract["card"]["memory_bytes"] += _more_memory(engine, setting)
        samples = contract["capabilities"]["samples_max"]
        # Samples of one prompt run side by side.
        contract["capabilities"]["samples_max"] = min(samples, setting.slots)
    for file in contract["files"]:
        if text := texts.get(file["path"]):
            file["size_bytes"] = len(text)
            file["sha256"] = hashlib.sha256(text).hexdigest()


def _more_memory(engine: Engine, setting: Setting) -> int:
    """Bytes that the settings take beyond those of the engine: cache of sequences, rows of a step."""
    document, model = engine.document, engine.contract.model
    with open_gguf(engine.directory / document["gguf"]) as file:
        said = file.metadata
        heads, kv_heads = said["llama.attention.head_count"], said["llama.attention.head_count_kv"]
    sequences = setting.slots + (setting.heads or 0) - document["slots"] - document["resident_heads"]
    tokens = -(-document["sequence_tokens"] // _CACHE_GRANULE) * _CACHE_GRANULE
    width = model.hidden_size // int(heads) * int(kv_heads)
    cache: float = sequences * tokens * 2 * model.layers * width * _CACHE_BYTES[document["kv_type"]]
    step: int = (setting.budget - document["step_token_budget"]) * 4 * (model.vocab_size + 32 * model.hidden_size)
    return int(cache) + step


def _refuse(name: str, findings: list[schema.Finding]) -> None:
    if findings:
        raise InvalidArgumentError(f"{name} would be refused: " + "; ".join(map(str, findings)))


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
