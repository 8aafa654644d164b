# SPDX-License-Identifier: Apache-2.0
"""The bundled job from file to results, as `make run` runs it."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from engines.simulated import write_simulated_engine
from services.cli.files.chat import ChatTemplate
from tests.support.processes import ROOT
from tests.support.suite import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.suite import RunningSuite

PROMPTS = ROOT / "examples" / "prompts.jsonl"


def results(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


@pytest.mark.timeout(240)
def test_the_bundled_job_with_a_suite_of_its_own(engine: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    words = ("bulk", "run", str(PROMPTS), "-o", str(output), "--up", "--engine", str(engine), "--logs", str(tmp_path))
    done = run(*words, "--json", within_s=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = results(output)
    asked = {json.loads(line)["id"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()}
    assert set(rows) == asked
    assert (report["requests"], report["failed"]) == (len(asked), 0)
    assert report["generated_tokens"] == sum(row["usage"]["generated_tokens"] for row in rows.values()) > 0
    assert report["prompt_tokens_logical"] == sum(row["usage"]["prompt_tokens"] for row in rows.values())
    assert report["prompt_tokens_computed"] == sum(row["usage"]["computed_tokens"] for row in rows.values())
    assert report["prompt_tokens_bound"] <= report["prompt_tokens_computed"]
    # A head that is computed a second time would cost at least four blocks.
    assert report["prompt_tokens_computed"] < report["prompt_tokens_bound"] + 4 * 64
    assert report["prompt_tokens_computed"] < report["prompt_tokens_logical"] / 5
    assert all(row["finish_reason"] in {"stop", "length"} and "\n" not in row["text"] for row in rows.values())
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert (events[-1]["rows"], events[-1]["total"], events[-1]["failed"]) == (len(asked), len(asked), 0)
    assert events[-1]["prefix_saving"] > 0.8


def test_wrong_rows_are_errors_in_their_own_file_and_the_others_finish(suite: RunningSuite, tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{number}", "prompt": f"Row {number}:", "max_tokens": 2}) for number in range(20)]
    lines[3] = "no json"
    lines[5] = json.dumps({"id": "typo", "prompt": "x", "max_token": 2})
    lines[8] = json.dumps({"id": "empty", "prompt": "", "max_tokens": 2})
    lines[13] = json.dumps({"id": "long", "token_ids": [1] * 2000, "max_tokens": 2})
    rows, output = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    rows.write_text("\n".join(lines))
    done = run("bulk", "run", str(rows), "-o", str(output), "--broker", suite.broker, "--json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ifab: 4 of 20 rows failed; see {tmp_path / 'results.errors.jsonl'}"
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"]) == (20, 4)
    assert len(results(output)) == 16
    errors = {name: row["error"] for name, row in results(tmp_path / "results.errors.jsonl").items()}
    assert set(errors) == {"line-4", "typo", "empty", "long"}
    assert {error["code"] for error in errors.values()} == {"INVALID_ARGUMENT"}
    assert "2000" in errors["long"]["fields"][0]["description"]
    assert "1024" in errors["long"]["fields"][0]["description"]


def test_generate_streams_the_text_and_says_what_it_cost(suite: RunningSuite) -> None:
    words = ("generate", "The capital of France is", "-n", "8", "--broker", suite.broker)
    plain, whole = run(*words), run(*words, "--json")
    assert plain.returncode == whole.returncode == 0
    document = json.loads(whole.stdout)
    assert plain.stdout == document["text"] + "\n"
    assert "Paris" in plain.stdout
    assert document["usage"]["prompt_tokens"] == 5
    assert "8 tokens generated" in plain.stderr or document["finish_reason"] == "stop"


def test_nodes_shows_the_worker(suite: RunningSuite) -> None:
    done = run("nodes", "--provisioner", suite.provisioner)
    assert done.returncode == 0
    assert "accepted" in done.stdout
    assert suite.said["workers"][0]["engine_id"] in done.stdout


def test_engine_describe_and_verify(engine: Path) -> None:
    described = run("engine", "describe", str(engine), "--json")
    document = json.loads(described.stdout)
    assert document["findings"] == []
    assert document["contract"]["limits"]["step_token_budget"] > 0
    assert run("engine", "verify", str(engine)).returncode == 0


def test_a_mining_engine_is_a_contract_like_any_other(tmp_path: Path) -> None:
    directory = tmp_path / "mining"
    written = write_simulated_engine(directory, max_output_tokens=0, max_input_tokens=128, payload_dtype="float16")
    rows, output = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"r{number}", "prompt": f"Row {number}"}) for number in range(40)))
    words = ("bulk", "run", str(rows), "-o", str(output), "--up", "--engine", str(directory), "--logs", str(tmp_path))
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"], report["generated_tokens"]) == (40, 0, 0)
    for row in results(output).values():
        payload = row["payload"]
        values = base64.b64decode(payload["base64"])
        assert len(values) == 2 * written.hidden_size
        assert zlib.crc32(values) == payload["crc32"]
        assert (payload["dtype"], payload["shape"], payload["layers"]) == ("float16", [written.hidden_size], [-1])
        assert payload["position"] == row["usage"]["prompt_tokens"] - 1
        assert "text" not in row


def test_chats_are_answered_by_the_template_that_comes_with_the_model(
    suite: RunningSuite, engine: Path, tmp_path: Path
) -> None:
    model = suite.said["workers"][0]["engine_id"]
    chats = {
        "capital": [{"role": "user", "content": "What is the capital of France? Answer with one word."}],
        "brief": [
            {"role": "system", "content": "You answer with one word."},
            {"role": "user", "content": "What is the capital of Italy?"},
        ],
    }
    batch, output = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0},
        }
        for name, messages in chats.items()
    ]
    batch.write_text("\n".join(map(json.dumps, lines)))
    to = ("--broker", suite.broker, "--provisioner", suite.provisioner)
    done = run("bulk", "run", str(batch), "-o", str(output), *to, "--json")
    assert done.returncode == 0, done.stderr
    answers = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, output.read_text().splitlines())}
    texts = {name: body["choices"][0]["message"]["content"] for name, body in answers.items()}
    assert "Paris" in texts["capital"]
    assert "Rome" in texts["brief"]
    assert all("<|im_" not in text for text in texts.values()), "the end of a turn ends the answer"
    assert {body["choices"][0]["finish_reason"] for body in answers.values()} == {"stop"}
    template = ChatTemplate(json.loads((engine / "tokenizer_config.json").read_text())["chat_template"], {})
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    asked = tokenizer.encode(template.render(chats["brief"]), add_special_tokens=False).ids
    assert answers["brief"]["usage"]["prompt_tokens"] == len(asked)
