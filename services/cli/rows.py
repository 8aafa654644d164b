# SPDX-License-Identifier: Apache-2.0
"""Rows of a bulk job: JSON lines in, requests out.

A row is one JSON object: `prompt` (text) or `token_ids`, and, where wanted, `id`, `max_tokens`, the sampling parameters
of `ifabric.engine.v1.SamplingParameters`, `stop`, `stop_token_ids`, `ignore_end`, `samples`, `logprobs`,
`prompt_logprobs`, `return_token_ids`, `priority`, `tenant`, `cache_salt`, `engine_id`, `engine_digest`. Values are
judged by the broker; what cannot even be put into a request is judged here, and every field at fault is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ifabric.broker.v1 import broker_service_pb2
from services.common.errors import AlreadyExistsError, FabricError, InvalidArgumentError, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    Setter = Callable[[broker_service_pb2.GenerationRequest, Any], None]


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be sent."""

    line: int
    request: broker_service_pb2.GenerationRequest

    @property
    def row_id(self) -> str:
        """Its id."""
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be sent."""

    line: int
    row_id: str
    error: FabricError


def read_rows(file: BinaryIO) -> Iterator[Row | BadRow]:
    """Yields the rows of `file` in order; empty lines are skipped. A row without `id` is called `line-N`."""
    seen: set[str] = set()
    for line, raw in enumerate(file, start=1):
        if not raw.strip():
            continue
        row = _parse(line, raw)
        if isinstance(row, Row) and row.row_id in seen:
            row = BadRow(line, row.row_id, AlreadyExistsError(f"the id {row.row_id!r} stands on an earlier line too"))
        seen.add(row.row_id)
        yield row


def _parse(line: int, raw: bytes) -> Row | BadRow:
    default_id = f"line-{line}"
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return BadRow(line, default_id, _invalid("row", f"line {line} is not JSON: {error.msg}"))
    if not isinstance(fields, dict):
        return BadRow(line, default_id, _invalid("row", f"line {line} is {_kind(fields)}, an object is expected"))
    row_id = fields.get("id", default_id)
    if not isinstance(row_id, str):
        return BadRow(line, default_id, _invalid("id", f"is {_kind(row_id)}, text is expected"))
    request = broker_service_pb2.GenerationRequest(request_id=row_id)
    violations: list[Violation] = []
    for name, value in fields.items():
        if name == "id":
            continue
        setter = _SETTERS.get(name)
        if setter is None:
            violations.append(Violation(name, "is not a field of a row"))
            continue
        try:
            setter(request, value)
        except (TypeError, ValueError, OverflowError) as error:
            violations.append(Violation(name, str(error)))
    if "prompt" in fields and "token_ids" in fields:
        violations.append(Violation("prompt", "stands beside token_ids; a row has one of the two"))
    if "prompt" not in fields and "token_ids" not in fields:
        violations.append(Violation("prompt", "is absent; a row has prompt or token_ids"))
    if violations:
        return BadRow(line, row_id, InvalidArgumentError.of(violations))
    return Row(line, request)


def _invalid(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of([Violation(field, description)])


def _kind(value: Any) -> str:
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


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"is {_kind(value)}, a whole number is expected")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"is {_kind(value)}, a number is expected")
    return float(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"is {_kind(value)}, true or false is expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"is {_kind(value)}, text is expected")
    return value


def _list(value: Any, item: Callable[[Any], Any]) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"is {_kind(value)}, a list is expected")
    return [item(each) for each in value]


def _assign(name: str, check: Callable[[Any], Any], *, of: str = "") -> Setter:
    def put(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
        checked = check(value)
        try:
            setattr(getattr(request, of) if of else request, name, checked)
        except ValueError:
            raise ValueError(f"is {_kind(value)}, which does not fit the field's type") from None

    return put


def _extend(name: str, item: Callable[[Any], Any]) -> Setter:
    def put(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
        try:
            getattr(request, name).extend(_list(value, item))
        except (ValueError, OverflowError):
            raise ValueError("holds a number that does not fit the field's type") from None

    return put


def _put_prompt(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
    request.prompt.text = _text(value)


def _put_token_ids(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
    try:
        request.prompt.tokens.ids.extend(_list(value, _whole))
    except (ValueError, OverflowError):
        raise ValueError("holds a number that does not fit 32 bits") from None
    request.prompt.tokens.SetInParent()


def _put_stop(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
    request.stop.extend([value] if isinstance(value, str) else _list(value, _text))


_SETTERS: dict[str, Setter] = {
    "prompt": _put_prompt,
    "token_ids": _put_token_ids,
    "stop": _put_stop,
    "stop_token_ids": _extend("stop_token_ids", _whole),
    **{name: _assign(name, _whole) for name in ("max_tokens", "samples", "priority")},
    **{name: _assign(name, _truth) for name in ("ignore_end", "logprobs", "prompt_logprobs", "return_token_ids")},
    **{name: _assign(name, _text) for name in ("tenant", "cache_salt")},
    **{name: _assign(name, _text, of="engine") for name in ("engine_id", "engine_digest")},
    **{name: _assign(name, _whole, of="sampling") for name in ("top_k", "seed")},
    **{
        name: _assign(name, _number, of="sampling")
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        )
    },
}  # fmt: skip
