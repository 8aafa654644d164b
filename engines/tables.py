# SPDX-License-Identifier: Apache-2.0
"""TOML documents as frozen dataclasses, read strictly: every field is there, of its type, and no other."""

from __future__ import annotations

import tomllib
import typing
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from services.common.errors import FailedPreconditionError

T = TypeVar("T")


def parse(kind: type[T], what: str, text: str) -> T:
    """Reads a document.

    Args:
        kind: A dataclass whose fields are `str`, `int`, `float`, `bool`, tuples of such, or further dataclasses.
        what: What the document is, for messages: `tier cpu-generate`.
        text: The document.

    Raises:
        FailedPreconditionError: It is no TOML, or a field of it is missing, unknown or mistyped: all are named.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FailedPreconditionError(f"{what}: {error}") from error
    wrong: list[str] = []
    made = _build(kind, document, "", wrong)
    if wrong:
        raise FailedPreconditionError(f"{what}: " + "; ".join(wrong))
    return typing.cast("T", made)


def _build(kind: Any, value: Any, path: str, wrong: list[str]) -> Any:
    """The value of an annotated type; what does not fit goes into `wrong`, and the result is not to be used."""
    if isinstance(kind, type) and is_dataclass(kind):
        return _build_table(kind, value, path, wrong)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            wrong.append(f"{path} is {value!r}, expected a list")
            return ()
        item = typing.get_args(kind)[0]
        return tuple(_build(item, each, f"{path}[{index}]", wrong) for index, each in enumerate(value))
    if type(value) is not kind:
        wrong.append(f"{path} is {value!r}, expected {kind.__name__}")
    return value


def _build_table(kind: Any, value: Any, path: str, wrong: list[str]) -> Any:
    if not isinstance(value, dict):
        wrong.append(f"{path} is {value!r}, expected a table")
        return None
    at = f"{path}." if path else ""
    hints = typing.get_type_hints(kind)
    wrong += [f"{at}{name} is unknown" for name in value if name not in hints]
    wrong += [f"{at}{field.name} is missing" for field in fields(kind) if field.name not in value]
    built = {name: _build(hint, value[name], f"{at}{name}", wrong) for name, hint in hints.items() if name in value}
    return kind(**built) if len(built) == len(hints) else None
