# SPDX-License-Identifier: Apache-2.0
"""Within a version a document's form may only widen: what was good once stays good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common import schema

RELEASED = Path(__file__).resolve().parents[1] / "data" / "schemas"
"""Schemas as they stood when their version was first released."""


def narrowed(
    old: dict[str, Any], new: dict[str, Any], roots: tuple[dict[str, Any], dict[str, Any]], at: str
) -> list[str]:
    """Where a schema refuses what the older one took."""
    old, new = resolved(old, roots[0]), resolved(new, roots[1])
    if "anyOf" in old:
        if "anyOf" not in new:
            return [f"{at}: may not say not_applicable any more"]
        return narrowed(old["anyOf"][1], new["anyOf"][1], roots, at)
    new = resolved(new["anyOf"][1], roots[1]) if "anyOf" in new else new
    if old["type"] != new["type"]:
        return [f"{at}: type {new['type']}, was {old['type']}"]
    found: list[str] = []
    match old["type"]:
        case "object":
            if list(old["properties"]) != list(new["properties"]):
                found.append(f"{at}: other fields")
            for name in old["properties"].keys() & new["properties"].keys():
                found += narrowed(old["properties"][name], new["properties"][name], roots, f"{at}.{name}")
        case "array":
            found += bounds(old, new, "minItems", "maxItems", at)
            if new.get("uniqueItems", False) and not old.get("uniqueItems", False):
                found.append(f"{at}: items must differ")
            found += narrowed(old["items"], new["items"], roots, f"{at}[]")
        case "integer" | "number":
            if "const" in old:
                found += [f"{at}: const {new.get('const')}"] * (old["const"] != new.get("const"))
            else:
                low = "exclusiveMinimum" if "exclusiveMinimum" in old else "minimum"
                found += bounds(old, {low: new.get(low, new.get("minimum")), **new}, low, "maximum", at)
        case "string":
            if "enum" in old and not set(old["enum"]) <= set(new.get("enum", ())):
                found.append(f"{at}: words are gone")
            if "pattern" in old and (old["pattern"] != new.get("pattern") or old["maxLength"] > new["maxLength"]):
                found.append(f"{at}: other texts")
    return found


def bounds(old: dict[str, Any], new: dict[str, Any], low: str, high: str, at: str) -> list[str]:
    return [f"{at}: {low} {new[low]}"] * (new[low] > old[low]) + [f"{at}: {high} {new[high]}"] * (new[high] < old[high])


def resolved(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    return dict(root["$defs"][node["$ref"].removeprefix("#/$defs/")]) if "$ref" in node else node


def read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads((RELEASED / f"{name}-v1.schema.json").read_text()), json.loads(schema.source(name))


@pytest.mark.parametrize("name", ["contract", "evidence"])
def test_nothing_that_was_good_is_refused_within_a_version(name: str) -> None:
    released, now = read(name)
    assert narrowed(released, now, (released, now), name) == []
    kept = [json.dumps(rule, sort_keys=True) for rule in released["x-rules"]]
    added = [rule for rule in now["x-rules"] if json.dumps(rule, sort_keys=True) not in kept]
    assert added == [], "a new rule refuses what was good: that is a new version"


def changed(root: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(root))
    *parts, last = path.split("/")
    place = made
    for part in parts:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return made


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("$defs/tokens/maximum", 1000, "maximum 1000"),
        ("$defs/tokens/minimum", 2, "minimum 2"),
        ("properties/limits/properties/slots/type", "number", "type number, was integer"),
        ("properties/limits/properties/beams", None, "other fields"),
        ("properties/limits/properties/more", {"type": "boolean"}, "other fields"),
        ("properties/files/maxItems", 8, "maxItems 8"),
        ("$defs/word/maxLength", 8, "other texts"),
        ("$defs/word/pattern", "^[a-z]+$", "other texts"),
        ("$defs/payload/properties/dtype/enum", ["float32"], "words are gone"),
        ("properties/contract_version/const", 2, "const 2"),
        ("properties/capabilities/properties/payload", {"$ref": "#/$defs/payload"}, "may not say not_applicable"),
    ],
)
def test_a_planted_narrowing_is_seen(path: str, value: Any, says: str) -> None:
    released, _ = read("contract")
    now = changed(released, path, value)
    found = narrowed(released, now, (released, now), "contract")
    assert any(says in each for each in found), found


def test_what_may_grow_may_grow() -> None:
    released, _ = read("contract")
    now = changed(released, "$defs/tokens/maximum", 1 << 30)
    now = changed(now, "$defs/payload/properties/dtype/enum", ["float64", "float32", "float16", "bfloat16"])
    now = changed(now, "properties/files/maxItems", 4096)
    assert narrowed(released, now, (released, now), "contract") == []
