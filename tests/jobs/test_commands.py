# SPDX-License-Identifier: Apache-2.0
"""`ifab bulk` while its broker is away, and where it has no room: the command waits, says why, and goes on."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.jobs.client import JobClient
from tests.jobs.proof import QUICK
from tests.jobs.running import Fabric
from tests.support.spoken import until
from tests.support.suite import end, run, start
from tests.support.waiting import block_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)

ROWS = 200


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """A job of ROWS rows takes some seconds, from when the worker is started."""
    folder = tmp_path_factory.mktemp("commands")
    with Fabric(folder, engine={**QUICK, "step_us": 20_000}, broker={"tenant_rows_max": 1000}) as made:
        made.brokers[0].start()
        yield made


def prompts(path: Path, count: int) -> str:
    """Rows that end in the order in which they stand."""
    lines = [json.dumps({"id": f"r{row}", "prompt": f"Row {row:05}", "max_tokens": 6}) for row in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


def holds_some(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def test_commands_that_stream_go_on_when_their_broker_is_back(fabric: Fabric, tmp_path: Path) -> None:
    [broker] = fabric.brokers
    to = ("--broker", broker.address, "--tenant", "away", "--json")
    rows, out, whole = prompts(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    with ExitStack() as stack:
        job = stack.enter_context(JobClient(broker.address, job_id="away", tenant="away"))
        assert run("bulk", "submit", rows, "--job", "away", *to).returncode == 0
        fabric.workers[0].start()
        block_until(lambda: job.get().finished_rows >= 20, what="some results")
        job.pause()

        def command(*words: str) -> subprocess.Popen[str]:
            process = start("bulk", *words, *to)
            stack.callback(end, process)
            return process

        watch = command("watch", "away")
        collect = command("results", "away", "-o", str(out), "--follow")
        again = command("run", rows, "-o", str(whole), "--job", "away")
        until(again, '"stage":"paused"')
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["state"] == "paused"
        for path in (out, whole):
            block_until(partial(holds_some, path), what="lines of results")
        assert job.get().finished_rows < ROWS
        broker.kill()
        for process in (watch, collect):
            assert until(process, "nothing answers").startswith("ifab: ")
        event = json.loads(until(again, '"stage":"waiting"'))
        assert "nothing answers" in event["reason"]
        broker.start()
        job.resume()
        told = {process: process.communicate(timeout=90) for process in (watch, collect, again)}
        assert [process.returncode for process in told] == [0, 0, 0], told
    last = json.loads(told[watch][0].splitlines()[-1])
    assert (last["state"], last["finished"]) == ("completed", ROWS)
    assert json.loads(told[collect][0]) == {"job_id": "away", "rows": ROWS, "failed": 0, "total": ROWS}
    assert json.loads(told[again][0])["requests"] == ROWS
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [f"r{n}" for n in range(ROWS)]
    assert whole.read_bytes() == out.read_bytes()


def test_an_upload_for_which_there_is_no_room_says_whose_limit_it_met(fabric: Fabric, tmp_path: Path) -> None:
    rows = prompts(tmp_path / "rows.jsonl", 4000)
    words = ("bulk", "submit", rows, "--broker", fabric.brokers[0].address, "--tenant", "many", "--silence", "1")
    done = run(*words, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert "at most 1000 are kept" in done.stderr.splitlines()[-1]
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert any(each["stage"] == "waiting" and "at most 1000 are kept" in each["reason"] for each in events)
