# SPDX-License-Identifier: Apache-2.0
"""From a schema document to nodes; the counterpart of `native/src/schema_node.cpp`.

Of JSON Schema 2020-12 a small part is read, in which every property is required and no other is allowed: an engine's
document has no defaults. `engines/schema/README.md` lists the part. What is outside of it is refused, never ignored.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from services.common.schema.document import Real, member_path, render, render_text
from services.common.schema.nodes import (
    NOT_APPLICABLE,
    BooleanNode,
    IntegerNode,
    ListNode,
    Node,
    ObjectNode,
    RealNode,
    TextNode,
)

_DEFINITIONS = "#/$defs/"
_MAX_SCHEMA_DEPTH = 32


def compile_schema(name: str, root: dict[str, Any]) -> Node:
    """Compiles a schema document as `read_document` gives it.

    Raises:
        ValueError: It is outside of what is interpreted; names schema and place.
    """
    return _Compiler(name, root).node(root, "", 0)


class _Compiler:
    _ROOT: ClassVar = {"$schema", "$id", "$defs", "title", "x-rules"}
    _OBJECT: ClassVar = {"type", "additionalProperties", "required", "properties"}

    def __init__(self, name: str, root: dict[str, Any]) -> None:
        self._name = name
        self._root = root

    def node(self, schema: Any, at: str, depth: int) -> Node:
        if depth > _MAX_SCHEMA_DEPTH:
            raise self._error(at, "nested too deeply, or a reference to itself")
        if not isinstance(schema, dict):
            raise self._error(at, "no object")
        if "$ref" in schema:
            self._only(schema, at, {"$ref"})
            return self.node(self._definition(schema["$ref"], at), at, depth + 1)
        if "anyOf" in schema:
            self._only(schema, at, {"anyOf"})
            return self._optional(schema["anyOf"], at, depth)
        match schema.get("type"):
            case "object":
                return self._object(schema, at, depth)
            case "array":
                return self._list(schema, at, depth)
            case "string":
                return self._text(schema, at)
            case "integer":
                return self._integer(schema, at)
            case "number":
                return self._real(schema, at)
            case "boolean":
                self._only(schema, at, {"type"})
                return BooleanNode()
            case other:
                raise self._error(at, f"type {other} is not interpreted")

    def _error(self, at: str, why: str) -> ValueError:
        return ValueError(f"schema {self._name}, {at or 'root'}: {why}")

    def _only(self, schema: dict[str, Any], at: str, keywords: set[str]) -> None:
        for keyword in schema:
            if keyword != "description" and keyword not in keywords:
                raise self._error(at, f"keyword {keyword} is not interpreted here")

    def _need(self, schema: dict[str, Any], at: str, keyword: str, kind: type) -> Any:
        value = schema.get(keyword)
        if type(value) is not kind:
            raise self._error(at, f"keyword {keyword} missing or mistyped")
        return value

    def _definition(self, reference: Any, at: str) -> Any:
        target = str(reference).removeprefix(_DEFINITIONS)
        if target == reference or target not in self._root.get("$defs", {}):
            raise self._error(at, "reference to no definition")
        return self._root["$defs"][target]

    def _optional(self, choice: Any, at: str, depth: int) -> Node:
        """`anyOf` is read in one form only: "not_applicable", or what the second branch says."""
        if not isinstance(choice, list) or len(choice) != 2 or choice[0] != {"const": NOT_APPLICABLE}:
            raise self._error(at, "anyOf is not a choice between not_applicable and one other schema")
        node = self.node(choice[1], at, depth + 1)
        node.may_not_apply = True
        node.expected = f'"{NOT_APPLICABLE}" or {node.expected}'
        return node

    def _object(self, schema: dict[str, Any], at: str, depth: int) -> Node:
        self._only(schema, at, self._OBJECT | (self._ROOT if depth == 0 else set()))
        if self._need(schema, at, "additionalProperties", bool):
            raise self._error(at, "open to other properties")
        properties = self._need(schema, at, "properties", dict)
        if self._need(schema, at, "required", list) != list(properties):
            raise self._error(at, "required and properties differ")
        return ObjectNode(
            properties={key: self.node(value, member_path(at, key), depth + 1) for key, value in properties.items()}
        )

    def _list(self, schema: dict[str, Any], at: str, depth: int) -> Node:
        self._only(schema, at, {"type", "minItems", "maxItems", "uniqueItems", "items"})
        low, high = self._need(schema, at, "minItems", int), self._need(schema, at, "maxItems", int)
        items = self.node(schema.get("items"), f"{at}[]", depth + 1)
        unique = schema.get("uniqueItems") is True
        if unique and not isinstance(items, TextNode | IntegerNode):
            raise self._error(at, "uniqueItems is for texts and integers")
        expected = f"list of {low} to {high} items"
        return ListNode(expected=expected, items=items, min_items=low, max_items=high, unique=unique)

    def _text(self, schema: dict[str, Any], at: str) -> Node:
        if "enum" in schema:
            self._only(schema, at, {"type", "enum"})
            words = self._need(schema, at, "enum", list)
            if not words or not all(isinstance(word, str) for word in words):
                raise self._error(at, "enum of something else than texts")
            return TextNode(expected="one of " + ", ".join(render_text(word) for word in words), words=tuple(words))
        if "format" in schema:
            self._only(schema, at, {"type", "format"})
            if schema["format"] != "date":
                raise self._error(at, f"format {schema['format']} is not interpreted")
            return TextNode(expected="date as YYYY-MM-DD", date=True)
        self._only(schema, at, {"type", "maxLength", "pattern", "x-expected"})
        return TextNode(
            expected=self._need(schema, at, "x-expected", str),
            pattern=re.compile(self._need(schema, at, "pattern", str)),
            max_length=self._need(schema, at, "maxLength", int),
        )

    def _integer(self, schema: dict[str, Any], at: str) -> Node:
        if "const" in schema:
            self._only(schema, at, {"type", "const"})
            only = self._need(schema, at, "const", int)
            return IntegerNode(expected=f"integer {only}", minimum=only, maximum=only)
        self._only(schema, at, {"type", "minimum", "maximum"})
        low, high = self._need(schema, at, "minimum", int), self._need(schema, at, "maximum", int)
        return IntegerNode(expected=f"integer from {low} to {high}", minimum=low, maximum=high)

    def _real(self, schema: dict[str, Any], at: str) -> Node:
        self._only(schema, at, {"type", "minimum", "exclusiveMinimum", "maximum"})
        above = "exclusiveMinimum" in schema
        low, high = schema.get("exclusiveMinimum" if above else "minimum"), schema.get("maximum")
        if low is None or high is None:
            raise self._error(at, "number without minimum and maximum")
        expected = (
            f"number above {render(low)} and at most {render(high)}"
            if above
            else f"number from {render(low)} to {render(high)}"
        )
        return RealNode(expected=expected, minimum=_float(low), maximum=_float(high), above_minimum=above)


def _float(number: Any) -> float:
    return number.value if isinstance(number, Real) else float(number)
