# SPDX-License-Identifier: Apache-2.0
"""Broken documents, from a seed: what a careless hand, a wrong tool or a hostile one would leave in a contract."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that goes into the document as it is."""

    text: str


class Pairs(list[tuple[str, Any]]):
    """An object as a list of members, so that a key can come twice."""


def dump(value: Any) -> str:
    """JSON of plain values, Raw text and Pairs."""
    match value:
        case Raw():
            return value.text
        case Pairs():
            return "{" + ", ".join(f"{json.dumps(key)}: {dump(item)}" for key, item in value) + "}"
        case dict():
            return dump(Pairs(value.items()))
        case list():
            return "[" + ", ".join(dump(item) for item in value) + "]"
        case _:
            return json.dumps(value)


Place = tuple[Any, Any]
"""A container and the key or index of a value in it."""


def places(value: Any) -> Iterator[Place]:
    """Every place of a document that holds a value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


NUMBERS = [
    "0", "-1", "-0", "1", "2", "63", "65537", "16777217", "2147483648", "4294967296", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "18446744073709551616",
    "1" + "0" * 30, "1" + "0" * 308, "-1" + "0" * 60, "1.0", "0.0", "-0.0", "0.5", "1e2", "1E+2", "1e-2", "1e308",
    "1e-400", "123456789012345678901234567890123456789012345678.5", "0.999999999999999999999",
]  # fmt: skip
UNREADABLE_NUMBERS = [
    "NaN", "Infinity", "-Infinity", "1e400", "-1e999", "1" + "0" * 400, "01", "+1", "1.", ".5", "0x10", "1_000", "--1",
]  # fmt: skip
TEXTS = [
    "", " ", "not_applicable", "NOT_APPLICABLE", "cpu", "CPU", "9.0", "9", "q8_0", "a" * 65, "a" * 129, "é", "ein Wort",
    "null", "line\nbreak", "trailing\n", "\x00", "tab\t", "\x7f", "\u2028", "\U0001f600", "\uffff", "\u0663.\u0660",
    "\U0001d7d7.\U0001d7ce",
    "2026-02-29", "2024-02-29", "2026-13-01", "0000-01-01", "2026-1-1", "2026-11-29 ", "20261129", "0" * 64, "F" * 64,
    "name=value", "=value", "name", "json_schema", "float32", '"', "\\", "/", "x" * 5000,
]  # fmt: skip
PATHS = [
    "../contract.json", "/etc/passwd", "a/../b", "./a", "a//b", "a/", "a\\b", "C:\\a", "..", ".", "...", ".hidden",
    "a/.hidden", "contract.json", "weights/../contract.json", "a\x00b", "a\nb", "~/a", "%2e%2e/a", "a/b/c", "a" * 256,
    "tokenizer.json", "TOKENIZER.JSON", "\uff45ngine.json", "engine.json", "-rf", "a/-rf", "a b",
]  # fmt: skip
KEYS = [
    "",
    "slots",
    "Slots",
    "unknown",
    "a b",
    "a.b",
    "a[0]",
    "\u00fc",
    "\U0001f600",
    "0",
    "x" * 100,
    '"',
    "\n",
    "__proto__",
]
OTHER_TYPES: list[Any] = [None, True, False, 0, 7, -1, "", "text", [], [1], [[]], {}, {"value": 1}, Raw("1.5")]
BYTES = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"\xf8\x88\x80\x80\x80"]
BAD_ESCAPES = [
    "\\ud800",
    "\\udc00\\ud800",
    "\\ud800\\u0041",
    "\\ud83d\\ude00",
    "\\u12",
    "\\x41",
    "\\",
    "\x01",
    "\\uD83D",
]


def _some(rng: random.Random, found: list[Place], most: int) -> list[Place]:
    return rng.sample(found, min(len(found), rng.randint(1, most)))


def delete(rng: random.Random, document: Any) -> str:
    """Leaves out one to three fields or items."""
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(list(places(document)))
        del container[key]
    return dump(document)


def retype(rng: random.Random, document: Any) -> str:
    """Gives one field a value of another type."""
    container, key = rng.choice(list(places(document)))
    container[key] = rng.choice(OTHER_TYPES)
    return dump(document)


def renumber(rng: random.Random, document: Any) -> str:
    """Gives one to four numbers another value, in any spelling that JSON has."""
    numbers = [place for place in places(document) if type(place[0][place[1]]) in (int, float)]
    for container, key in _some(rng, numbers, 4):
        container[key] = Raw(rng.choice(NUMBERS))
    return dump(document)


def misspell_number(rng: random.Random, document: Any) -> str:
    """Writes a number as JSON does not, or as no double holds."""
    container, key = rng.choice(list(places(document)))
    container[key] = Raw(rng.choice(UNREADABLE_NUMBERS))
    return dump(document)


def retext(rng: random.Random, document: Any) -> str:
    """Gives one or two texts another value."""
    texts = [place for place in places(document) if isinstance(place[0][place[1]], str)]
    for container, key in _some(rng, texts, 2):
        container[key] = rng.choice(TEXTS)
    return dump(document)


def trick_path(rng: random.Random, document: Any) -> str:
    """Gives a path of the contract a value that leads astray."""
    paths = [place for place in places(document) if place[1] in ("path", "file", "gguf")] or list(places(document))
    container, key = rng.choice(paths)
    container[key] = rng.choice(PATHS)
    return dump(document)


def add_key(rng: random.Random, document: Any) -> str:
    """Adds fields that no document has, many of them at times."""
    objects = [document] + [c[k] for c, k in places(document) if isinstance(c[k], dict)]
    for _ in range(rng.choice([1, 2, 300])):
        rng.choice(objects)[rng.choice(KEYS) + str(rng.randint(0, 999)) * rng.randint(0, 1)] = rng.choice(OTHER_TYPES)
    return dump(document)


def repeat_key(rng: random.Random, document: Any) -> str:
    """Gives a key twice, with the same or another value, also inside of a value that is dropped."""
    objects = [document] + [c[k] for c, k in places(document) if isinstance(c[k], dict)]
    target = rng.choice([found for found in objects if found])
    pairs = Pairs(target.items())
    key, value = rng.choice(pairs)
    again = rng.choice([value, Raw('{"a": 1, "a": {"b": 2, "b": 3}}'), *OTHER_TYPES])
    pairs.insert(rng.randint(0, len(pairs)), (key, again))
    if target is document:
        return dump(pairs)
    container, at = next(place for place in places(document) if place[0][place[1]] is target)
    container[at] = pairs
    return dump(document)


def disagree(rng: random.Random, document: Any) -> str:
    """Changes values that stay in range, so that only the agreement between fields is hurt."""
    small = [place for place in places(document) if type(place[0][place[1]]) is int and place[1] != "contract_version"]
    for container, key in _some(rng, small, 2):
        container[key] = max(1, container[key] + rng.choice([-1, 1, container[key], -container[key] // 2]))
    maybe = [place for place in places(document) if place[0][place[1]] == "not_applicable"]
    if maybe and rng.random() < 0.5:
        container, key = rng.choice(maybe)
        container[key] = rng.choice([1, 0.5, "word", "9.0"])
    return dump(document)


def relist(rng: random.Random, document: Any) -> str:
    """Repeats, empties, shuffles or fills up a list."""
    lists = [place for place in places(document) if isinstance(place[0][place[1]], list)]
    if not lists:
        return dump(document)
    container, key = rng.choice(lists)
    items = container[key]
    match rng.randint(0, 3):
        case 0:
            container[key] = []
        case 1:
            container[key] = items + copy.deepcopy(items)
        case 2:
            container[key] = items * 400 or [0] * 400
        case _:
            container[key] = [*items, rng.choice(OTHER_TYPES)]
    return dump(document)


def nest(rng: random.Random, document: Any) -> str:
    """Puts values inside of each other, about as deep as allowed or far deeper."""
    depth = rng.choice([1, 30, 59, 60, 61, 62, 63, 64, 65, 200, 100_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    container, key = rng.choice(list(places(document)))
    inner = rng.choice(["1", '"["', '"]]]]"'])
    container[key] = Raw(opening * depth + inner + closing * rng.choice([depth, depth, depth - 1]))
    return dump(document)


def escape(rng: random.Random, document: Any) -> str:
    """Writes a text or a key with escapes, good, halved and bad ones."""
    container, key = rng.choice(list(places(document)))
    container[key] = Raw('"' + rng.choice(["", "a", "é"]) + rng.choice(BAD_ESCAPES) + rng.choice(["", "b"]) + '"')
    return dump(document)


def spoil_bytes(rng: random.Random, document: Any) -> bytes:
    """Puts bytes that are no UTF-8 somewhere, cuts the document, or takes one byte for another."""
    text = dump(document).encode()
    at = rng.randrange(len(text))
    match rng.randint(0, 2):
        case 0:
            return text[:at] + rng.choice(BYTES) + text[at:]
        case 1:
            return text[:at]
        case _:
            return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]


def surround(rng: random.Random, document: Any) -> str:
    """Puts something before or behind the document: blanks, which are fine, or more, which is not."""
    before = rng.choice(["", " ", "\r\n\t", "\ufeff", "\v", "// comment\n", "\u00a0"])
    behind = rng.choice(["", "\n", " \t\r\n", "{}", ",", "\x00", "/* */", "]", " " * 1_048_576])
    return before + dump(document) + behind


def replace_whole(rng: random.Random, _document: Any) -> str:
    """Something else than a contract altogether."""
    return rng.choice(
        ["", " ", "{}", "[]", "null", "true", "0", "1.5", '"text"', "{", "[[]", "nul", '{"a" 1}', "{1: 2}"]
    )


KINDS: list[Callable[[random.Random, Any], str | bytes]] = [
    delete, retype, renumber, misspell_number, retext, trick_path, add_key, repeat_key, disagree, relist, nest, escape,
    spoil_bytes, surround, replace_whole,
]  # fmt: skip


def mutated(documents: list[Any], seed: int, each: int) -> Iterator[tuple[str, bytes]]:
    """Yields `each` documents of every kind, as (kind and number, text), made from the given ones in turn."""
    for kind in KINDS:
        for number in range(each):
            rng = random.Random(f"{seed} {kind.__name__} {number}")
            text = kind(rng, copy.deepcopy(documents[number % len(documents)]))
            yield (
                f"{kind.__name__} {number}",
                text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"),
            )
