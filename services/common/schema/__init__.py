# SPDX-License-Identifier: Apache-2.0
"""The rules of contracts and engine configurations, interpreted.

The rules live in `engines/schema/*.schema.json`; the native library interprets the same files (`native/src/schema.h`),
and a test holds both to the same findings on hundreds of broken documents.

    document   strict reading of one JSON document, and how findings name and show its values
    nodes      what one place of a document must be
    compiler   from a schema document to nodes: the part of JSON Schema that is read
    rules      what must agree between fields: `x-rules`
"""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.schema.compiler import compile_schema
from services.common.schema.document import (
    ABSENT,
    Document,
    Finding,
    Findings,
    HugeInteger,
    Real,
    decode,
    read_document,
)
from services.common.schema.rules import Rule, compile_rules

if TYPE_CHECKING:
    from services.common.schema.nodes import Node

__all__ = [
    "ABSENT",
    "Document",
    "Finding",
    "Findings",
    "HugeInteger",
    "Real",
    "Schema",
    "check_text",
    "named",
    "names",
    "read_document",
    "source",
]

_SUFFIX = ".schema.json"


@dataclass(frozen=True, slots=True)
class Schema:
    """One schema, compiled."""

    name: str
    root: Node
    rules: tuple[Rule, ...]

    @classmethod
    def parse(cls, name: str, text: bytes) -> Schema:
        """Compiles a schema from its text.

        Raises:
            ValueError: It is no strict JSON, or outside of what is interpreted.
        """
        findings = Findings()
        root = read_document(text, findings)
        if not isinstance(root, dict) or findings.all:
            raise ValueError(f"schema {name} is no strict JSON object: {findings.all}")
        return cls(name, compile_schema(name, root), compile_rules(name, root))

    def check(self, document: Document, findings: Findings) -> None:
        """Adds everything that is wrong: first field by field, then the rules between fields.

        A rule is left out where one of its values is missing or mistyped, which is a finding already.
        """
        self.root.check(document, "", findings)
        for rule in self.rules:
            rule.check(document, findings)


@functools.cache
def named(name: str) -> Schema:
    """The schema `engines/schema/<name>.schema.json`.

    Raises:
        LookupError: There is none.
        ValueError: It is outside of what is interpreted.
    """
    return Schema.parse(name, source(name))


def source(name: str) -> bytes:
    """The text of a schema, as JSON Schema 2020-12; `x-rules` between fields are for our own interpreters.

    Raises:
        LookupError: There is none of this name.
    """
    if name not in names():
        raise LookupError(f"there is no schema {name}; there are {', '.join(names())}")
    return (importlib.resources.files("engines.schema") / f"{name}{_SUFFIX}").read_bytes()


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all schemas, in order."""
    files = importlib.resources.files("engines.schema").iterdir()
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)))


def check_text(schema: str, text: bytes) -> tuple[object, list[Finding]]:
    """Reads a document and checks it against a named schema.

    Returns:
        The document as plain Python values, None where it cannot be read at all, and everything wrong with it. Only a
        document without findings may be used.
    """
    findings = Findings()
    document = read_document(text, findings)
    if document is not ABSENT:
        named(schema).check(document, findings)
        return decode(document), list(findings.all)
    return None, list(findings.all)
