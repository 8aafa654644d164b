# SPDX-License-Identifier: Apache-2.0
"""Rows of a bulk file become requests, or errors that name the field."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from ifabric.engine.v1 import generation_pb2
from services.cli.files.rows import BadRow, Row, read_rows
from services.common.errors import AlreadyExistsError, InvalidArgumentError


def read(*lines: str | bytes | dict[str, Any]) -> list[Row | BadRow]:
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    return list(read_rows(io.BytesIO(b"\n".join(raw))))


def test_every_field_of_a_request_can_be_said() -> None:
    [row] = read(
        {
            "id": "a", "prompt": "Hello", "max_tokens": 8, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
            "repetition_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": -0.5, "seed": 7, "stop": "\n",
            "stop_token_ids": [2, 5], "ignore_end": True, "samples": 2, "logprobs": True, "prompt_logprobs": True,
            "return_token_ids": True, "omit_payload": True, "priority": -3, "tenant": "t", "cache_salt": "s",
            "engine_id": "e", "engine_digest": "d",
        }
    )  # fmt: skip
    assert isinstance(row, Row)
    request = row.request
    assert (request.prompt.text, request.max_tokens, request.samples, request.priority) == ("Hello", 8, 2, -3)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 7)
    assert (list(request.stop), list(request.stop_token_ids)) == (["\n"], [2, 5])
    assert (request.engine.engine_id, request.engine.engine_digest) == ("e", "d")
    # What rows do not say is set by the stream (lane), is of no use in a file (trace), or is not served (guide).
    unset = {field.name for field in request.DESCRIPTOR.fields} - {field.name for field, _ in request.ListFields()}
    assert unset == {"lane", "traceparent", "guide"}
    assert {field.name for field, _ in request.sampling.ListFields()} == set(request.sampling.DESCRIPTOR.fields_by_name)


def test_ids_of_tokens_and_rows_without_an_id() -> None:
    first, second = read({"token_ids": [1, 2]}, "", {"token_ids": []})[:2]
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert (first.row_id, second.row_id) == ("line-1", "line-3")
    assert list(first.request.prompt.tokens.ids) == [1, 2]
    assert second.request.prompt.WhichOneof("form") == "tokens", "an empty list is a prompt that the broker refuses"


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"prompt": 7}, ["prompt"]),
        ({"prompt": None}, ["prompt"]),
        ({}, ["prompt"]),
        ({"prompt": "a", "token_ids": [1]}, ["prompt"]),
        ({"token_ids": [1.5]}, ["token_ids"]),
        ({"token_ids": [True]}, ["token_ids"]),
        ({"token_ids": [2**31]}, ["token_ids"]),
        ({"token_ids": "1 2"}, ["token_ids"]),
        ({"prompt": "a", "max_tokens": "8"}, ["max_tokens"]),
        ({"prompt": "a", "max_tokens": 2**31}, ["max_tokens"]),
        ({"prompt": "a", "max_tokens": 8.5}, ["max_tokens"]),
        ({"prompt": "a", "seed": -1}, ["seed"]),
        ({"prompt": "a", "temperature": "hot"}, ["temperature"]),
        ({"prompt": "a", "stop": [1]}, ["stop"]),
        ({"prompt": "a", "ignore_end": 1}, ["ignore_end"]),
        ({"prompt": "a", "max_token": 8}, ["max_token"]),
        ({"prompt": "a", "engine_id": 3}, ["engine_id"]),
        ({"prompt": 7, "max_tokens": "8", "top_k": None}, ["prompt", "max_tokens", "top_k"]),
    ],
)
def test_what_cannot_be_sent_is_named_field_by_field(fields: dict[str, Any], at_fault: list[str]) -> None:
    [row] = read({"id": "x", **fields})
    assert isinstance(row, BadRow)
    assert row.row_id == "x"
    assert isinstance(row.error, InvalidArgumentError)
    assert [violation.field for violation in row.error.violations] == at_fault


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"7", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"id": 7}'])
def test_lines_that_are_no_rows_harm_no_neighbour(raw: bytes) -> None:
    before, bad, after = read({"id": "a", "prompt": "x"}, raw, {"id": "b", "prompt": "y"})
    assert isinstance(before, Row)
    assert isinstance(after, Row)
    assert isinstance(bad, BadRow)
    assert (bad.line, bad.row_id) == (2, "line-2")


def test_the_last_of_a_field_that_stands_twice_counts() -> None:
    (row,) = read('{"id": "a", "prompt": "first", "prompt": "last"}')
    assert isinstance(row, Row)
    assert row.request.prompt.text == "last"


def test_an_id_counts_once() -> None:
    _, again = read({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
    assert isinstance(again, BadRow)
    assert isinstance(again.error, AlreadyExistsError)


def test_sampling_fields_of_rows_are_those_of_the_proto() -> None:
    for field in generation_pb2.SamplingParameters.DESCRIPTOR.fields:
        [row] = read({"prompt": "x", field.name: 1})
        assert isinstance(row, Row), field.name
