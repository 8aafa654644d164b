# SPDX-License-Identifier: Apache-2.0
"""Strict reading of one JSON document; the counterpart of `native/src/document.cpp`.

The documents of an engine directory are small, written by machines, and decide what a card may be asked to do. So
nothing is forgiven: what RFC 8259 leaves open (duplicate keys, depth, size, numbers beyond a double) is refused.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

MAX_BYTES: Final = 1 << 20
"""Size of a document, in bytes."""
MAX_DEPTH: Final = 64
"""Lists and objects inside of each other."""
MAX_FINDINGS: Final = 200
"""Findings that one document may have; what is beyond is one last finding that says so."""

_SHOWN_CHARACTERS = 40
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[][{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a document."""

    path: str
    """Path of the field, such as `limits.slots` or `files[2].sha256`; empty for the document as a whole."""
    found: str
    """What is there, as short text; `absent` where nothing is."""
    expected: str
    """What is expected there."""

    def __str__(self) -> str:
        """One line for people: `limits.slots: 0, expected integer from 1 to 65536`."""
        return (
            f"{self.path}: {self.found}, expected {self.expected}"
            if self.path
            else (f"{self.found}, expected {self.expected}")
        )


class Findings:
    """What is wrong with one document, in order, within MAX_FINDINGS."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def add(self, path: str, found: str, expected: str) -> None:
        """Adds a finding."""
        if len(self.all) < MAX_FINDINGS:
            self.all.append(Finding(path, found, expected))
        elif len(self.all) == MAX_FINDINGS:
            self.all.append(Finding("", f"more findings than {MAX_FINDINGS}", "none"))


@dataclass(frozen=True, slots=True)
class HugeInteger:
    """A whole number beyond 64 bits, as written."""

    literal: str


@dataclass(frozen=True, slots=True)
class Real:
    """A number written with a fraction or an exponent."""

    value: float
    literal: str

    @classmethod
    def of(cls, value: float) -> Real:
        """A number that no document wrote."""
        return cls(value, repr(value))


class _Absent:
    """The type of ABSENT."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""Stands for a value that is not there, which is not `null`."""

Document = Any
"""A value as read: None, bool, int of 64 bits, HugeInteger, Real, str, list or dict of such; or ABSENT."""


class _Pairs(list[tuple[str, Any]]):
    """Members of an object as written, repetitions included."""


class _UnreadableError(ValueError):
    """The document cannot be read at all."""

    def __init__(self, found: str, expected: str = "one JSON document in UTF-8") -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected


def read_document(text: bytes, findings: Findings) -> Document:
    """Reads a whole document.

    What cannot be read at all (not JSON, bytes after it, invalid UTF-8, too deep, too large, a number beyond a double)
    is exactly one finding with the empty path, and the result is ABSENT. A key given twice is a finding at its path,
    and the first of the two counts.
    """
    try:
        parsed = _parse(text)
    except _UnreadableError as error:
        findings.add("", error.found, error.expected)
        return ABSENT
    return _merge(parsed, "", findings)


def _parse(text: bytes) -> Any:
    if len(text) > MAX_BYTES:
        raise _UnreadableError(f"{len(text)} bytes", f"at most {MAX_BYTES} bytes")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"no UTF-8 at byte {error.start + 1}") from None
    _check_depth(decoded)
    try:
        parsed = json.loads(
            decoded,
            object_pairs_hook=_Pairs,
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        raise _UnreadableError(f"no JSON at character {error.pos + 1}") from None
    if _has_surrogate(parsed):
        raise _UnreadableError("half of a surrogate pair")
    return parsed


def _check_depth(text: str) -> None:
    """Bounds the nesting before the parser, which recurses, sees it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise _UnreadableError(f"nesting deeper than {MAX_DEPTH}", f"nesting of at most {MAX_DEPTH}")
            case "]" | "}":
                depth -= 1


def _integer(literal: str) -> int | HugeInteger:
    # Twenty characters hold every 64-bit integer; int() of megabytes of digits would be refused or slow.
    if len(literal) <= 20 and int(literal) in _INT64:
        return int(literal)
    _real(literal)
    return HugeInteger(literal)


def _real(literal: str) -> Real:
    value = float(literal)
    if math.isinf(value):
        raise _UnreadableError("a number too large", "numbers within a double")
    return Real(value, literal)


def _no_constant(literal: str) -> Any:
    raise _UnreadableError(f"{literal}, which is not JSON")


def _has_surrogate(parsed: Any) -> bool:
    """Whether any text holds half a surrogate pair, which JSON can write and UTF-8 cannot."""
    match parsed:
        case str():
            return _SURROGATE.search(parsed) is not None
        case _Pairs():
            return any(_has_surrogate(key) or _has_surrogate(value) for key, value in parsed)
        case list():
            return any(_has_surrogate(item) for item in parsed)
        case _:
            return False


def _merge(parsed: Any, path: str, findings: Findings) -> Document:
    """Turns pairs into objects; reports repeated keys in the order in which they are written."""
    if isinstance(parsed, _Pairs):
        merged: dict[str, Any] = {}
        for key, value in parsed:
            at = member_path(path, key)
            repeated = key in merged
            if repeated:
                findings.add(at, "given twice", "given once")
            inner = _merge(value, at, findings)
            if not repeated:
                merged[key] = inner
        return merged
    if isinstance(parsed, list):
        return [_merge(item, item_path(path, index), findings) for index, item in enumerate(parsed)]
    return parsed


def decode(document: Document) -> object:
    """The document as plain Python values: reals as float, whole numbers of any size as int."""
    match document:
        case dict():
            return {key: decode(value) for key, value in document.items()}
        case list():
            return [decode(item) for item in document]
        case Real():
            return document.value
        case HugeInteger():
            return int(document.literal)
        case _:
            return document


def render(value: Document) -> str:
    """A value as the short text of a finding: at most some 60 ASCII characters, strings in quotes."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case HugeInteger() | Real():
            literal = value.literal
            return literal if len(literal) <= _SHOWN_CHARACTERS else literal[:_SHOWN_CHARACTERS] + "..."
        case str():
            return render_text(value)
        case list():
            return f"list of {len(value)} item{'' if len(value) == 1 else 's'}"
        case _:
            return "object"


def render_text(text: str) -> str:
    """A text in quotes, escaped to ASCII and cut as in a finding."""
    shown = json.dumps(text[:_SHOWN_CHARACTERS])
    return shown if len(text) <= _SHOWN_CHARACTERS else shown[:-1] + '..."'


def member_path(path: str, key: str) -> str:
    """The path of a member of the object at `path`."""
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{render_text(key)}]"
    return f"{path}.{key}" if path else key


def item_path(path: str, index: int) -> str:
    """The path of an item of the list at `path`."""
    return f"{path}[{index}]"
