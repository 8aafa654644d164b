# SPDX-License-Identifier: Apache-2.0
"""The schemas stay inside of what both interpreters read, and mean what JSON Schema means."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from services.common import schema
from services.common.schema import nodes
from tests.contract import documents, mutations

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = schema.names()
CLASS = r"(?:\[[ -~]+?\]|[A-Za-z0-9_/=])"
PATTERN = re.compile(rf"\^(?:{CLASS}(?:[*+?]|\{{[0-9]+\}})?|\((?:{CLASS}[*+?]?)+\)[*?]?)+\$")


def source(name: str) -> dict[str, Any]:
    return dict(json.loads((files("engines.schema") / f"{name}.schema.json").read_bytes()))


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_json_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(source(name))


@pytest.mark.parametrize("name", NAMES)
def test_patterns_read_the_same_in_both_languages(name: str) -> None:
    for value in walk(source(name)):
        if isinstance(value, dict) and "pattern" in value:
            pattern = value["pattern"]
            assert PATTERN.fullmatch(pattern), f"{pattern}: only plain ASCII classes, counted, between ^ and $"
            assert not re.search(r"\[\^|\\", pattern), f"{pattern}: no negated classes, no escapes"
            assert value["maxLength"] <= 1024, f"{pattern}: a short text bounds the matching"


@pytest.mark.parametrize("name", NAMES)
def test_rules_name_fields_that_exist(name: str) -> None:
    root = schema.named(name).root
    for rule in schema.named(name).rules:
        for statement in (*rule.when, rule.require):
            for operand in (statement.left, statement.right):
                for path in operand_paths(operand):
                    assert node_at(root, path) is not None, f"{path}: no such field"


def test_our_reading_of_a_schema_is_json_schemas() -> None:
    """Both verdicts agree, rules between fields aside, on what other readers of JSON read as we do."""
    root = schema.named("contract").root
    validator = strict_validator()(source("contract"), format_checker=jsonschema.FormatChecker())
    verdicts = {True: 0, False: 0}
    for label, text in mutations.mutated(documents.all_good(), seed=3, each=30):
        found = schema.Findings()
        document = schema.read_document(text, found)
        if document is schema.ABSENT or found.all:
            continue
        root.check(document, "", found)
        fine = validator.is_valid(schema.document.decode(document))
        assert fine == (not found.all), (label, found.all)
        verdicts[fine] += 1
    assert min(verdicts.values()) > 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"type": "integer", "minimum": 1}, "keyword maximum missing"),
        ({"type": "string"}, "keyword x-expected missing"),
        ({"type": "integer", "minimum": 1, "maximum": 2, "default": 1}, "keyword default is not interpreted"),
        ({"type": ["integer", "string"]}, "is not interpreted"),
        ({"$ref": "#/$defs/none"}, "reference to no definition"),
        ({"anyOf": [{"type": "boolean"}, {"type": "boolean"}]}, "not a choice between not_applicable"),
        (
            {"type": "object", "additionalProperties": False, "required": [], "properties": {"a": {"type": "boolean"}}},
            "required and properties differ",
        ),
        (
            {"type": "object", "additionalProperties": True, "required": [], "properties": {}},
            "open to other properties",
        ),
    ],
)
def test_what_is_not_interpreted_is_refused(change: dict[str, Any], says: str) -> None:
    text = {"type": "object", "additionalProperties": False, "required": ["a"], "properties": {"a": change}}
    with pytest.raises(ValueError, match=re.escape(says)):
        schema.Schema.parse("planted", json.dumps(text).encode())


@pytest.mark.parametrize(
    "rule",
    [
        {"require": ["a", "<", "b"]},
        {"require": ["a", "~", "b"], "expected": "x"},
        {"require": ["a", "unique", "b"], "expected": "x"},
        {"require": [{"sum": ["a", "b"]}, "<", 1], "expected": "x"},
        {"require": ["a", "==", {"text": "x", "more": 1}], "expected": "x"},
        {"when": [["a", "unique"]], "require": ["a", "==", 1], "expected": "x"},
        {"require": ["a", "==", 1], "expected": "x", "unless": []},
    ],
    ids=str,
)
def test_a_rule_that_is_not_understood_is_refused(rule: dict[str, Any]) -> None:
    text = {"type": "object", "additionalProperties": False, "required": [], "properties": {}, "x-rules": [rule]}
    with pytest.raises(ValueError, match="planted, x-rules"):
        schema.Schema.parse("planted", json.dumps(text).encode())


def test_a_schema_that_does_not_exist_is_named() -> None:
    with pytest.raises(LookupError, match=r"no schema nothing; there are .*contract"):
        schema.named("nothing")


def strict_validator() -> Any:
    """JSON Schema with our two readings: 1.0 is no integer, and `$` is the end of the text."""
    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)

    def pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[Any]:
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            yield jsonschema.ValidationError(f"{value!r} is not {pattern}")

    return jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern}, type_checker=checker)


def walk(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def operand_paths(operand: Any) -> Iterator[tuple[Any, ...]]:
    if operand is not None:
        if operand.path:
            yield operand.path
        for term in operand.terms:
            yield from operand_paths(term)


def node_at(node: nodes.Node | None, path: tuple[Any, ...]) -> nodes.Node | None:
    for step in path:
        if isinstance(step, str):
            node = node.properties.get(step) if isinstance(node, nodes.ObjectNode) else None
        else:
            node = node.items if isinstance(node, nodes.ListNode) else None
    return node
