# SPDX-License-Identifier: Apache-2.0
"""JSON values held to a type. A value of another one raises TypeError with what it is and what is expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.common.errors import InvalidArgumentError, Violation

if TYPE_CHECKING:
    from collections.abc import Callable

ROW_ID_BYTES_MAX = 512
"""Longest id of a row, in bytes of UTF-8."""


def invalid(field: str, description: str) -> InvalidArgumentError:
    """The error of one field."""
    return InvalidArgumentError.of([Violation(field, description)])


def kind(value: Any) -> str:
    """What a JSON value is, in JSON's words, with the value itself where it is short."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value}"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "an object"


def whole(value: Any) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"is {kind(value)}, a whole number is expected")
    return value


def number(value: Any) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"is {kind(value)}, a number is expected")
    return float(value)


def truth(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(f"is {kind(value)}, true or false is expected")
    return value


def text(value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise TypeError(f"is {kind(value)}, text is expected")
    return value


def items(value: Any, item: Callable[[Any], Any]) -> list[Any]:
    """A list, each item held to a type of its own."""
    if not isinstance(value, list):
        raise TypeError(f"is {kind(value)}, a list is expected")
    return [item(each) for each in value]


def row_id(value: Any) -> str:
    """An id of a row.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty or too long.
    """
    size = len(text(value).encode())
    if not 1 <= size <= ROW_ID_BYTES_MAX:
        raise ValueError(f"is {size:,} bytes long, expected 1 to {ROW_ID_BYTES_MAX}")
    return str(value)
