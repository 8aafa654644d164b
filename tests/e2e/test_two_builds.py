# SPDX-License-Identifier: Apache-2.0
"""Two builds of one engine: which of them a job is held to, what a job over both does, what is foreseen of either."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from engines.simulated import write_simulated_engine
from tests.support.suite import run, up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.suite import RunningSuite

ROWS, LONG_ONE_IN = 60, 4
SHORT_NODE, LONG_NODE = "local-1", "local-2"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """A node for short prompts with the larger budget, and one for long prompts with half of it."""
    folder = tmp_path_factory.mktemp("builds")
    common: dict[str, Any] = {"engine_id": "texts", "time_mode": "real", "step_us": 1000}
    write_simulated_engine(folder / "short", max_input_tokens=256, max_sequence_tokens=512, **common)
    write_simulated_engine(folder / "long", step_token_budget=256, slots=8, **common)
    with up(tmp_path_factory.mktemp("logs"), [folder / "short", folder / "long"]) as running:
        yield running


def ifab(suite: RunningSuite, *words: str, status: int = 0) -> Any:
    done = run(*words, "--broker", suite.broker, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows_file(path: Path, lengths: dict[str, int]) -> Path:
    """Writes rows by id and length; a token is a byte."""
    rows = [{"id": name, "prompt": f"{name} ".ljust(length, "x"), "max_tokens": 4} for name, length in lengths.items()]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def mixed(path: Path) -> Path:
    lengths = {f"{'long' if at % LONG_ONE_IN == 0 else 'short'}-{at}": at for at in range(ROWS)}
    return rows_file(path, {name: 600 if name.startswith("long") else 100 for name in lengths})


def run_and_foresee(suite: RunningSuite, rows: Path, *words: str, status: int = 0) -> tuple[Any, Any]:
    """The report of a run, and what an analysis said before."""
    foreseen = ifab(suite, "bulk", "analyze", str(rows), "--provisioner", suite.provisioner, *words)
    out = str(rows.with_suffix(".out.jsonl"))
    to = ("-o", out, "--provisioner", suite.provisioner, "--fresh", *words)
    return ifab(suite, "bulk", "run", str(rows), *to, status=status), foreseen


def test_a_job_is_held_to_the_build_that_takes_its_rows(suite: RunningSuite, tmp_path: Path) -> None:
    report, foreseen = run_and_foresee(suite, mixed(tmp_path / "rows.jsonl"))
    assert (report["requests"], report["failed"]) == (ROWS, 0)
    assert [share["node_id"] for share in report["shares"]] == [LONG_NODE]
    assert (foreseen["refused"], foreseen["prediction"]["nodes"]) == (0, 1)


def test_a_job_over_both_sends_each_row_where_it_fits(suite: RunningSuite, tmp_path: Path) -> None:
    report, foreseen = run_and_foresee(suite, mixed(tmp_path / "rows.jsonl"), "--any-digest")
    assert (report["requests"], report["failed"]) == (ROWS, 0)
    shares = {share["node_id"]: share["requests"] for share in report["shares"]}
    assert shares.keys() == {SHORT_NODE, LONG_NODE}
    assert shares[LONG_NODE] >= ROWS // LONG_ONE_IN
    assert (foreseen["refused"], foreseen["prediction"]["nodes"]) == (0, 2)


def test_a_live_call_names_its_build(suite: RunningSuite) -> None:
    listed = ifab(suite, "nodes", "--provisioner", suite.provisioner)["nodes"]
    digests = {node["description"]["node_id"]: node["description"]["engine_digest"] for node in listed}
    long = ("generate", "x" * 600, "-n", "2")
    answer = ifab(suite, *long, "--engine-id", "texts", "--engine-digest", digests[LONG_NODE])
    assert answer["usage"]["generated_tokens"] == 2
    refused = ifab(suite, *long, "--engine-digest", digests[SHORT_NODE], status=1)
    assert "256" in refused["error"]["message"]
    unknown = ifab(suite, *long, "--engine-id", "other", status=1)
    assert "accepted are: texts" in unknown["error"]["message"]


def test_a_row_that_only_another_build_takes_says_so(suite: RunningSuite, tmp_path: Path) -> None:
    """The first rows are as good for one build as for the other; the node that is cordoned counts less."""
    ifab(suite, "nodes", "cordon", LONG_NODE)
    try:
        rows = rows_file(tmp_path / "rows.jsonl", {**{f"short-{at}": 100 for at in range(256)}, "long": 600})
        report, foreseen = run_and_foresee(suite, rows, status=1)
    finally:
        ifab(suite, "nodes", "uncordon", LONG_NODE)
    assert (report["requests"], report["failed"]) == (257, 1)
    assert [share["node_id"] for share in report["shares"]] == [SHORT_NODE]
    (failed,) = map(json.loads, rows.with_suffix(".out.errors.jsonl").read_text().splitlines())
    fields = [field["field"] for field in failed["error"]["fields"]]
    assert (failed["id"], fields) == ("long", ["prompt.text", "spec.any_digest"])
    assert (foreseen["refused"], foreseen["prediction"]["nodes"]) == (1, 1)
    assert foreseen["refused_rows"][0]["id"] == "long"
