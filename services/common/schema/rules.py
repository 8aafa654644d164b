# SPDX-License-Identifier: Apache-2.0
"""What must agree between the fields of a document: `x-rules`; the counterpart of `native/src/rules.cpp`.

A rule is `{"when": [STATEMENT...], "require": STATEMENT, "at": PATH, "expected": TEXT}`, with `when` and `at` optional.
A statement is `[OPERAND, COMPARISON, OPERAND]`, or `[OPERAND, "unique"]`. An operand is a path (`files[].path`,
`shape[-1]`), an integer or boolean, `{"text": TEXT}`, `{"count": PATH}`, `{"sum": [OPERAND...]}` or
`{"product": [OPERAND...]}`.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from services.common.schema.document import Document, Findings, Real, item_path, member_path, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STEP = re.compile(r"\[(-?[0-9]*)\]\.?|([^.\[\]]+)\.?")
_INT64 = range(-(1 << 63), 1 << 63)
_MEMBERS: Final = {"when", "require", "at", "expected", "description"}
_ORDER: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_COMPARISONS: Final = {*_ORDER, "==", "!=", "in", "unique"}

Step = str | int | None
"""One step of a path: a member by name, an item by index, or every item."""
Path = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """A value of one side of a statement: always a boolean, an integer, a real or a text."""

    path: str
    """Empty where it is computed or constant."""
    value: Any
    shown: str
    """For findings."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Something that a rule compares; `kind` is one of path, count, sum, product and constant."""

    kind: str
    path: Path = ()
    terms: tuple[Operand, ...] = ()
    constant: Any = None

    def evaluate(self, document: Document) -> list[Term]:
        """The values that it has; fewer than it names where some are missing or mistyped."""
        match self.kind:
            case "constant":
                return [Term("", self.constant, render(self.constant))]
            case "path":
                found = _follow(document, "", self.path)
                return [Term(path, value, render(value)) for path, value in found if _comparable(value)]
            case "count":
                found = _follow(document, "", self.path)
                return [Term(path, len(value), render(value)) for path, value in found if isinstance(value, list)]
            case _:
                return self._total(document)

    def _total(self, document: Document) -> list[Term]:
        """A sum or product of integers; nothing where a term is missing or the result is beyond 64 bits."""
        total = 0 if self.kind == "sum" else 1
        for term in self.terms:
            values = term.evaluate(document)
            if len(values) != 1 or type(values[0].value) is not int:
                return []
            total = total + values[0].value if self.kind == "sum" else total * values[0].value
            if total not in _INT64:
                return []
        return [Term("", total, str(total))]


@dataclass(frozen=True, slots=True)
class Statement:
    """`left comparison right`; `right` is not there for `unique`."""

    left: Operand
    comparison: str
    right: Operand | None

    def applies(self, document: Document) -> bool:
        """Whether it holds, as a condition: on everything that its left side names, and not where nothing is."""
        left = self.left.evaluate(document)
        right = self.right.evaluate(document) if self.right else []
        return bool(left) and bool(right) and all(self.holds(term, right) is True for term in left)

    def holds(self, term: Term, right: list[Term]) -> bool | None:
        """Whether one value of the left side passes; None where it cannot be compared."""
        match self.comparison:
            case "in":
                return any(_equal(term.value, other.value) for other in right)
            case "==":
                return _equal(term.value, right[0].value)
            case "!=":
                return not _equal(term.value, right[0].value)
            case order:
                a, b = _same_kind(term.value, right[0].value)
                return _ORDER[order](a, b) if _number(a) and _number(b) else None


@dataclass(frozen=True, slots=True)
class Rule:
    """A statement that must hold, where its conditions do."""

    when: tuple[Statement, ...]
    require: Statement
    at: str
    """Path that a finding names; empty: the left side's own."""
    expected: str
    """`{right}` stands for the value of the right side."""

    def check(self, document: Document, findings: Findings) -> None:
        """Adds what it finds wrong; nothing where values are missing or of kinds that cannot be compared."""
        if not all(condition.applies(document) for condition in self.when):
            return
        if self.require.right is None:
            self._check_unique(document, findings)
            return
        right = self.require.right.evaluate(document)
        if not right:
            return
        shown = "" if self.require.comparison == "in" else right[0].shown
        for term in self.require.left.evaluate(document):
            if self.require.holds(term, right) is False:
                self._report(term, shown, findings)

    def _check_unique(self, document: Document, findings: Findings) -> None:
        seen: set[tuple[bool, str]] = set()
        for term in self.require.left.evaluate(document):
            text = isinstance(term.value, str)
            key = (text, term.value if text else term.shown)
            if key in seen:
                self._report(term, "", findings)
            seen.add(key)

    def _report(self, term: Term, right: str, findings: Findings) -> None:
        findings.add(self.at or term.path, term.shown, self.expected.replace("{right}", right, 1))


def compile_rules(name: str, root: dict[str, Any]) -> tuple[Rule, ...]:
    """Compiles the `x-rules` of a schema document.

    Raises:
        ValueError: Something is not understood; names the schema.
    """
    try:
        return tuple(_rule(source) for source in root.get("x-rules", []))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"schema {name}, x-rules: {error!r}") from error


def _rule(source: dict[str, Any]) -> Rule:
    if unknown := source.keys() - _MEMBERS:
        raise ValueError(f"unknown members {sorted(unknown)}")
    when = tuple(_statement(condition) for condition in source.get("when", []))
    require = _statement(source["require"])
    at = source.get("at", "")
    if any(condition.right is None for condition in when):
        raise ValueError("`unique` is no condition")
    if require.left.kind not in ("path", "count") and not at:
        raise ValueError("`at` is missing, and the left side is no path")
    if not source["expected"]:
        raise ValueError("`expected` is missing")
    return Rule(when, require, at, source["expected"])


def _statement(parts: list[Any]) -> Statement:
    if len(parts) < 2 or parts[1] not in _COMPARISONS:
        raise ValueError(f"no statement: {parts}")
    if len(parts) != (2 if parts[1] == "unique" else 3):
        raise ValueError(f"statement of a wrong number of parts: {parts}")
    return Statement(_operand(parts[0]), parts[1], _operand(parts[2]) if len(parts) == 3 else None)


def _operand(source: Any) -> Operand:
    match source:
        case str():
            return Operand("path", path=_path(source))
        case bool() | int():
            return Operand("constant", constant=source)
        case {"text": str() as text, **rest} if not rest:
            return Operand("constant", constant=text)
        case {"count": str() as path, **rest} if not rest:
            return Operand("count", path=_path(path))
        case {"sum": [_, *_] as terms, **rest} if not rest:
            return Operand("sum", terms=tuple(_operand(term) for term in terms))
        case {"product": [_, *_] as terms, **rest} if not rest:
            return Operand("product", terms=tuple(_operand(term) for term in terms))
        case _:
            raise ValueError(f"operand of an unknown kind: {source}")


def _path(text: str) -> Path:
    steps: list[Step] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        if match is None:
            raise ValueError(f"no path: {text}")
        index, member = match.groups()
        steps.append(member if index is None else int(index) if index else None)
        at = match.end()
    if not steps:
        raise ValueError("empty path")
    return tuple(steps)


def _follow(value: Document, at: str, path: Path) -> Iterator[tuple[str, Document]]:
    if not path:
        yield at, value
        return
    step, rest = path[0], path[1:]
    if isinstance(step, str):
        if isinstance(value, dict) and step in value:
            yield from _follow(value[step], member_path(at, step), rest)
    elif isinstance(value, list):
        for index in range(len(value)) if step is None else [step + len(value) if step < 0 else step]:
            if 0 <= index < len(value):
                yield from _follow(value[index], item_path(at, index), rest)


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _comparable(value: Document) -> bool:
    return isinstance(value, bool | int | str | Real)


def _same_kind(a: Any, b: Any) -> tuple[Any, Any]:
    """Both as they compare: as integers where both are, otherwise numbers as doubles, as the native library does."""
    if isinstance(a, Real) or isinstance(b, Real):
        a, b = _as_float(a), _as_float(b)
    return a, b


def _as_float(value: Any) -> Any:
    if isinstance(value, Real):
        return value.value
    return float(value) if type(value) is int else value


def _equal(a: Any, b: Any) -> bool:
    a, b = _same_kind(a, b)
    return type(a) is type(b) and bool(a == b)
