# SPDX-License-Identifier: Apache-2.0
"""Batch request files of the OpenAI API: completions, chat and embeddings.

A line is `{"custom_id": …, "method": "POST", "url": "/v1/completions", "body": {…}}`; a file has one `url` and one
`model`. A field of the body that is not served is an error of its row, by name, unless its value asks for nothing. What
the API says of absent fields holds here: a temperature of 1, 16 tokens for completions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import contract_pb2
from services.cli.files.lines import Line, Readable, read_lines
from services.cli.files.rows import SETTERS, BadRow, Row, only_once, parse_object
from services.cli.files.seen import SeenIds
from services.cli.files.values import items, kind, row_id, text, truth, whole
from services.common.errors import InvalidArgumentError, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from services.cli.files.chat import ChatEngine

    Body = Mapping[str, Any]
    Request = broker_service_pb2.GenerationRequest

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
ENDPOINTS = (COMPLETIONS, CHAT, EMBEDDINGS)
_COMPLETION_TOKENS = 16
_ROW_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
         "repetition_penalty", "seed", "stop", "stop_token_ids", "return_token_ids")  # fmt: skip
_FIELDS = {name: name for name in _SAME} | {
    "n": "samples",
    "ignore_eos": "ignore_end",
    "max_completion_tokens": "max_tokens",
}
"""Fields of a body that a row has, too, and what it calls them."""
_IGNORED = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields of a body that ask for nothing of the engine."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "best_of": (1,), "tools": ([],),
    "functions": ([],), "tool_choice": ("none", "auto"), "stream_options": ({},), "top_logprobs": (0,),
    "modalities": (["text"],), "parallel_tool_calls": (True, False),
}  # fmt: skip
"""Fields that are not served, and the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class BatchForm:
    """What all lines of a batch file have in common."""

    endpoint: str
    """One of ENDPOINTS."""
    model: str


def form_of(fields: Mapping[str, Any]) -> BatchForm | None:
    """The form of the file whose first object this is; None where it is no batch request."""
    body = fields.get("body")
    if "custom_id" not in fields or not isinstance(body, dict):
        return None
    model = body.get("model")
    return BatchForm(str(fields.get("url")), model if isinstance(model, str) else "")


def read_batch(file: Readable, form: BatchForm, chat: ChatEngine | None) -> Iterator[Row | BadRow]:
    """Yields the rows of a batch file in order.

    Args:
        file: Its plain bytes.
        form: Its form.
        chat: Turns messages into a prompt; needed for CHAT.
    """
    with SeenIds() as seen:
        for line in read_lines(file):
            yield only_once(_parse(line, form, chat), seen)


def _parse(line: Line, form: BatchForm, chat: ChatEngine | None) -> Row | BadRow:
    name, found = f"line-{line.number}", _Found()
    try:
        fields = parse_object(line)
    except InvalidArgumentError as error:
        return BadRow(line.number, name, error)
    with found.at("custom_id"):
        name = row_id(fields.get("custom_id"))
    request = broker_service_pb2.GenerationRequest(request_id=name)
    for field in fields.keys() - _ROW_FIELDS:
        found.add(field, "is not a field of a batch request")
    if fields.get("method") != "POST":
        found.add("method", f"is {_shown(fields.get('method'))}, expected POST")
    if fields.get("url") != form.endpoint:
        found.add("url", f"is {_shown(fields.get('url'))}, and the file's first row asks for {form.endpoint}")
    body = fields.get("body")
    if not isinstance(body, dict):
        found.add("body", f"is {kind(body)}, an object is expected")
    else:
        if body.get("model") != form.model:
            found.add("body.model", f"is {_shown(body.get('model'))}, and the file's first row names {form.model!r}")
        _PUT[form.endpoint](request, body, found, chat)
    return (
        BadRow(line.number, name, InvalidArgumentError.of(found.violations))
        if found.violations
        else Row(line.number, request)
    )


class _Found:
    """Collects what is wrong with a row."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._field = ""

    def add(self, field: str, description: str) -> None:
        self.violations.append(Violation(field, description))

    def at(self, field: str) -> _Found:
        """`with found.at("body.seed"): …` turns a value's error into a violation of that field."""
        self._field = field
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, TypeError | ValueError | OverflowError):
            return False
        self.add(self._field, str(error))
        return True


def _put_common(request: Request, body: Body, found: _Found, own: frozenset[str]) -> None:
    """Every field of a generation's body but its endpoint's own."""
    request.sampling.temperature = 1.0
    for name, value in body.items():
        if value is None or name in own or name in _IGNORED:
            continue
        with found.at(f"body.{name}"):
            if name in _FIELDS:
                SETTERS[_FIELDS[name]](request, value)
            elif name == "response_format":
                _put_format(request, value)
            elif value not in _NEUTRAL.get(name, ()):
                raise ValueError(f"is {_shown(value)}, which is not served")


def _put_completion(request: Request, body: Body, found: _Found, chat: ChatEngine | None) -> None:
    request.max_tokens = _COMPLETION_TOKENS
    _put_common(request, body, found, frozenset({"prompt", "logprobs"}))
    with found.at("body.prompt"):
        _put_text_or_ids(request, body.get("prompt"))
    if body.get("logprobs") is not None:
        with found.at("body.logprobs"):
            if whole(body["logprobs"]) != 0:
                raise ValueError(f"is {body['logprobs']}; only 0, those of the chosen tokens, is served")
            request.logprobs = request.return_token_ids = True


def _put_chat(request: Request, body: Body, found: _Found, chat: ChatEngine | None) -> None:
    if chat is None:
        raise ValueError("a chat file is read with an engine's template")
    request.max_tokens = chat.max_output_tokens
    _put_common(request, body, found, frozenset({"messages", "logprobs"}))
    with found.at("body.messages"):
        request.prompt.packed_token_ids = chat.prompt(body.get("messages"))
    if body.get("logprobs") is not None:
        with found.at("body.logprobs"):
            request.logprobs = request.return_token_ids = truth(body["logprobs"])


def _put_embedding(request: Request, body: Body, found: _Found, chat: ChatEngine | None) -> None:
    for name, value in body.items():
        if value is not None and name not in {"input", *_IGNORED} and (name, value) != ("encoding_format", "float"):
            found.add(f"body.{name}", f"is {_shown(value)}, which is not served")
    with found.at("body.input"):
        _put_text_or_ids(request, body.get("input"))


_PUT: dict[str, Callable[[Any, Any, _Found, Any], None]] = {
    COMPLETIONS: _put_completion, CHAT: _put_chat, EMBEDDINGS: _put_embedding,
}  # fmt: skip


def _put_text_or_ids(request: Request, value: Any) -> None:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str):
        request.prompt.text = value
    elif isinstance(value, list) and all(isinstance(each, int) for each in value):
        SETTERS["token_ids"](request, value)
    elif isinstance(value, list):
        raise TypeError(f"is a list of {len(value)} prompts; a row has one")
    else:
        raise TypeError(f"is {kind(value)}, text or token ids are expected")


def _put_format(request: Request, value: Any) -> None:
    form = value.get("type") if isinstance(value, dict) else None
    if form == "text":
        return
    if form != "json_schema":
        raise ValueError(f"is of type {_shown(form)}; text and json_schema are served")
    schema = value.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise TypeError("has no json_schema.schema")
    request.guide.kind = contract_pb2.GUIDE_KIND_JSON_SCHEMA
    request.guide.text = orjson.dumps(schema["schema"]).decode()


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat, their content as text.

    Raises:
        TypeError, ValueError: They are none, or hold what is not text.
    """
    messages = []
    for number, message in enumerate(items(value, lambda each: each)):
        if not isinstance(message, dict):
            raise TypeError(f"holds {kind(message)} at {number}, an object is expected")
        for name in message.keys() - {"role", "content", "name"}:
            if message[name]:
                raise ValueError(f"holds {name} at {number}, which is not served")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part(each, number) for each in content)
        messages.append({**message, "role": text(message.get("role")), "content": text(content)})
    if not messages:
        raise ValueError("is empty, at least one message is expected")
    return messages


def _part(part: Any, message: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ValueError(f"holds content at {message} that is not text; only text is served")
    return text(part.get("text"))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) and len(value) <= 64 else kind(value)
