# SPDX-License-Identifier: Apache-2.0
"""A configuration of the embedded runtime and a contract that are each sound, and of two engines."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from engines import inspect
from services.worker import native
from tests.support import suite

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD = {"layers": [-1], "dtype": "float32"}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "slots": ({"slots": 8}, {}, "llama.json:slots"),
    "budget": ({"step_token_budget": 256}, {}, "llama.json:step_token_budget"),
    "sequence": ({"sequence_tokens": 1024}, {}, "llama.json:sequence_tokens"),
    "file": ({"gguf": "other.gguf"}, {}, "llama.json:gguf"),
    "blocks": ({}, {"limits": {"kv_block_tokens": 32}}, "limits.kv_block_tokens"),
    "host cache": ({}, {"limits": {"host_cache_bytes": 1}}, "limits.host_cache_bytes"),
    "runtime": ({}, {"runtime": {"name": "other"}}, "runtime.name"),
    "device": ({}, {"card": {"compute_capability": "9.0"}}, "card.compute_capability"),
    "cache": ({}, {"model": {"kv_cache_dtype": "q8_0"}}, "model.kv_cache_dtype"),
    "promise": ({"reproducible": False}, {}, "capabilities.reproducible"),
    "weights": ({}, {"model": {"weights_dtype": "f16"}}, "model.weights_dtype"),
    "payload": ({"payload": PAYLOAD}, {}, "capabilities.payload"),
}


def write(directory: Path, ours: dict[str, Any], theirs: dict[str, dict[str, Any]]) -> None:
    """The bundled engine without its weights, changed on both sides."""
    directory.mkdir()
    contract = json.loads((suite.ENGINE / "contract.json").read_text())
    texts = {file["path"]: (suite.ENGINE / file["path"]) for file in contract["files"]}
    for file in contract["files"]:
        name = file["path"]
        data = b"weights" if name == "model.gguf" else texts[name].read_bytes()
        if name == "llama.json":
            data = json.dumps({**json.loads(data), **ours}).encode()
        (directory / name).write_bytes(data)
        file["size_bytes"], file["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    for section, values in theirs.items():
        contract[section] |= values
    (directory / "contract.json").write_text(json.dumps(contract))


def test_the_bundled_engine_agrees(tmp_path: Path) -> None:
    write(tmp_path / "engine", {}, {})
    assert inspect.verify(tmp_path / "engine") == []
    assert native.inspect(tmp_path / "engine").findings == ()


@pytest.mark.parametrize("what", CHANGES)
def test_what_disagrees_is_found_as_the_library_finds_it(what: str, tmp_path: Path) -> None:
    ours, theirs, path = CHANGES[what]
    write(tmp_path / "engine", ours, theirs)
    found = {each.path for each in inspect.verify(tmp_path / "engine")}
    assert path in found
    assert found == {each.path for each in native.inspect(tmp_path / "engine").findings}
