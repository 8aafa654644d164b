# SPDX-License-Identifier: Apache-2.0
"""OpenAI batch files, CSV and Parquet become requests, and results take the shape that such files have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import contract_pb2, generation_pb2
from services.cli.files.chat import PROMPT_CHARACTERS_MAX, ChatEngine, ChatTemplate
from services.cli.files.formats import Format, layout, rows_of
from services.cli.files.opening import look
from services.cli.files.rows import BadRow, Row
from services.cli.files.shapes import BatchShape, payload_values
from services.cli.running import CommandError
from services.common.errors import CancelledError_, InvalidArgumentError, Violation

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'system', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{{ bos_token }} {{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["<s>", "user", "system", "assistant", "hello", "be", "kind"]
TOKENIZER = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<s>"))
TOKENIZER.pre_tokenizer = WhitespaceSplit()
CHAT = ChatEngine("engine", "digest", 99, ChatTemplate(TEMPLATE, {"bos_token": "<s>"}), TOKENIZER)


def call(url: str, custom_id: str = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def read(path: Path, *lines: dict[str, Any] | str, chat: ChatEngine | None = None) -> list[Row | BadRow]:
    file = path / "batch.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    source = look(str(file))
    form = layout(source)
    assert form.format is Format.OPENAI
    with rows_of(source, form, chat) as rows:
        return list(rows)


def one(path: Path, line: dict[str, Any], chat: ChatEngine | None = CHAT) -> broker_service_pb2.GenerationRequest:
    [row] = read(path, line, chat=chat)
    assert isinstance(row, Row), row
    return row.request


def faults(row: Row | BadRow) -> dict[str, str]:
    assert isinstance(row, BadRow)
    return {violation.field: violation.description for violation in row.error.violations}


def test_a_completion_takes_what_the_api_says_of_absent_fields(tmp_path: Path) -> None:
    request = one(tmp_path, call("/v1/completions", prompt="Hello", user="u", stream=False, best_of=None))
    assert (request.request_id, request.prompt.text, request.max_tokens) == ("a", "Hello", 16)
    assert request.sampling.temperature == 1.0


def test_a_completion_with_everything(tmp_path: Path) -> None:
    line = call(
        "/v1/completions", prompt=[1, 2, 3], max_tokens=5, temperature=0, top_p=0.5, n=2, seed=7, stop=["x"],
        logprobs=0, presence_penalty=0.5, frequency_penalty=0.25,
        response_format={"type": "json_schema", "json_schema": {"schema": {}}},
    )  # fmt: skip
    request = one(tmp_path, line)
    assert list(request.prompt.tokens.ids) == [1, 2, 3]
    assert (request.max_tokens, request.samples, list(request.stop), request.logprobs) == (5, 2, ["x"], True)
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 7)
    assert (request.guide.kind, request.guide.text) == (contract_pb2.GUIDE_KIND_JSON_SCHEMA, "{}")


def test_a_chat_goes_through_the_template_and_becomes_ids(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": parts}]
    request = one(tmp_path, call("/v1/chat/completions", messages=messages))
    ids = np.frombuffer(request.prompt.packed_token_ids, dtype="<i4")
    assert [WORDS[token] for token in ids] == ["<s>", "system", "be", "kind", "<s>", "user", "hello", "assistant"]
    assert request.max_tokens == 99, "the engine's longest answer"


def test_an_embedding_asks_for_the_prompt_only(tmp_path: Path) -> None:
    request = one(tmp_path, call("/v1/embeddings", input="text", encoding_format="float"))
    assert request.prompt.text == "text"
    assert not request.HasField("max_tokens")
    assert not request.HasField("sampling")


@pytest.mark.parametrize(
    ("url", "body", "at_fault"),
    [
        ("/v1/completions", {}, "body.prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "body.prompt"),
        ("/v1/completions", {"prompt": "a", "logprobs": 5}, "body.logprobs"),
        ("/v1/completions", {"prompt": "a", "stream": True}, "body.stream"),
        ("/v1/completions", {"prompt": "a", "made_up": 1}, "body.made_up"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "8"}, "body.max_tokens"),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "body.response_format"),
        ("/v1/chat/completions", {"messages": []}, "body.messages"),
        ("/v1/chat/completions", {"messages": [{"role": "poet", "content": "x"}]}, "body.messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "body.messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "body.messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "body.tools"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, "body.dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}, "body.encoding_format"),
    ],
)
def test_what_is_not_served_is_named(url: str, body: dict[str, Any], at_fault: str, tmp_path: Path) -> None:
    [row] = read(tmp_path, call(url, **body), chat=CHAT)
    assert list(faults(row)) == [at_fault]


def test_a_file_has_one_endpoint_and_one_model_and_bad_rows_harm_no_neighbour(tmp_path: Path) -> None:
    other = call("/v1/embeddings", "b", input="x")
    other["body"]["model"] = "n"
    good, bad, broken, again, late = read(
        tmp_path,
        call("/v1/completions", prompt="x"),
        other,
        "{",
        call("/v1/completions", prompt="x"),
        call("/v1/completions", "late", prompt="x"),
    )
    assert isinstance(good, Row)
    assert isinstance(late, Row)
    assert {"url", "body.model"} <= set(faults(bad))
    assert (bad.row_id, broken.row_id, again.row_id) == ("b", "line-3", "line-4")


def test_an_endpoint_that_is_not_served_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="asks for '/v1/images'"):
        read(tmp_path, call("/v1/images", prompt="x"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{% for a in range(999999999) %}{% endfor %}",
        "{{ 'a' * 99999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content.upper() }}",
        "{{ 1 / 0 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% for a in range(99999) %}{% for b in range(99) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_changes_nothing_and_makes_nothing_large(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(ValueError, match=r"template|characters"):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_may_write_long_prompts_up_to_its_limit() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    text = "x" * PROMPT_CHARACTERS_MAX
    assert template.render([{"role": "user", "content": text}]) == text
    with pytest.raises(ValueError, match="is no template"):
        ChatTemplate("{% if %}", {})


def test_csv_columns_are_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b"\xef\xbb\xbfid,prompt,max_tokens,stop,token_ids\r\n"
        b'a,"two\nlines, one cell",4,END,\r\n'
        b'b,,,"[""x"", ""y""]","[1, 2]"\r\n'
        b"c,short\r\n"
        b"d,\xff,1,,\r\n"
        b"a,again,1,,\r\n"
        b"f,7,many,,\r\n"
    )
    source = look(str(path))
    with rows_of(source, layout(source)) as found:
        first, second, short, bytes_, again, many = found
    assert isinstance(first, Row)
    assert (first.request.prompt.text, first.request.max_tokens) == ("two\nlines, one cell", 4)
    assert list(first.request.stop) == ["END"]
    assert isinstance(second, Row)
    assert (list(second.request.prompt.tokens.ids), list(second.request.stop)) == ([1, 2], ["x", "y"])
    assert faults(short) == {"row": "has 2 cells under 5 names"}
    assert faults(bytes_) == {"prompt": "is not UTF-8"}
    assert (again.row_id, isinstance(again, BadRow)) == ("line-5", True)
    assert list(faults(many)) == ["max_tokens"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"id,text\n", "no column called prompt"),
        (b"prompt,prompt\n", "two columns called 'prompt'"),
        (b'prompt\n"open', "damaged after record 0"),
        (b"prompt\n" + b"x" * (9 << 20), "a line of more than 8,388,608 characters"),
    ],
)
def test_a_csv_that_is_none_is_one_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    source = look(str(path))
    with pytest.raises(CommandError, match=says), rows_of(source, layout(source)) as rows:
        list(rows)


def test_parquet_columns_are_fields(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows"
    columns = {
        "id": ["a", "b", None],
        "token_ids": [[1, 2], None, [3]],
        "prompt": [None, "text", None],
        "top_k": [1, 2, None],
    }
    pq.write_table(pa.table(columns), path)
    source = look(str(path))
    form = layout(source)
    assert form.format is Format.PARQUET
    with rows_of(source, form) as rows:
        found = list(rows)
    assert [row.row_id for row in found] == ["a", "b", "line-3"]
    assert all(isinstance(row, Row) for row in found)
    path.write_bytes(path.read_bytes()[:-20])
    source = look(str(path))
    with pytest.raises(CommandError, match="the Parquet data is damaged"), rows_of(source, form) as rows:
        list(rows)


def test_results_of_a_batch_have_its_shape() -> None:
    result = broker_service_pb2.GenerationResult(engine_digest="d")
    result.samples.add(text="hi", finish_reason=generation_pb2.FINISH_REASON_LENGTH)
    result.usage.prompt_tokens, result.usage.generated_tokens = 3, 2
    line = BatchShape("/v1/chat/completions", "m", 1700000000).finished("a", result)
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 200)
    body = line["response"]["body"]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert body["choices"][0]["finish_reason"] == "length"
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1700000000, "m")
    assert body["usage"]["total_tokens"] == 5
    text = BatchShape("/v1/completions", "m", 1).finished("a", result)["response"]["body"]
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "hi")


def test_errors_of_a_batch_have_its_shape() -> None:
    shape = BatchShape("/v1/completions", "m", 1)
    refused = shape.failed("a", None, InvalidArgumentError.of([Violation("body.prompt", "is null")]))
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "body.prompt"
    assert refused["error"] is None
    never = shape.failed("a", None, CancelledError_("the job was ended before this row"))
    assert (never["response"], never["error"]["code"]) == (None, "batch_cancelled")


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        (contract_pb2.PAYLOAD_DTYPE_FLOAT32, np.array([1.5, -2], dtype="<f4").tobytes()),
        (contract_pb2.PAYLOAD_DTYPE_FLOAT16, np.array([1.5, -2], dtype="<f2").tobytes()),
        (contract_pb2.PAYLOAD_DTYPE_BFLOAT16, b"\xc0\x3f\x00\xc0"),
    ],
)
def test_embeddings_are_the_payload_as_numbers(dtype: contract_pb2.PayloadDtype.ValueType, data: bytes) -> None:
    result = broker_service_pb2.GenerationResult(payload=generation_pb2.Payload(data=data, dtype=dtype))
    assert payload_values(result.payload).tolist() == [1.5, -2.0]
    body = BatchShape("/v1/embeddings", "m", 1).finished("a", result)["response"]["body"]
    assert body["data"] == [{"object": "embedding", "index": 0, "embedding": [1.5, -2.0]}]
    failed = broker_service_pb2.GenerationResult(payload=generation_pb2.Payload(failure="no room"))
    assert BatchShape("/v1/embeddings", "m", 1).finished("a", failed)["response"]["status_code"] == 500
