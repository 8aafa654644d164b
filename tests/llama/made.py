# SPDX-License-Identifier: Apache-2.0
"""Guides made up by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random


def schema(chance: random.Random, depth: int = 2) -> Any:
    """A JSON schema of everything that guides enforce, small enough that chance finds its way to an end."""
    kinds = ["integer", "number", "string", "pattern", "format", "boolean", "null", "enum", "const"]
    if depth > 0:
        kinds += ["object", "object", "array", "array", "tuple", "anyOf", "oneOf", "map", "types"]
    match chance.choice(kinds):
        case "integer":
            low = chance.randint(-2000, 2000)
            bounds = [{}, {"minimum": low}, {"minimum": low, "maximum": low + chance.randint(0, 5000)}]
            return {"type": "integer", **chance.choice(bounds), **chance.choice([{}, {"exclusiveMaximum": 9000}])}
        case "number":
            low = chance.randint(-50, 50)
            return {"type": "number", **chance.choice([{}, {"minimum": low}, {"minimum": low, "maximum": low + 2.5}])}
        case "string":
            least = chance.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 4)}
        case "pattern":
            return {"type": "string", "pattern": f"^{regex(chance, 1)}$"}
        case "format":
            return {"type": "string", "format": chance.choice(["date", "time", "date-time", "uuid", "ipv4"])}
        case "enum":
            return {"enum": chance.sample(["red", "bl\u00fce", 'qu"ote', 7, -0.5, None, True, [1, "x"], {"k": 1}], 3)}
        case "const":
            return {"const": chance.choice(["a\nb", 12, [], {"deep": [{}]}])}
        case "object":
            names = chance.sample(["name", "age", "tag", "\u20ac", "a b", 'q"'], chance.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: schema(chance, depth - 1) for name in names},
                "required": chance.sample(names, chance.randint(0, len(names))),
                **chance.choice([{}, {"additionalProperties": False}]),
            }
        case "array":
            least = chance.randint(0, 2)
            most = {"maxItems": least + chance.randint(0, 2)}
            return {"type": "array", "items": schema(chance, depth - 1), "minItems": least, **most}
        case "tuple":
            items = [schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": chance.randint(0, len(items))}
        case "anyOf":
            return {"anyOf": [schema(chance, depth - 1) for _ in range(2)]}
        case "oneOf":
            return {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"type": "null"}]}
        case "map":
            return {"type": "object", "additionalProperties": schema(chance, 0)}
        case "types":
            return {"type": ["integer", "null", "boolean"], "minimum": 3, "description": "three types"}
        case kind:
            return {"type": kind}


def regex(chance: random.Random, depth: int = 2) -> str:
    """A regular expression of everything that guides enforce, without unbounded repetitions of much."""
    parts = ["a", "Z", "7", r"\d", r"\w", "[a-f]", "[^x-z\\s]", r"\.", "\u20ac", "[\u00e4\u00f6\u00fc]", r"\x41"]
    if depth > 0:
        parts += [f"({regex(chance, depth - 1)})", f"(?:{regex(chance, depth - 1)}|{regex(chance, depth - 1)})"] * 2
    repetitions = ["", "", "", "?", "{2}", "{1,3}", "{0,2}"]
    return "".join(chance.choice(parts) + chance.choice(repetitions) for _ in range(chance.randint(1, 4)))
