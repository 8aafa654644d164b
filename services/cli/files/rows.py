# SPDX-License-Identifier: Apache-2.0
"""Rows of a bulk job: JSON lines in, requests out.

A row is one JSON object: `prompt` (text) or `token_ids`, and, where wanted, `id`, `max_tokens`, the sampling parameters
of `ifabric.engine.v1.SamplingParameters`, `stop`, `stop_token_ids`, `ignore_end`, `samples`, `logprobs`,
`prompt_logprobs`, `return_token_ids`, `omit_payload`, `priority`, `tenant`, `cache_salt`, `engine_id`, `engine_digest`.
Values are judged by the broker; what cannot even be put into a request is judged here, and every field at fault is
named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ifabric.broker.v1 import broker_service_pb2
from services.cli.files.lines import LINE_BYTES_MAX, Line, Readable, read_lines
from services.cli.files.seen import SeenIds
from services.cli.files.values import invalid, items, kind, number, row_id, text, truth, whole
from services.common.errors import AlreadyExistsError, FabricError, InvalidArgumentError, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Setter = Callable[[broker_service_pb2.GenerationRequest, Any], None]


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be sent."""

    line: int
    """Where it stands in its file, from 1."""
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


def read_rows(file: Readable) -> Iterator[Row | BadRow]:
    """Yields the rows of JSON lines in order. A row without `id`, or with one that is none, is called `line-N`.

    Raises:
        CommandError: The whole file is none of rows, or cannot be read to its end.
    """
    with SeenIds() as seen:
        for line in read_lines(file):
            yield only_once(_parse(line), seen)


def only_once(row: Row | BadRow, seen: SeenIds) -> Row | BadRow:
    """The row itself or, where its id came before, its error under the name of its line."""
    if seen.add(row.row_id):
        return row
    error = AlreadyExistsError(f"the id {row.row_id!r} stands on an earlier line too")
    renamed = f"line-{row.line}"
    while not seen.add(renamed):
        renamed += "+"
    return BadRow(row.line, renamed, error)


def parse_object(line: Line) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        InvalidArgumentError: The line is none, or too long to be read.
    """
    if line.data is None:
        raise invalid(
            "row", f"line {line.number} is {line.size_bytes:,} bytes long, at most {LINE_BYTES_MAX:,} are read"
        )
    try:
        fields = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        raise invalid("row", f"line {line.number} is not {_what_is_wrong(line.data, error)}") from None
    if not isinstance(fields, dict):
        raise invalid("row", f"line {line.number} is {kind(fields)}, an object is expected")
    return fields


def request_of(line: int, fields: dict[str, Any]) -> Row | BadRow:
    """The row that an object's fields, named as in the table of docs/bulk.md, describe."""
    name, violations = f"line-{line}", list[Violation]()
    try:
        name = row_id(fields.get("id", name))
    except (TypeError, ValueError) as error:
        violations.append(Violation("id", str(error)))
    request = broker_service_pb2.GenerationRequest(request_id=name)
    for field, value in fields.items():
        if field == "id":
            continue
        setter = SETTERS.get(field)
        if setter is None:
            violations.append(Violation(field, "is not a field of a row"))
            continue
        try:
            setter(request, value)
        except (TypeError, ValueError, OverflowError) as error:
            violations.append(Violation(field, str(error)))
    if "prompt" in fields and "token_ids" in fields:
        violations.append(Violation("prompt", "stands beside token_ids; a row has one of the two"))
    if "prompt" not in fields and "token_ids" not in fields:
        violations.append(Violation("prompt", "is absent; a row has prompt or token_ids"))
    return BadRow(line, name, InvalidArgumentError.of(violations)) if violations else Row(line, request)


def _parse(line: Line) -> Row | BadRow:
    try:
        return request_of(line.number, parse_object(line))
    except InvalidArgumentError as error:
        return BadRow(line.number, f"line-{line.number}", error)


def _what_is_wrong(data: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return f"UTF-8: byte {wrong.start} of the line is 0x{data[wrong.start]:02x}"
    return f"JSON: {error.msg}"


def _assign(name: str, check: Callable[[Any], Any], *, of: str = "") -> Setter:
    def put(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
        checked = check(value)
        try:
            setattr(getattr(request, of) if of else request, name, checked)
        except ValueError:
            raise ValueError(f"is {kind(value)}, which does not fit the field's type") from None

    return put


def _extend(name: str, item: Callable[[Any], Any]) -> Setter:
    def put(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
        try:
            getattr(request, name).extend(items(value, item))
        except (ValueError, OverflowError):
            raise ValueError("holds a number that does not fit the field's type") from None

    return put


def _put_prompt(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
    request.prompt.text = text(value)


def _put_token_ids(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
    try:
        request.prompt.tokens.ids.extend(items(value, whole))
    except (ValueError, OverflowError):
        raise ValueError("holds a number that does not fit 32 bits") from None
    request.prompt.tokens.SetInParent()


def _put_stop(request: broker_service_pb2.GenerationRequest, value: Any) -> None:
    request.stop.extend([value] if isinstance(value, str) else items(value, text))


SETTERS: dict[str, Setter] = {
    "prompt": _put_prompt,
    "token_ids": _put_token_ids,
    "stop": _put_stop,
    "stop_token_ids": _extend("stop_token_ids", whole),
    **{name: _assign(name, whole) for name in ("max_tokens", "samples", "priority")},
    **{
        name: _assign(name, truth)
        for name in ("ignore_end", "logprobs", "prompt_logprobs", "return_token_ids", "omit_payload")
    },
    **{name: _assign(name, text) for name in ("tenant", "cache_salt")},
    **{name: _assign(name, text, of="engine") for name in ("engine_id", "engine_digest")},
    **{name: _assign(name, whole, of="sampling") for name in ("top_k", "seed")},
    **{
        name: _assign(name, number, of="sampling")
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        )
    },
}  # fmt: skip
