# SPDX-License-Identifier: Apache-2.0
"""Where the embedded runtime's configuration and the contract beside it state different engines.

Each of the two is sound by itself; together they would be an engine that is sized otherwise than everybody above it is
told. The library refuses such a directory at load by the same rules (`native/backends/llama/config.cpp`, held together
by `tests/engines/test_agreement.py`), and by one more: that the runtime's version is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from services.common.schema import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.common.contract import Contract

CONFIGURATION_FILE: Final = "llama.json"
_BLOCK_TOKENS: Final = 64
_CACHE_TYPES: Final = {"f16": "float16", "q8_0": "q8_0"}
_REPRODUCIBLE_WEIGHTS: Final = ("q8_0", "q4_1")


def disagreements(document: dict[str, Any], contract: Contract) -> Iterator[Finding]:
    """Findings about a `llama.json` and a contract that are each without any.

    Args:
        document: The configuration, as read.
        contract: The contract.
    """
    limits, payload = contract.limits, contract.capabilities.payload
    for key, path, theirs in (
        ("slots", "limits.slots", limits.slots),
        ("step_token_budget", "limits.step_token_budget", limits.step_token_budget),
    ):
        if document[key] != theirs:
            yield _ours(key, document[key], f"the contract's {path}, {theirs}")
    if document["sequence_tokens"] < limits.max_sequence_tokens:
        most = f"at least the contract's limits.max_sequence_tokens, {limits.max_sequence_tokens}"
        yield _ours("sequence_tokens", document["sequence_tokens"], most)
    if document["gguf"] not in {file.path for file in contract.files}:
        yield _ours("gguf", f'"{document["gguf"]}"', "name of a file in the engine directory")
    said = f"as {CONFIGURATION_FILE} says"
    for path, found, expected in (
        ("limits.kv_block_tokens", limits.kv_block_tokens, _BLOCK_TOKENS),
        ("limits.beams", limits.beams, 1),
        ("limits.host_cache_bytes", limits.host_cache_bytes, 0),
        ("runtime.name", contract.runtime.name, "llama.cpp"),
    ):
        if found != expected:
            yield Finding(path, str(found), f"{expected}, as this runtime has it")
    if (document["device"] == "cpu") != (contract.card.compute_capability is None):
        yield Finding("card.compute_capability", str(contract.card.compute_capability), f"a card or none, {said}")
    if contract.model.kv_cache_dtype != _CACHE_TYPES[document["kv_type"]]:
        yield Finding("model.kv_cache_dtype", str(contract.model.kv_cache_dtype), _CACHE_TYPES[document["kv_type"]])
    if document["reproducible"] != contract.capabilities.reproducible:
        yield Finding("capabilities.reproducible", str(contract.capabilities.reproducible).lower(), said)
    if document["reproducible"] and contract.model.weights_dtype not in _REPRODUCIBLE_WEIGHTS:
        yield Finding("model.weights_dtype", contract.model.weights_dtype, "q8_0 or q4_1, which can be reproducible")
    wanted = document["payload"] if isinstance(document["payload"], dict) else None
    if (wanted is None) != (payload is None):
        yield Finding("capabilities.payload", "a payload" if payload else "not_applicable", said)
    elif wanted is not None and payload is not None:
        if list(payload.layers) != wanted["layers"]:
            yield Finding("capabilities.payload.layers", str(list(payload.layers)), f"{wanted['layers']}, {said}")
        if payload.dtype != wanted["dtype"]:
            yield Finding("capabilities.payload.dtype", str(payload.dtype), f"{wanted['dtype']}, {said}")


def _ours(key: str, found: object, expected: str) -> Finding:
    return Finding(f"{CONFIGURATION_FILE}:{key}", str(found), expected)
