# SPDX-License-Identifier: Apache-2.0
"""A short soak, suites side by side, and the soak's own judgement."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from engines.simulated import SimulatedEngine, Simulation
from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.common import reasons
from services.common.errors import UnavailableError, to_status
from tests.chaos.client import request
from tests.chaos.sizes import Sizes, grown
from tests.chaos.soak import cores_of, main
from tests.chaos.soaking import soak
from tests.chaos.tally import CHECK_ONE_IN, Tally, faults
from tests.chaos.together import Suite, table, together
from tests.jobs.running import ENGINE
from tests.support.processes import ROOT, environment
from tests.support.suite import all_gone
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from pathlib import Path

PROCESS: dict[str, Any] = {"growth_mb": 1.0, "late_growth_mb": 0.5, "most_mb": 90.0, "descriptors_more": 2}
GOOD: dict[str, Any] = {
    "requests": 100, "seconds": 10.0, "requests_a_second": 10, "outcomes": {"finished": 99, "cancelled": 1},
    "lost": 0, "doubled": 0, "wrong": 0, "put_off": 1, "since_warm_up": 75,
    "left_by_clients": 0, "unanswered": 0, "checked_token_by_token": 6,
    "worker_deaths": 2, "at_rest": True, "processes": {"broker": PROCESS}, "sentences": [],
}  # fmt: skip


def suite(number: int = 0, *, status: int | None = 0, **figures: Any) -> Suite:
    return Suite(number, 100, 1, (), {**GOOD, "ended": True, "faults": [], **figures}, status)


def test_a_good_run_has_no_faults() -> None:
    assert faults(GOOD) == []


def test_a_run_in_which_nobody_died_shows_nothing() -> None:
    calm = {**GOOD, "worker_deaths": 0}
    assert faults(calm) == []
    assert len(faults({**calm, "seconds": 31.0})) == 1


@pytest.mark.parametrize(
    ("what", "figure"),
    [
        ("lost", 1),
        ("doubled", 1),
        ("wrong", 1),
        ("unanswered", 1),
        ("at_rest", False),
        ("processes", {}),
        ("put_off", 2),
        ("processes", {"broker": {**PROCESS, "growth_mb": 8.1}}),
        ("processes", {"broker": {**PROCESS, "descriptors_more": 100}}),
    ],
)
def test_a_run_that_lost_doubled_or_grew_is_found(what: str, figure: Any) -> None:
    assert len(faults({**GOOD, what: figure})) == 1


@pytest.mark.parametrize(("requests", "most"), [(75, 8.0), (200_000, 16.0), (10_000_000, 20.0)])
def test_a_process_may_grow_by_so_much_a_request_and_no_further(requests: int, most: float) -> None:
    for growth, found in ((most, 0), (most + 0.1, 1)):
        assert len(grown({"worker": {**PROCESS, "growth_mb": growth}}, requests)) == found


def outcome(*tokens: int, **failed: Any) -> broker_service_pb2.RequestOutcome:
    made = broker_service_pb2.RequestOutcome(request_id="r")
    if failed:
        made.failed.CopyFrom(to_status(UnavailableError("away", **failed)))
    else:
        made.finished.samples.add(token_ids=tokens, finish_reason=generation_pb2.FINISH_REASON_LENGTH)
    return made


GOOD_REQUEST, WRONG_REQUEST = request("r", [1, 2], 1), request("r", [1, 2], 0)
RIGHT = Simulation(SimulatedEngine(**ENGINE)).tokens([1, 2], 1)


@pytest.mark.parametrize(
    ("made", "came", "counts"),
    [
        (GOOD_REQUEST, outcome(*RIGHT), (0, 0, 0)),
        (GOOD_REQUEST, outcome(RIGHT[0] ^ 1), (0, 1, 0)),
        (GOOD_REQUEST, outcome(reason=reasons.UNAVAILABLE, retry_after_s=1.0), (0, 0, 1)),
        (GOOD_REQUEST, outcome(reason=reasons.UNAVAILABLE), (0, 1, 0)),
        (GOOD_REQUEST, outcome(reason=reasons.WORKER_LOST, retry_after_s=1.0), (0, 1, 0)),
        (WRONG_REQUEST, outcome(reason=reasons.INVALID_FIELDS), (0, 0, 0)),
        (WRONG_REQUEST, outcome(reason=reasons.UNAVAILABLE, retry_after_s=1.0), (0, 1, 0)),
        (WRONG_REQUEST, outcome(*RIGHT), (0, 1, 0)),
        (None, outcome(*RIGHT), (1, 0, 0)),
    ],
    ids=["right", "other tokens", "put off", "given up", "lost", "refused", "refused otherwise", "served", "twice"],
)
def test_an_outcome_that_may_not_be_is_counted(made: Any, came: Any, counts: tuple[int, int, int]) -> None:
    tally = Tally(outcomes=Counter(finished=CHECK_ONE_IN - 1))  # the next one is compared token by token
    tally.take(made, came, frozenset())
    assert (tally.doubled, tally.wrong, tally.put_off) == counts


def test_what_a_process_grows_by_is_measured_from_its_warm_up() -> None:
    sizes = Sizes({"this": os.getpid()})
    sizes.take()
    early = [os.open(os.devnull, os.O_RDONLY) for _ in range(30)]
    assert sizes.figures() == {}
    sizes.warmed_up()
    late = [os.open(os.devnull, os.O_RDONLY) for _ in range(30)]
    held = b"x" * 60_000_000
    sizes.take()
    for each in (*early, *late):
        os.close(each)
    figures = sizes.figures()["this"]
    assert figures["descriptors_more"] == 30
    assert figures["growth_mb"] >= len(held) / 1e6 - 1
    assert len(grown({"this": figures}, 1000)) == 2


def test_suites_are_summed_up_and_the_worst_of_each_process_is_told() -> None:
    figures = together([suite(), suite(1, processes={"broker": {**PROCESS, "growth_mb": 7.0}})], 20.0)
    assert figures["requests"] == 200
    assert figures["requests_a_second"] == 10
    assert figures["outcomes"] == {"finished": 198, "cancelled": 2}
    assert figures["worst_of_a_process"]["broker"]["growth_mb"] == 7.0
    assert figures["faults"] == []
    assert table(figures).splitlines()[3].split()[:3] == ["all", "200", "10"]


@pytest.mark.parametrize(
    "bad",
    [
        suite(7, faults=["1 requests were lost"], status=1),
        suite(7, status=1),
        suite(7, ended=False, status=-9),
        suite(7, ended=False, status=None, doubled=1),
        Suite(7, 100, 1, (), status=1),
    ],
    ids=["lost", "failed", "killed", "doubled so far", "silent"],
)
def test_one_bad_suite_is_named(bad: Suite) -> None:
    (fault,) = together([suite(), bad], 20.0)["faults"]
    assert fault.startswith("suite 7: ")


def test_a_suite_that_runs_is_no_fault_yet() -> None:
    assert together([suite(ended=False, status=None), Suite(1, 100, 1, ())], 20.0)["faults"] == []


def test_cores_are_lists_and_ranges_of_what_there_is() -> None:
    first, *more = sorted(os.sched_getaffinity(0))
    assert cores_of(f"{first}") == [first]
    assert cores_of(f"{first}-{first},{first}") == [first]
    if more:
        assert cores_of(f"{first},{more[0]}") == [first, more[0]]
    for wrong in ("", "a", "1-", "-1", "1,,2", "100000"):
        with pytest.raises(argparse.ArgumentTypeError):
            cores_of(wrong)


@pytest.mark.parametrize(
    "words", [["--suites", "2", "--cores", str(min(os.sched_getaffinity(0)))], ["--suites", "3", "--requests", "2"]]
)
def test_more_suites_than_cores_or_requests_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert "suites want a" in capsys.readouterr().err


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.soak", "--out", str(folder), *words],
        cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_suites_side_by_side_end_in_order_when_they_are_told_to(tmp_path: Path) -> None:
    process = start(tmp_path, "--suites", "2", "--requests", "10000000", "--seconds", "100")

    def under_way() -> bool:
        lines = [tmp_path / f"suite-0{number}.jsonl" for number in range(2)]
        return all(line.exists() and line.read_text() for line in lines)

    block_until(under_way, within_s=90, what="both suites have spoken")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    figures = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "soak.json").read_text()) == figures
    assert figures["ended"]
    assert 0 < figures["requests"] < 10_000_000
    assert [figures[what] for what in ("lost", "doubled", "wrong", "unanswered")] == [0, 0, 0, 0]
    assert all("memory" in fault for fault in figures["faults"])  # it was told to end in its warm-up
    assert process.returncode == 1


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_suite_that_dies_is_a_fault_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(tmp_path, "--suites", "2", "--requests", "16000", "--seconds", "60")

    def soaking() -> list[psutil.Process]:
        return [each for each in psutil.Process(process.pid).children() if len(each.children()) == 5]

    first = min(block_until(lambda: len(soaking()) == 2 and soaking(), within_s=90, what="both are up"), key=_started)
    services = [each.pid for each in first.children()]
    first.kill()
    out, _ = process.communicate(timeout=120)
    figures = json.loads(out.splitlines()[-1])
    assert process.returncode == 1
    assert figures["faults"] == ["suite 0: it did not come to its end: status -9"]
    all_gone(services)


def _started(process: psutil.Process) -> float:
    return float(process.create_time())


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_nothing_is_lost_and_nothing_grows(tmp_path: Path) -> None:
    figures = await soak(tmp_path, requests=1_000_000, limit_s=40, seed=2)
    assert faults(figures) == [], figures
    assert figures["worker_deaths"] >= 2
    assert figures["outcomes"]["cancelled"] > 0
    assert figures["outcomes"]["INVALID_FIELDS"] > 0
