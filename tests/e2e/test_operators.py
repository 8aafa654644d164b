# SPDX-License-Identifier: Apache-2.0
"""What operators do to a suite that works: nodes out of service and back, jobs, requests explained, files analyzed."""

from __future__ import annotations

import json
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from engines.simulated import write_simulated_engine
from ifabric.broker.v1 import (
    broker_service_pb2,
    broker_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
)
from services.common.rpc import channel
from tests.support.suite import run, up
from tests.support.waiting import PATIENCE_S, block_until, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.suite import RunningSuite

HEADS, ROWS, HEAD_CHARACTERS = 4, 240, 256
SLOW = 3000
"""Rows of a job that takes longer than any test, however busy the machine: two minutes of both nodes."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose steps take 4 ms, so that there is something to see while it works."""
    directory = tmp_path_factory.mktemp("engine")
    write_simulated_engine(directory, engine_id="texts", time_mode="real", step_us=4_000, slots=8)
    return directory


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pair(engine: Path, logs: Path) -> Iterator[RunningSuite]:
    """A suite of two nodes."""
    with up(logs, [engine, engine]) as running:
        yield running


@pytest.fixture(autouse=True)
def back_in_service(pair: RunningSuite) -> Iterator[None]:
    """Nothing stays cordoned for the next test."""
    yield
    with operators(pair) as stub:
        for node in ("local-1", "local-2"):
            stub.UncordonNode(operator_service_pb2.UncordonNodeRequest(node_id=node), timeout=30)


def ifab(suite: RunningSuite, *words: str, status: int = 0) -> Any:
    """What a command says last by JSON; it has to end with that status."""
    done = run(*words, "--broker", suite.broker, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


@contextmanager
def operators(suite: RunningSuite) -> Iterator[operator_service_pb2_grpc.OperatorServiceStub]:
    """The service itself, for what is asked again and again: a command takes a second to start."""
    with grpc.insecure_channel(suite.broker) as to_broker:
        yield operator_service_pb2_grpc.OperatorServiceStub(to_broker)


def running(suite: RunningSuite) -> list[int]:
    """Requests that run on each node."""
    with operators(suite) as stub:
        listed = stub.ListNodeWork(operator_service_pb2.ListNodeWorkRequest(), timeout=30)
    return [node.running_requests for node in listed.nodes]


def nodes(suite: RunningSuite) -> dict[str, dict[str, Any]]:
    listed = ifab(suite, "nodes", "--provisioner", suite.provisioner)["nodes"]
    return {node["description"]["node_id"]: node["at_the_broker"] for node in listed}


def rows_file(path: Path, count: int = ROWS, max_tokens: int = 4) -> Path:
    """Writes rows whose heads are those of this file alone: a node that holds them would get them."""
    mark = zlib.crc32(str(path).encode()) % 1000
    heads = [f"{head}{mark:03}" * (HEAD_CHARACTERS // 4) for head in range(HEADS)]
    rows = [{"id": f"r{n}", "prompt": f"{heads[n % HEADS]} row {n:04}", "max_tokens": max_tokens} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@contextmanager
def job_under_way(suite: RunningSuite, folder: Path, count: int = SLOW) -> Iterator[str]:
    """A job of slow rows that runs on both nodes."""
    rows = rows_file(folder / "slow.jsonl", count, max_tokens=200)
    made = ifab(suite, "bulk", "submit", str(rows), "--provisioner", suite.provisioner)
    try:
        block_until(lambda: all(running(suite)), what="work on both")
        yield made["job_id"]
    finally:
        ifab(suite, "bulk", "cancel", made["job_id"])


def test_a_cordoned_node_gets_nothing_until_it_is_uncordoned(pair: RunningSuite, tmp_path: Path) -> None:
    said = ifab(pair, "nodes", "cordon", "local-1")
    assert (said["node_id"], said["cordoned"], said["connected"]) == ("local-1", True, True)
    rows, out = rows_file(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    to = ("-o", str(out), "--provisioner", pair.provisioner, "--fresh")
    report = ifab(pair, "bulk", "run", str(rows), *to)
    assert (report["requests"], report["failed"]) == (ROWS, 0)
    assert [share["node_id"] for share in report["shares"]] == ["local-2"]
    table = run("nodes", "--provisioner", pair.provisioner, "--broker", pair.broker).stdout
    assert "cordoned, 0 running" in table.splitlines()[1]
    ifab(pair, "nodes", "uncordon", "local-1")
    report = ifab(pair, "bulk", "run", str(rows_file(tmp_path / "others.jsonl")), *to)
    assert {share["node_id"] for share in report["shares"]} == {"local-1", "local-2"}


def test_a_drained_node_has_nothing_left_and_the_job_goes_on(pair: RunningSuite, tmp_path: Path) -> None:
    with job_under_way(pair, tmp_path) as job:
        impatient = run("nodes", "drain", "local-1", "--limit", "0.1", "--broker", pair.broker)
        assert impatient.returncode == 1
        assert "still run on local-1 after 0.1 s; it stays cordoned" in impatient.stderr
        assert nodes(pair)["local-1"]["cordoned"]
        drained = run("nodes", "drain", "local-1", "--broker", pair.broker)
        assert (drained.returncode, drained.stdout) == (0, "local-1 is cordoned, and nothing runs there\n")
        now = nodes(pair)
        assert now["local-1"]["running_requests"] == 0
        assert now["local-2"]["running_requests"] > 0
        status = ifab(pair, "bulk", "status", job)
        assert (status["state"], status["failed"]) == ("running", 0)


def test_a_node_that_nobody_knows_is_named(pair: RunningSuite) -> None:
    done = run("nodes", "cordon", "locl-1", "--broker", pair.broker)
    assert done.returncode == 1
    assert done.stderr == "ifab: no node is called 'locl-1'; connected are: local-1, local-2\n"


def test_jobs_show_their_cost_and_are_held_and_let_go(pair: RunningSuite, tmp_path: Path) -> None:
    with job_under_way(pair, tmp_path) as job:
        (listed,) = [json.loads(line) for line in run("jobs", "--broker", pair.broker, "--json").stdout.splitlines()]
        assert (listed["job_id"], listed["state"], listed["rows"]) == (job, "running", SLOW)
        assert ifab(pair, "jobs", "pause", job)["state"] == "paused"
        assert ifab(pair, "jobs", "priority", job, "7")["priority"] == 7
        block_until(lambda: not any(running(pair)), what="the pause")
        explained = ifab(pair, "explain", f"r{SLOW - 1}", "--job", job)
        assert explained["place"] in {"waiting", "journal"}
        assert "paused" in explained["sentences"][0]
        people = run("jobs", "--broker", pair.broker).stdout.splitlines()
        assert people[0].split()[:3] == ["job", "state", "priority"]
        assert people[1].split()[:3] == [job, "paused", "7"]
        assert ifab(pair, "jobs", "resume", job)["state"] == "running"
        block_until(lambda: any(running(pair)), what="work again")
    assert run("jobs", "--broker", pair.broker, "--json").stdout == "", "cancelled jobs have ended"
    ended = [
        json.loads(line)["job_id"]
        for line in run("jobs", "--all", "--broker", pair.broker, "--json").stdout.splitlines()
    ]
    assert job in ended


def test_a_row_is_explained_wherever_it_is(pair: RunningSuite, tmp_path: Path) -> None:
    rows, out = rows_file(tmp_path / "rows.jsonl", 8), tmp_path / "out.jsonl"
    done = ifab(pair, "bulk", "run", str(rows), "-o", str(out), "--provisioner", pair.provisioner)
    ended = ifab(pair, "explain", "r3", "--job", done["job_id"])
    assert ended["place"] == "ended"
    assert ended["sentences"][0].startswith("It has ended well: 4 tokens generated, ")
    with job_under_way(pair, tmp_path) as job:
        found = {name: ifab(pair, "explain", name, "--job", job) for name in ("r0", f"r{SLOW - 1}")}
        places = {each["place"] for each in found.values()}
        assert places <= {"running", "waiting", "ended"}
        there = [each for each in found.values() if each["place"] == "running"]
        assert all(each["node_id"] in each["sentences"][0] for each in there)
        missing = run("explain", "absent", "--job", job, "--broker", pair.broker)
        assert missing.returncode == 1
        assert missing.stderr == f"ifab: job '{job}' has no row 'absent' among its {SLOW:,}\n"
    unknown = run("explain", "nobody", "--broker", pair.broker)
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("ifab: request 'nobody' is not in flight here")


async def test_a_live_request_says_that_its_nodes_are_cordoned(pair: RunningSuite) -> None:
    for node in ("local-1", "local-2"):
        ifab(pair, "nodes", "cordon", node)
    request = broker_service_pb2.GenerationRequest(request_id="waits", max_tokens=2)
    request.prompt.text = "Hello"
    async with channel(pair.broker) as to_broker:
        stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
        call = stub.Generate(broker_service_pb2.GenerateRequest(request=request), timeout=3 * PATIENCE_S)

        def explained() -> str:
            done = run("explain", "waits", "--broker", pair.broker)
            return done.stdout

        await wait_until(lambda: "cordoned" in explained(), what="the request")
        assert explained().splitlines()[0] == (
            "Of the nodes that serve an engine of this request, local-1, local-2 are cordoned."
        )
        ifab(pair, "nodes", "uncordon", "local-2")
        answer = await call
    assert answer.result.usage.generated_tokens == 2


def test_a_file_is_worth_what_its_run_then_saves(pair: RunningSuite, tmp_path: Path) -> None:
    rows, out = rows_file(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    with rows.open("a") as file:
        file.write("\n" + json.dumps({"id": "long", "prompt": "x" * 5000, "max_tokens": 4}))
    to = ("--provisioner", pair.provisioner)
    # Engines that have worked have a speed.
    earlier = rows_file(tmp_path / "earlier.jsonl")
    ifab(pair, "bulk", "run", str(earlier), "-o", str(tmp_path / "earlier.out.jsonl"), *to)
    said = ifab(pair, "bulk", "analyze", str(rows), *to)
    assert (said["rows"], said["refused"]) == (ROWS + 1, 1)
    assert said["refused_rows"][0]["id"] == "long"
    assert [head["rows"] for head in said["heads"][:HEADS]] == [ROWS // HEADS] * HEADS
    saved = said["prompt_tokens_logical"] - said["prompt_tokens_bound"]
    assert saved == sum(head["saved_tokens"] for head in said["heads"]) > 0
    assert said["prediction"]["nodes"] == 2
    assert said["engines"][0]["nodes"] == ["local-1", "local-2"]
    # The run is held to what it was predicted to take.
    prediction = tmp_path / "prediction.json"
    prediction.write_text(json.dumps(said))
    told = ("--prediction", str(prediction), "--fresh", *to)
    report = ifab(pair, "bulk", "run", str(rows), "-o", str(out), *told, status=1)  # the long row fails
    assert report["prompt_tokens_bound"] == said["prompt_tokens_bound"]
    assert report["prediction"]["prompt_tokens_computed"] == said["prediction"]["prompt_tokens_computed"]
    assert abs(report["prediction"]["prompt_tokens_computed_error"]) < 0.25
    assert report["prediction"]["generated_tokens_error"] is not None
    assert report["prediction"]["wall_s"] > 0
    people = run("bulk", "analyze", str(rows), *to, "--broker", pair.broker).stdout
    assert "241 (1 would be refused)" in people
    assert "saved tokens" in people

    other = rows_file(tmp_path / "other.jsonl", 3)
    refused = run(
        "bulk", "run", str(other), "-o", str(out), "--prediction", str(prediction), "--broker", pair.broker, *to
    )
    assert refused.returncode == 1
    assert "the prediction is of job rows-" in refused.stderr
    predicted = ifab(pair, "bulk", "run", str(other), "-o", str(tmp_path / "o.jsonl"), "--predict", *to)
    assert predicted["prediction"]["prompt_tokens_computed"] > 0


def test_cordons_outlive_the_broker(engine: Path, tmp_path: Path) -> None:
    with up(tmp_path, [engine]) as suite:
        ifab(suite, "nodes", "cordon", "local-1")
    with up(tmp_path, [engine]) as suite:
        assert nodes(suite)["local-1"]["cordoned"]
        assert ifab(suite, "nodes", "uncordon", "local-1")["connected"]
        assert json.loads((tmp_path / "cordons.json").read_text()) == {"cordoned": []}
        assert ifab(suite, "generate", "Hello", "-n", "2")["usage"]["generated_tokens"] == 2
