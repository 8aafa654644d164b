# SPDX-License-Identifier: Apache-2.0
"""What one place of a document must be; the counterpart of `native/src/schema_node.h` and `schema.cpp`."""

from __future__ import annotations

import datetime
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from services.common.schema.document import (
    ABSENT,
    Document,
    Findings,
    Real,
    item_path,
    member_path,
    render,
)

NOT_APPLICABLE = "not_applicable"
"""The text that stands wherever a field does not apply to an engine."""

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(slots=True, kw_only=True)
class Node(ABC):
    """What one place of a document must be."""

    expected: str
    """For findings."""
    may_not_apply: bool = False
    """Whether `not_applicable` is as good."""

    def check(self, value: Document, path: str, findings: Findings) -> None:
        """Adds everything that is wrong with `value`, which lies at `path`."""
        if self.may_not_apply and value == NOT_APPLICABLE:
            return
        if value is ABSENT:
            self.absent(path, findings)
        elif self.fits(value):
            self.descend(value, path, findings)
        else:
            findings.add(path, render(value), self.expected)

    def absent(self, path: str, findings: Findings) -> None:
        """Adds what is missing where nothing lies at `path`."""
        findings.add(path, "absent", self.expected)

    @abstractmethod
    def fits(self, value: Document) -> bool:
        """Whether the value itself, without what is inside of it, is as expected."""

    def descend(self, value: Document, path: str, findings: Findings) -> None:  # noqa: B027 -- most have no inside
        """Checks what is inside of a value."""


@dataclass(slots=True, kw_only=True)
class ObjectNode(Node):
    """An object: every property required, no others allowed."""

    properties: dict[str, Node]
    expected: str = "object"

    def fits(self, value: Document) -> bool:
        """Whether it is an object."""
        return isinstance(value, dict)

    def absent(self, path: str, findings: Findings) -> None:
        """Names every field of an object that is not there, unless it may not apply as a whole."""
        if self.may_not_apply:
            findings.add(path, "absent", self.expected)
            return
        for key, node in self.properties.items():
            node.absent(member_path(path, key), findings)

    def descend(self, value: Document, path: str, findings: Findings) -> None:
        """Checks the properties, then names what is no property."""
        for key, node in self.properties.items():
            node.check(value.get(key, ABSENT), member_path(path, key), findings)
        for key, member in value.items():
            if key not in self.properties:
                findings.add(member_path(path, key), render(member), "no field of this name")


@dataclass(slots=True, kw_only=True)
class ListNode(Node):
    """A list of items that are all alike."""

    items: Node
    min_items: int
    max_items: int
    unique: bool

    def fits(self, value: Document) -> bool:
        """Whether it is a list."""
        return isinstance(value, list)

    def descend(self, value: Document, path: str, findings: Findings) -> None:
        """Checks the number of items, then each, then whether it came before."""
        if not self.min_items <= len(value) <= self.max_items:
            findings.add(path, render(value), self.expected)
        seen: set[tuple[type, Any]] = set()
        for index, item in enumerate(value):
            at = item_path(path, index)
            self.items.check(item, at, findings)
            if self.unique and type(item) in (str, int):
                if (type(item), item) in seen:
                    findings.add(at, render(item), "no item twice")
                seen.add((type(item), item))


@dataclass(slots=True, kw_only=True)
class TextNode(Node):
    """A text: one of some words, a date, or of a pattern within a length in code points."""

    words: tuple[str, ...] = ()
    date: bool = False
    pattern: re.Pattern[str] | None = None
    max_length: int = 0

    def fits(self, value: Document) -> bool:
        """Whether it is such a text."""
        if not isinstance(value, str):
            return False
        if self.words:
            return value in self.words
        if self.pattern is not None:
            return len(value) <= self.max_length and self.pattern.fullmatch(value) is not None
        return _is_date(value)


@dataclass(slots=True, kw_only=True)
class IntegerNode(Node):
    """A whole number, written without fraction and exponent."""

    minimum: int
    maximum: int

    def fits(self, value: Document) -> bool:
        """Whether it is a whole number in range."""
        return type(value) is int and self.minimum <= value <= self.maximum


@dataclass(slots=True, kw_only=True)
class RealNode(Node):
    """A number."""

    minimum: float
    maximum: float
    above_minimum: bool
    """Whether the minimum itself is not allowed."""

    def fits(self, value: Document) -> bool:
        """Whether it is a number in range."""
        if type(value) is not int and not isinstance(value, Real):
            return False
        number = value.value if isinstance(value, Real) else float(value)
        above = number > self.minimum if self.above_minimum else number >= self.minimum
        return above and number <= self.maximum


@dataclass(slots=True, kw_only=True)
class BooleanNode(Node):
    """True or false."""

    expected: str = "true or false"

    def fits(self, value: Document) -> bool:
        """Whether it is one of the two."""
        return isinstance(value, bool)


def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True
