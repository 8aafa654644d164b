# SPDX-License-Identifier: Apache-2.0
"""The verbs of `ifab bulk` together on jobs that run, and what its options ask for, on real services."""

from __future__ import annotations

import gzip
import json
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from engines.simulated import Simulation, write_simulated_engine
from ifabric.broker.v1 import operator_service_pb2, operator_service_pb2_grpc
from tests.jobs.client import JobClient
from tests.support.suite import all_gone, children_of, end, run, start, up
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engines.simulated import SimulatedEngine
    from tests.support.suite import RunningSuite

pytestmark = pytest.mark.timeout(240)

ROWS = 1000
TEXTS_NODE = "local-1"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, SimulatedEngine]:
    """One that takes some seconds for ROWS rows, one that makes hidden states, and what the latter is."""
    texts, states = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("states")
    write_simulated_engine(texts, engine_id="texts", time_mode="real", step_us=20_000, slots=16)
    written = write_simulated_engine(
        states, engine_id="states", max_output_tokens=0, payload_dtype="float32", hidden_size=64
    )
    return texts, states, written


@pytest.fixture(scope="module")
def suite(
    engines: tuple[Path, Path, SimulatedEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSuite]:
    with up(tmp_path_factory.mktemp("logs"), engines[:2]) as running:
        yield running


@contextmanager
def standing(suite: RunningSuite) -> Iterator[Callable[[bool], None]]:
    """Gives what takes the node of the texts out of service and back at once: a command takes a second to start.

    No row is handed over while it is out, so a job does not end meanwhile, however long what a test does takes.
    """
    with grpc.insecure_channel(suite.broker) as to_broker:
        operators = operator_service_pb2_grpc.OperatorServiceStub(to_broker)

        def stand(still: bool) -> None:
            change: Any = operators.CordonNode if still else operators.UncordonNode
            kind = operator_service_pb2.CordonNodeRequest if still else operator_service_pb2.UncordonNodeRequest
            change(kind(node_id=TEXTS_NODE), timeout=30)

        stand(True)
        try:
            yield stand
        finally:
            stand(False)


def begin(suite: RunningSuite, name: str, stand: Callable[[bool], None]) -> None:
    """Lets some rows of a job end, and no more."""
    with JobClient(suite.broker, job_id=name, tenant="") as job:
        stand(False)
        block_until(lambda: job.get().finished_rows, what="the first results")
        stand(True)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Rows that end in the order in which they stand."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"r{n}", "prompt": f"row {n:05}", "max_tokens": 3} for n in range(ROWS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def said(suite: RunningSuite, verb: str, *words: str, status: int = 0) -> dict[str, Any]:
    """Runs a verb that must end with a status, and returns the object that it prints last."""
    done = run("bulk", verb, *words, "--broker", suite.broker, "--json")
    assert done.returncode == status, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def shown(watch: subprocess.Popen[str], condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Reads what `ifab bulk watch --json` says until it is what is waited for."""
    assert watch.stdout is not None
    for line in watch.stdout:
        job = dict(json.loads(line))
        if condition(job):
            return job
    raise AssertionError(f"the watch ended: {watch.communicate()}")


def test_a_job_that_runs_is_watched_stopped_collected_and_let_go_on(
    suite: RunningSuite, prompts: Path, tmp_path: Path
) -> None:
    name, out = "runs", tmp_path / "out.jsonl"
    with standing(suite) as stand:
        submitted = said(suite, "submit", str(prompts), "--job", name, "--engine-id", "texts")
        assert (submitted["job_id"], submitted["rows"]) == (name, ROWS)
        watch = start("bulk", "watch", name, "--broker", suite.broker, "--json")
        try:
            seen = [shown(watch, lambda job: job["finished"] == 0)]
            begin(suite, name, stand)
            seen.append(shown(watch, lambda job: job["finished"] > 0))
            assert said(suite, "pause", name)["state"] == "paused"
            stand(False)
            first = said(suite, "results", name, "-o", str(out))
            assert (first["total"], first["failed"]) == (ROWS, 0)
            held = said(suite, "status", name)
            assert (held["state"], held["finished"] < ROWS) == ("paused", True)
            listed = run("bulk", "list", "--broker", suite.broker, "--json")
            assert name in [json.loads(line)["job_id"] for line in listed.stdout.splitlines()]
            assert said(suite, "resume", name)["state"] == "running"
            last = said(suite, "results", name, "-o", str(out), "--follow")
            assert (last["rows"], last["failed"]) == (ROWS, 0)
            left, _ = watch.communicate(timeout=PATIENCE_S)
            states = [job["state"] for job in (*seen, *map(json.loads, left.splitlines()))]
            assert watch.returncode == 0
            assert states[-1] == "completed"
            assert "paused" in states
        finally:
            end(watch)
    assert [each["id"] for each in documents(out)] == [f"r{n}" for n in range(ROWS)]
    ended = said(suite, "status", name)
    assert (ended["state"], ended["finished"], ended["failed"]) == ("completed", ROWS, 0)
    assert said(suite, "cancel", name)["state"] == "completed", "what has ended stays as it is"
    assert 0 < ended["report"]["prompt_tokens_bound"] <= ended["report"]["prompt_tokens_computed"]


def test_a_job_that_is_cancelled_half_way_keeps_its_results_and_has_an_error_for_every_other_row(
    suite: RunningSuite, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with standing(suite) as stand:
        said(suite, "submit", str(prompts), "--job", "half", "--engine-id", "texts")
        watch = start("bulk", "watch", "half", "--broker", suite.broker, "--json")
        try:
            shown(watch, lambda job: job["finished"] == 0)
            begin(suite, "half", stand)
            shown(watch, lambda job: job["finished"] > 0)
        finally:
            end(watch)
        cancelled = said(suite, "cancel", "half")
    assert cancelled["state"] == "cancelled"
    counted = said(suite, "results", "half", "-o", str(out), "--follow", status=1)
    assert (counted["rows"], counted["failed"]) == (ROWS, ROWS - cancelled["finished"])
    assert 0 < cancelled["finished"] < ROWS
    errors = documents(tmp_path / "out.errors.jsonl")
    assert {each["error"]["code"] for each in errors} == {"CANCELLED"}
    both = [each["id"] for each in (*documents(out), *errors)]
    assert sorted(both) == sorted(f"r{n}" for n in range(ROWS))


def test_a_job_is_given_up_at_its_deadline(suite: RunningSuite, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"id": "a", "prompt": "x", "max_tokens": 1}\n{"id": "b", "prompt": "y", "max_tokens": 1}\n')
    words = ("bulk", "run", str(rows), "-o", str(out), "--engine-id", "none", "--deadline", "2")
    done = run(*words, "--broker", suite.broker, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"]) == (2, 2)
    assert "ended early (its deadline has passed), --fresh runs it again: 2 of 2 rows failed" in done.stderr
    errors = documents(tmp_path / "out.errors.jsonl")
    assert [(each["id"], each["error"]["code"]) for each in errors] == [
        ("a", "DEADLINE_EXCEEDED"),
        ("b", "DEADLINE_EXCEEDED"),
    ]
    assert "its deadline has passed" in errors[0]["error"]["message"]


def test_defaults_are_for_rows_that_set_none(suite: RunningSuite, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"id": "plain", "prompt": "x"}\n{"id": "own", "prompt": "y", "max_tokens": 5}\n')
    words = (str(rows), "-o", str(out), "--engine-id", "texts", "--defaults")
    said(suite, "run", *words, '{"max_tokens": 2, "ignore_end": true}')
    assert [each["usage"]["generated_tokens"] for each in documents(out)] == [2, 5]
    before = out.read_bytes()
    said(suite, "submit", str(rows), "--engine-id", "texts", "--job", "longer", "--defaults", '{"max_tokens": 3}')
    other = run("bulk", "results", "longer", "-o", str(out), "--follow", "--broker", suite.broker)
    assert (other.returncode, out.read_bytes()) == (1, before)
    assert "not the beginning of what the job longer brings" in other.stderr, "the ids are the same, the answers not"
    for wrong, says in (
        ('{"prompt": "x"}', "--defaults has prompt"),
        ('{"max_tokens": "many"}', "max_tokens is text"),
    ):
        done = run("bulk", "run", *words, wrong, "--broker", suite.broker)
        assert done.returncode == 1
        assert says in done.stderr


def test_embeddings_of_a_batch_file_are_the_hidden_states(
    suite: RunningSuite, engines: tuple[Path, Path, SimulatedEngine], tmp_path: Path
) -> None:
    batch, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    inputs = ["one text", "another", ["two", "at once"]]
    lines = [
        {"custom_id": f"e{n}", "method": "POST", "url": "/v1/embeddings", "body": {"model": "states", "input": text}}
        for n, text in enumerate(inputs)
    ]
    batch.write_text("\n".join(map(json.dumps, lines)))
    report = said(suite, "run", str(batch), "-o", str(out), status=1)
    assert (report["requests"], report["failed"]) == (3, 1)
    simulation = Simulation(engines[2])
    for line, sent, text in zip(documents(out), lines, inputs, strict=False):
        body = line["response"]["body"]
        assert (line["custom_id"], body["object"], body["model"]) == (sent["custom_id"], "list", "states")
        assert body["data"][0]["embedding"] == simulation.payload(list(str(text).encode())).tolist()
        assert body["usage"]["prompt_tokens"] == len(str(text))
    [error] = documents(tmp_path / "out.errors.jsonl")
    assert (error["custom_id"], error["response"]["status_code"]) == ("e2", 400)
    assert error["response"]["body"]["error"]["param"] == "body.input"
    wrong = run("bulk", "run", str(batch), "-o", str(out), "--engine-id", "texts", "--broker", suite.broker)
    assert wrong.returncode == 1
    assert "texts makes no hidden states, and so no embeddings" in wrong.stderr


def test_everything_that_can_be_wrong_with_lines_is_an_error_in_its_place(suite: RunningSuite, tmp_path: Path) -> None:
    good = [json.dumps({"id": name, "prompt": name, "max_tokens": 1}).encode() for name in ("first", "twice", "last")]
    lines = [
        b"\xef\xbb\xbf" + good[0] + b"\r",
        good[1] + b"\r",
        good[1] + b"\r",
        json.dumps({"id": "x" * 10_000, "prompt": "x", "max_tokens": 1}).encode(),
        b'{"id": "bytes", "prompt": "\xff\xfe", "max_tokens": 1}',
        b'{"id": "long", "prompt": "' + b"x" * (9 * 1024 * 1024) + b'"}',
        b"",
        good[2] + b"\r",
    ]
    rows, out = tmp_path / "rows.txt", tmp_path / "out.jsonl"
    rows.write_bytes(gzip.compress(b"\n".join(lines), compresslevel=1))
    done = run("bulk", "run", str(rows), "-o", str(out), "--engine-id", "texts", "--broker", suite.broker, "--json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ifab: 4 of 7 rows failed; see ")
    assert "gzip" in done.stderr, "a note says what the file is"
    assert [each["id"] for each in documents(out)] == ["first", "twice", "last"]
    errors = {each["id"]: each["error"] for each in documents(tmp_path / "out.errors.jsonl")}
    assert {name: error["code"] for name, error in errors.items()} == {
        "line-3": "ALREADY_EXISTS",
        "line-4": "INVALID_ARGUMENT",
        "line-5": "INVALID_ARGUMENT",
        "line-6": "INVALID_ARGUMENT",
    }
    assert "10,000 bytes" in errors["line-4"]["message"]


@pytest.mark.slow
def test_a_job_with_a_suite_of_its_own_that_ctrl_c_ends_goes_on_where_it_was(
    engines: tuple[Path, Path, SimulatedEngine], prompts: Path, tmp_path: Path
) -> None:
    out, logs = tmp_path / "out.jsonl", tmp_path / "logs"
    words = ("bulk", "run", str(prompts), "-o", str(out), "--up", "--engine", str(engines[0]), "--logs", str(logs))
    command = start(*words)
    try:
        block_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 20, within_s=90, what="some results")
        services = [child.pid for child in children_of(command.pid)]
        assert len(services) >= 3
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=60)
        assert command.returncode == 128 + signal.SIGINT
        assert "the same command goes on where it was" in errors
        all_gone(services)
    finally:
        end(command)
    before = out.read_bytes()
    assert 20 < before.count(b"\n") < ROWS
    done = run(*words, "--json", within_s=120)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(before)
    assert [each["id"] for each in documents(out)] == [f"r{n}" for n in range(ROWS)]
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"]) == (ROWS, 0)
