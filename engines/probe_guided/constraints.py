# SPDX-License-Identifier: Apache-2.0
"""Constraints of the kinds that bulk work brings, each with the check that an answer keeps it."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ifabric.engine.v1 import contract_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

_SYLLABLES: Final = (
    "al",
    "ber",
    "cor",
    "dan",
    "el",
    "fir",
    "gon",
    "har",
    "il",
    "jor",
    "kel",
    "lum",
    "mar",
    "nor",
    "os",
)
_CODE: Final = r"[A-Z]{3}-[0-9]{4}(-[a-z]{2}){1,3}"
_GRAMMAR: Final = """root ::= sum
sum ::= term (" + " term){1,4}
term ::= number | "(" number " * " number ")"
number ::= [1-9] [0-9]{0,2}
"""
_SUM: Final = re.compile(r"(?:N|\(N \* N\))(?: \+ (?:N|\(N \* N\))){1,4}".replace("N", "[1-9][0-9]{0,2}"))


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint."""

    name: str
    kind: contract_pb2.GuideKind.ValueType
    word: str
    """The kind as contracts call it."""
    text: str
    prompt: str
    max_tokens: int
    keeps: Callable[[str], bool]
    """Whether an answer that ended by itself is what was asked for."""
    begins: Callable[[str], bool]
    """Whether a text that was cut off can be the beginning of such an answer."""


def constraints(catalogue: int, *, seed: int = 1) -> list[Constraint]:
    """The constraints of a probe.

    Args:
        catalogue: Names in the catalogue.
        seed: Another one makes other names and fields, so that nothing compiled earlier fits.
    """
    names = _names(catalogue, seed)
    listed = frozenset(names)
    return [
        Constraint(
            f"catalogue of {catalogue} names",
            contract_pb2.GUIDE_KIND_JSON_SCHEMA,
            "json_schema",
            json.dumps({"enum": names}),
            "The best product of the list is",
            48,
            lambda text: _json(text) in listed,
            lambda text: any(json.dumps(name).startswith(text) for name in names),
        ),
        Constraint(
            "nested schema",
            contract_pb2.GUIDE_KIND_JSON_SCHEMA,
            "json_schema",
            json.dumps(_nested(seed)),
            "An order of two things, as JSON:",
            96,
            lambda text: _keeps_nested(_json(text), seed),
            lambda text: text.startswith("{"),
        ),
        Constraint(
            "regular expression",
            contract_pb2.GUIDE_KIND_REGEX,
            "regex",
            f"{_CODE}|void{seed}",
            "The code of the part is",
            32,
            lambda text: re.fullmatch(f"{_CODE}|void{seed}", text) is not None,
            lambda text: re.fullmatch(r"[A-Z]{0,3}|[A-Z]{3}-[0-9]{0,4}|[A-Z]{3}-[0-9]{4}[a-z-]*|v.*", text) is not None,
        ),
        Constraint(
            "grammar",
            contract_pb2.GUIDE_KIND_GRAMMAR,
            "grammar",
            _GRAMMAR + f"# {seed}\n",
            "Calculate:",
            64,
            lambda text: _SUM.fullmatch(text) is not None,
            lambda text: re.fullmatch(r"[0-9()*+ ]*", text) is not None,
        ),
    ]


def _names(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)  # noqa: S311 -- names of a catalogue, nothing secret
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(chance.choices(_SYLLABLES, k=chance.randint(2, 4))).title() + f" {chance.randint(1, 999)}"] = None
    return list(names)


def _nested(seed: int) -> dict[str, Any]:
    line = {
        "type": "object",
        "properties": {
            "part": {"enum": ["bolt", "nut", "gear"]},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["new", "used"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["part", "count", "tags"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            f"order_{seed}": {"enum": ["open", "paid"]},
            "lines": {"type": "array", "items": line, "minItems": 1, "maxItems": 2},
        },
        "required": [f"order_{seed}", "lines"],
        "additionalProperties": False,
    }


def _keeps_nested(value: Any, seed: int) -> bool:
    if not isinstance(value, dict) or set(value) != {f"order_{seed}", "lines"}:
        return False
    lines = value["lines"]
    return (
        value[f"order_{seed}"] in ("open", "paid")
        and isinstance(lines, list)
        and 1 <= len(lines) <= 2
        and all(
            isinstance(line, dict)
            and set(line) == {"part", "count", "tags"}
            and line["part"] in ("bolt", "nut", "gear")
            and type(line["count"]) is int
            and isinstance(line["tags"], list)
            and 1 <= len(line["tags"]) <= 2
            and all(tag in ("new", "used") for tag in line["tags"])
            for line in lines
        )
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
