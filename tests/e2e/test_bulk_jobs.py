# SPDX-License-Identifier: Apache-2.0
"""Jobs that the broker keeps, through `ifab bulk` and `ifab mine`: whatever dies, the same command goes on."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from engines.simulated import Simulation, write_simulated_engine
from ifabric.broker.v1 import job_service_pb2
from services.cli.jobs.output import lock
from tests.jobs.client import JobClient
from tests.support.spoken import until
from tests.support.suite import end, run, start, up
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engines.simulated import SimulatedEngine
    from tests.support.suite import RunningSuite

pytestmark = pytest.mark.timeout(300)

ROWS = 2400
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SimulatedEngine]:
    directory = tmp_path_factory.mktemp("states")
    written = write_simulated_engine(
        directory, engine_id="states", max_output_tokens=0, max_input_tokens=128, payload_dtype="float16",
        hidden_size=512, time_mode="real", step_us=2000, slots=8,
    )  # fmt: skip
    return directory, written


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that takes its time, and has a chat template."""
    directory = tmp_path_factory.mktemp("texts")
    write_simulated_engine(directory, engine_id="texts", time_mode="real", step_us=4000, slots=16)
    config = json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}).encode()
    (directory / "tokenizer_config.json").write_bytes(config)
    contract = json.loads((directory / "contract.json").read_bytes())
    digest = hashlib.sha256(config).hexdigest()
    contract["files"].append({"path": "tokenizer_config.json", "size_bytes": len(config), "sha256": digest})
    (directory / "contract.json").write_text(json.dumps(contract))
    return directory


@pytest.fixture(scope="module")
def keeper(
    texts: Path, states: tuple[Path, SimulatedEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSuite]:
    with up(tmp_path_factory.mktemp("logs"), [texts, states[0]]) as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Rows that end in the order in which they stand."""
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"r{n}", "prompt": f"row {n:05}", "max_tokens": 3}) for n in range(ROWS)]
    lines[7] = "no row"
    lines[2000] = json.dumps({"id": "typo", "prompt": "x", "max_token": 1})
    path.write_text("\n".join(lines) + "\n")
    return path


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def lines_are(path: Path, count: int) -> bool:
    return lines_of(path) >= count


def shards_are(folder: Path, count: int) -> bool:
    return len(list(folder.glob("shard-*.safetensors"))) >= count


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Has a folder as a command has it that writes there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
        yield
    finally:
        os.close(handle)


def kill_when(words: tuple[str, ...], condition: Any, paused: JobClient | None = None) -> None:
    """Starts a command and kills it, without a chance to clean up, once the condition holds.

    A job that is `paused` goes on only once the command has seen that it is: it cannot end while the command starts.
    """
    process = start(*words)
    try:
        if paused is not None:
            until(process, '"stage":"paused"')
            paused.resume()
        block_until(lambda: condition() or process.poll() is not None, what="the moment to kill")
        assert process.poll() is None, process.communicate()
        os.kill(process.pid, signal.SIGKILL)
    finally:
        end(process)


def test_a_client_that_is_killed_again_and_again_writes_what_an_undisturbed_one_writes(
    keeper: RunningSuite, prompts: Path, tmp_path: Path
) -> None:
    to = ("--broker", keeper.broker, "--tenant", "killed")
    words = ("bulk", "run", str(prompts), *to, "--engine-id", "texts", "--json")
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    kill_when((*words, "-o", str(out)), out.exists)
    with JobClient(keeper.broker, tenant="killed") as job:
        [made] = job.call("ListJobs", job_service_pb2.ListJobsRequest(tenant="killed")).jobs
        job.name["job_id"] = made.spec.job_id
        before = None
        for rows in (1, ROWS // 4, ROWS // 2):
            kill_when((*words, "-o", str(out)), functools.partial(lines_are, out, rows), before)
            job.pause()
            before = job
            with out.open("ab") as cut:
                cut.write(b'{"id": "half a li')  # what a kill in the middle of a write leaves
        job.resume()
    done = run(*words, "-o", str(out))
    assert done.returncode == 1
    assert f"2 of {ROWS:,} rows failed; see {tmp_path / 'out.errors.jsonl'}" in done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"]) == (ROWS, 2)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [
        f"r{n}" for n in range(ROWS) if n not in {7, 2000}
    ]
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [error["id"] for error in errors] == ["line-8", "typo"]

    again = run(*words, "-o", str(whole), "--job", report["job_id"])
    assert again.returncode == 1
    assert f"2 of {ROWS:,} rows failed" in again.stderr, "said again, for what is there is read again"
    assert whole.read_bytes() == out.read_bytes(), "the same rows, not a byte else"
    assert (tmp_path / "whole.errors.jsonl").read_bytes() == (tmp_path / "out.errors.jsonl").read_bytes()
    assert json.loads(again.stdout)["prompt_tokens_computed"] == report["prompt_tokens_computed"], "nothing ran again"

    whole.write_text('{"id": "of another job"}\n')
    wrong = run(*words, "-o", str(whole))
    assert wrong.returncode == 1
    assert "not the beginning of what the job" in wrong.stderr
    assert whole.read_text() == '{"id": "of another job"}\n'


def test_verbs_change_and_show_a_job(keeper: RunningSuite, prompts: Path, tmp_path: Path) -> None:
    to = ("--broker", keeper.broker, "--tenant", "verbs", "--json")

    def said(verb: str, *words: str, status: int = 0) -> dict[str, Any]:
        done = run("bulk", verb, *words, *to)
        assert done.returncode == status, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    # No engine of that name serves, so the job is there as long as it takes to change it.
    submit = ("submit", str(prompts), "--engine-id", "none", "--priority", "3", "--job", "verbs")
    job = said(*submit)
    assert (job["job_id"], job["priority"], job["rows"]) == ("verbs", 3, ROWS)
    assert said("pause", "verbs")["state"] == "paused"
    assert said(*submit)["state"] == "paused", "the same command finds the job as it is"
    assert said("priority", "verbs", "9")["priority"] == 9
    assert (said("status", "verbs")["state"], said("list")["job_id"]) == ("paused", "verbs")
    assert said("resume", "verbs")["state"] in {"running", "stalled"}
    assert said("cancel", "verbs")["state"] == "cancelled"
    assert said("watch", "verbs")["state"] == "cancelled"
    out, errors = tmp_path / "results.jsonl", tmp_path / "wrong.jsonl"
    collect = ("results", "verbs", "-o", str(out), "--errors", str(errors), "--follow")
    assert said(*collect, status=1)["failed"] == ROWS
    assert (lines_of(out), lines_of(errors)) == (0, ROWS)
    assert json.loads(errors.read_text().splitlines()[0])["error"]["code"] == "CANCELLED"
    assert said("delete", "verbs") == {"deleted": "verbs"}
    gone = run("bulk", "status", "verbs", *to)
    assert gone.returncode == 1
    assert json.loads(gone.stdout)["error"]["code"] == "NOT_FOUND"


def test_a_job_that_cannot_go_on_says_why_at_once(keeper: RunningSuite, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "max_tokens": 1}\n')
    words = (
        "bulk",
        "run",
        str(rows),
        "-o",
        str(tmp_path / "o.jsonl"),
        "--broker",
        keeper.broker,
        "--engine-id",
        "none",
    )
    process = start(*words)
    try:
        assert "none" in until(process, "stalled: ")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert "the same command goes on where it was" in errors
        assert process.returncode == 128 + signal.SIGINT
    finally:
        end(process)


def test_an_empty_file_is_a_job_without_rows(keeper: RunningSuite, tmp_path: Path) -> None:
    empty, out = tmp_path / "empty.jsonl", tmp_path / "out.jsonl"
    empty.touch()
    done = run("bulk", "run", str(empty), "-o", str(out), "--broker", keeper.broker, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == 0
    assert out.read_bytes() == b""


def test_a_chat_file_is_answered_in_its_own_shape(keeper: RunningSuite, tmp_path: Path) -> None:
    def chat(name: str, engine: str, **body: Any) -> str:
        body = {"model": engine, "messages": [{"role": "user", "content": name}], **body}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})

    batch, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    to = ("--broker", keeper.broker, "--provisioner", keeper.provisioner, "--json")
    batch.write_text("\n".join([chat("a", "texts", max_tokens=2), chat("b", "texts", tools=[{}])]))
    done = run("bulk", "run", str(batch), "-o", str(out), *to)
    assert done.returncode == 1
    assert "1 of 2 rows failed" in done.stderr
    [line] = [json.loads(line) for line in out.read_text().splitlines()]
    body = line["response"]["body"]
    assert (line["custom_id"], body["object"], body["model"]) == ("a", "chat.completion", "texts")
    assert body["usage"]["prompt_tokens"] == len("<user>a<assistant>"), "the template's text, byte by byte"
    [error] = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert error["response"]["body"]["error"]["param"] == "body.tools"

    batch.write_text(chat("a", "states"))
    refused = run("bulk", "run", str(batch), "-o", str(out), *to)
    assert refused.returncode == 1
    assert "states has no chat template" in refused.stderr
    batch.write_text(chat("a", "gpt"))
    unknown = run("bulk", "run", str(batch), "-o", str(out), *to)
    assert "'gpt' is no engine that serves" in unknown.stderr
    assert "(states, texts)" in unknown.stderr


def test_mining_that_is_killed_goes_on_and_every_row_lies_where_the_index_says(
    keeper: RunningSuite, states: tuple[Path, SimulatedEngine], tmp_path: Path
) -> None:
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "states"
    lines = [json.dumps({"id": f"r{n}", "prompt": f"row {n}"}) for n in range(6_000)]
    lines[11] = "no row"
    lines[12] = json.dumps({"id": "long", "prompt": "x" * 200})
    lines[13] = json.dumps({"id": "none", "prompt": "row", "omit_payload": True})
    rows.write_text("\n".join(lines))
    words = ("mine", str(rows), "-o", str(folder), "--broker", keeper.broker, "--shard-mb", "1", "--json")
    for shards in (1, 2):
        kill_when(words, functools.partial(shards_are, folder, shards))
    with holding(folder):
        second = run(*words)
    assert second.returncode == 1
    assert f"another command writes to {folder}" in second.stderr
    done = run(*words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ifab: 3 of 6,000 rows failed; see {folder / 'errors.jsonl'}"
    said = json.loads(done.stdout)
    assert (said["rows"], said["failed"]) == (5_997, 3)
    assert [json.loads(line)["id"] for line in (folder / "errors.jsonl").read_text().splitlines()] == [
        "line-12",
        "long",
        "none",
    ]

    simulation = Simulation(states[1])
    with sqlite3.connect(folder / "index.sqlite") as index:
        found = index.execute("SELECT row_id, file, position FROM rows JOIN shards ON shard = number").fetchall()
        whole = index.execute("SELECT file, rows, bytes, sha256 FROM shards").fetchall()
    index.close()
    assert {row_id for row_id, _, _ in found} == {f"r{n}" for n in range(6_000) if n not in {11, 12, 13}}
    assert len(whole) == said["shards"] == len(list(folder.glob("shard-*"))) >= 3
    tensors = {}
    for file, count, size, sha256 in whole:
        content = (folder / file).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, sha256)
        tensors[file] = load_file(folder / file)["hidden_states"]
        assert tensors[file].shape == (count, states[1].hidden_size)
    for row_id, file, position in found[::97]:
        prompt = list(f"row {row_id[1:]}".encode())
        assert np.array_equal(tensors[file][position].astype(np.float32), simulation.payload(prompt))

    rows.write_text("\n".join(lines[:5]))
    other = run(*words)
    assert other.returncode == 1
    assert "was begun with another source_sha256" in other.stderr
    unknown = run(*words, "--engine-digest", "0")
    assert unknown.stderr.startswith("ifab: no engine 0 makes hidden states; engines that make hidden states: ")
    assert "states (" in unknown.stderr


def test_two_commands_that_mine_at_the_same_time_do_not_meet(keeper: RunningSuite, tmp_path: Path) -> None:
    commands = []
    for name in ("one", "other"):
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"{name} {n}"}) + "\n" for n in range(3_000)))
        commands.append(start("mine", str(rows), "-o", str(tmp_path / name), "--broker", keeper.broker, "--json"))
    try:
        for command in commands:
            out, err = command.communicate(timeout=2 * PATIENCE_S)
            assert command.returncode == 0, err
            assert (json.loads(out)["rows"], json.loads(out)["failed"]) == (3_000, 0)
    finally:
        for command in commands:
            end(command)
