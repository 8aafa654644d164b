# SPDX-License-Identifier: Apache-2.0
"""No field says what kind of engine an engine is, and nobody above the C interface asks: a contract is enough.

An engine that returns hidden states has 0 output tokens and a payload, like any number in any contract. Whoever wants
to know whether a request brings tokens or a payload reads these two.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ifabric.engine.v1 import contract_pb2, node_pb2
from services.common import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ABOVE = [
    "protos", "native/include", "native/src", "services/broker", "services/common", "services/provisioner",
    "services/worker",
]  # fmt: skip
SOURCES = {".py", ".proto", ".h", ".cpp", ".c"}
ASKS = re.compile(
    r"\bmin(?:ing|er)\b|\b(?:engine|backend|model)_(?:kind|type|mode|class)\b|\bis_(?:llama|tensorrt|executor|simulated)\b"
    r"|\b(?:EngineKind|EngineType|BackendKind)\b|\bruntime\.name\s*[!=]=",
    re.IGNORECASE,
)
KINDS = {"kind", "type", "mode", "class", "role", "purpose", "task", "backend", "workload"}


@pytest.mark.parametrize("folder", ABOVE)
def test_nobody_asks_what_kind_of_engine_it_is(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCES]
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ASKS.search(line)
    ]
    assert found == []


def test_what_is_looked_for_would_be_found() -> None:
    for line in (
        'if engine.kind == "mining":',
        "engine_type = 1",
        "if contract.backend_kind:",
        "class EngineKind(Enum):",
    ):
        assert ASKS.search(line), line


def properties(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from node.get("properties", {})
        for inner in node.values():
            yield from properties(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from properties(inner)


def test_no_field_of_a_contract_or_a_node_says_it() -> None:
    assert KINDS & set(properties(json.loads(schema.source("contract")))) == set()
    said = {
        field.name
        for message in (*contract_pb2.DESCRIPTOR.message_types_by_name.values(), node_pb2.NodeDescription.DESCRIPTOR)
        for field in message.fields
    }
    assert KINDS & said == set()
