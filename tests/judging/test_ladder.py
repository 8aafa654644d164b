# SPDX-License-Identifier: Apache-2.0
"""Ladders count what servers do, whichever protocol they speak, and end where going on would be useless."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from engines.ladder import report, workload
from engines.ladder.climbing import Ladder, climb
from engines.ladder.company import Company
from engines.ladder.plan import OPEN, LadderPlan
from engines.ladder.rung import Spread, Tally
from engines.plots.svg import Chart
from engines.simulated import write_simulated_engine
from engines.targets.http import Address
from engines.targets.kserve import KServeTarget
from engines.targets.openai import OpenAiTarget
from services.common.errors import (
    FabricError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.rpc import channel
from tests.judging.foreign import kserve_server, openai_server
from tests.support import suite
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def quick(*rungs: float) -> LadderPlan:
    """A plan of rungs as short as they may be where the process itself may stand for some tenths of a second."""
    return LadderPlan(rungs, rung_s=0.7, warmup_s=0.1, max_tokens=8, drain_s=5.0)


async def test_a_closed_loop_over_http_counts_tokens_and_times() -> None:
    # A token takes so long that eight clients are as far from what one core can do as one is.
    async with openai_server(token_s=0.004) as server:
        result = await climb(OpenAiTarget(server.url), ["a prompt"], quick(1, 8))
        assert server.in_flight == 0
    assert result.ended == ""
    assert [rung.level for rung in result.rungs] == [1, 8]
    for rung in result.rungs:
        assert rung.errors == {}
        assert rung.tokens >= 8 * (rung.finished - rung.level)
        assert 0 < rung.first_token.p50 <= rung.first_token.p99
        assert rung.per_token.p50 >= 0.003
    assert result.rungs[1].tokens_per_s > 2 * result.rungs[0].tokens_per_s
    assert {body["max_tokens"] for body in server.bodies} == {8}


async def test_pieces_of_text_are_tokens_where_the_server_does_not_count() -> None:
    async with openai_server(counts=False) as server:
        tokens: list[int] = []
        await OpenAiTarget(server.url).ask("x", 5, tokens.append)
    assert tokens == [1] * 5


async def test_an_open_loop_sends_whatever_became_of_earlier_requests() -> None:
    plan = LadderPlan((100,), OPEN, 0.8, 0.1, 4, in_flight_max=4, drain_s=5.0)
    async with openai_server(token_s=0.05) as server:
        result = await climb(OpenAiTarget(server.url), ["x"], plan)
    rung = result.rungs[0]
    assert rung.shed > 0, "100 a second of 0.2 s each do not fit 4 places"
    assert rung.finished > 0


async def test_the_climb_ends_where_too_many_fail() -> None:
    async with openai_server(room=4) as server:
        result = await climb(OpenAiTarget(server.url), ["x"], quick(2, 64, 128))
    assert [rung.level for rung in result.rungs] == [2, 64]
    assert "BOUND_REACHED" in result.rungs[1].errors
    assert "of the requests failed, mostly BOUND_REACHED" in result.ended


async def test_the_climb_ends_where_waiting_takes_too_long() -> None:
    plan = LadderPlan((1, 2), rung_s=0.3, warmup_s=0.0, max_tokens=2, first_token_max_s=0.01, drain_s=5.0)
    async with openai_server(token_s=0.05) as server:
        result = await climb(OpenAiTarget(server.url), ["x"], plan)
    assert len(result.rungs) == 1
    assert "for its first token" in result.ended


async def test_who_still_waits_when_the_time_is_over_counts_with_what_it_waited() -> None:
    plan = LadderPlan((4,), rung_s=0.2, warmup_s=0.0, max_tokens=1, drain_s=5.0)
    async with openai_server(token_s=1.0) as server:
        result = await climb(OpenAiTarget(server.url), ["x"], plan)
    [rung] = result.rungs
    assert (rung.waiting, rung.finished, rung.cut) == (4, 0, 0)
    assert 0 < rung.first_token.p50 <= rung.first_token.p99 < 1.0


async def test_what_does_not_end_is_cut_and_leaves_nothing() -> None:
    plan = LadderPlan((4, 8), rung_s=0.2, warmup_s=0.0, max_tokens=1000, drain_s=0.1)
    async with openai_server(token_s=0.05) as server:
        result = await climb(OpenAiTarget(server.url), ["x"], plan)
        assert result.rungs[0].cut == 4
        assert "no request ended" in result.ended


async def test_a_server_that_is_not_there_or_hangs_up() -> None:
    async with openai_server() as server:
        url = server.url
    with pytest.raises(UnavailableError):
        await climb(OpenAiTarget(url), ["x"], quick(1))
    async with openai_server(drops=True) as server:
        with pytest.raises(UnavailableError, match="failed"):
            await OpenAiTarget(server.url).ask("x", 8, lambda _: None)
        with pytest.raises(NotFoundError, match="404"):
            await OpenAiTarget(f"{server.url}/elsewhere").ask("x", 8, lambda _: None)
    for wrong in ("ftp://a", "http://", "http://a:99999", "nothing"):
        with pytest.raises(InvalidArgumentError, match="expected http://"):
            Address.of(wrong)


@pytest.mark.parametrize("streams", [True, False])
async def test_kserve_servers(streams: bool) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(kserve_server())
        to_server = await stack.enter_async_context(channel(server.address))
        target = KServeTarget([to_server], model="llama", streams=streams)
        result = await climb(target, ["one prompt"], quick(2))
        with pytest.raises(FabricError, match="fell over"):
            await target.ask("fail", 4, lambda _: None)
    rung = result.rungs[0]
    assert rung.errors == {}
    assert rung.finished > 0
    assert rung.tokens >= 8 * (rung.finished - 2)
    assert server.requests[0].model_name == "llama"


async def test_clients_of_another_engine_are_counted_while_a_rung_is_measured() -> None:
    async with openai_server() as server, openai_server(drops=True) as broken:
        async with Company(OpenAiTarget(server.url), ["x"], clients=3, max_tokens=8) as company:
            result = await climb(OpenAiTarget(server.url), ["y"], quick(1, 2), company=company)
            whole = company.done()
        async with Company(OpenAiTarget(broken.url), ["x"], clients=2, max_tokens=8) as company:
            useless = await climb(OpenAiTarget(server.url), ["y"], quick(1, 2), company=company)
    shares = [rung.company for rung in result.rungs if rung.company is not None]
    assert [(share.clients, share.errors) for share in shares] == [(3, {}), (3, {})]
    assert all(share.tokens >= 8 * (share.finished - 3) > 0 for share in shares)
    assert sum(share.tokens for share in shares) < whole.tokens, "what came before and between rungs counts for none"
    assert report.row(result.rungs[0])[-1] == f"{result.rungs[0].company_tokens_per_s:,.1f}"
    assert len(useless.rungs) == 1
    assert "the other engine's clients" in useless.ended
    assert useless.rungs[0].company is not None
    assert set(useless.rungs[0].company.errors) == {"PEER_UNREACHABLE"}
    assert report.row(useless.rungs[0])[-1].endswith(f", {useless.rungs[0].company.failed} failed")


def test_a_resident_engine_that_is_to_work_must_be_there() -> None:
    done = suite.run("engine", "ladder", "--broker", "127.0.0.1:1", "--resident-clients", "4")
    assert done.returncode == 2
    assert "no --resident engine" in done.stderr


def test_plans_that_cannot_be() -> None:
    for plan, field in (
        (LadderPlan(()), "rungs"),
        (LadderPlan((4, 2)), "rungs"),
        (LadderPlan((0.5,)), "rungs"),
        (LadderPlan((20_000,)), "rungs"),
        (LadderPlan((1,), mode="wild"), "mode"),
        (LadderPlan((1,), rung_s=float("nan")), "rung_s"),
        (LadderPlan((1,), max_tokens=0), "max_tokens"),
    ):
        with pytest.raises(InvalidArgumentError, match=field):
            plan.check()


def test_rungs_are_what_was_counted_in_time() -> None:
    tally = Tally(begin=10.0, end=12.0, finished=3, tokens=40)
    tally.errors["UNAVAILABLE"] += 1
    assert not tally.counts(12.0)
    rung = tally.rung(4)
    assert (rung.tokens_per_s, rung.requests_per_s, rung.error_share) == (20.0, 1.5, 0.25)
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert workload.read_prompts(path) == ["a", "b"]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InvalidArgumentError, match=r"prompts\[2\]"):
        workload.read_prompts(path)
    path.write_text("")
    with pytest.raises(InvalidArgumentError, match="holds none"):
        workload.read_prompts(path)
    with pytest.raises(NotFoundError):
        workload.read_prompts(tmp_path / "nowhere")
    assert len(set(workload.synthetic(64))) == 64


def test_charts_leave_out_what_has_no_place_on_their_axes() -> None:
    chart = Chart("a < b", "x", "y", x_log=True, y_log=True)
    chart.line("one", [(0, 1), (1, 10), (10, float("nan")), (100, 1000)])
    text = chart.svg()
    assert text.count("<circle") == 3, "two points and the legend"
    assert "a &lt; b" in text


@pytest.mark.e2e
@pytest.mark.timeout(450)
@pytest.mark.slow
def test_two_thousand_clients(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine, time_mode="real", slots=256, step_token_budget=1024, kv_pool_blocks=16_384)
    words = ["--rungs", "64,2000", "--rung-s", "5", "--warmup-s", "5", "-n", "4", "--no-evidence", "--json"]
    done = suite.run("engine", "ladder", str(engine), *words, within_s=200)
    assert done.returncode == 0, done.stderr
    rungs = json.loads(done.stdout)["alone"]["rungs"]
    assert [rung["level"] for rung in rungs] == [64, 2000]
    assert all(rung["finished"] > 0 and rung["errors"] == {} and rung["cut"] == 0 for rung in rungs), rungs


@pytest.mark.e2e
@pytest.mark.timeout(450)
def test_an_engine_alone_and_beside_one_that_works(tmp_path: Path) -> None:
    engine, other = tmp_path / "engine", tmp_path / "other"
    write_simulated_engine(engine, time_mode="real")
    write_simulated_engine(other, engine_id="resident", time_mode="real")
    done = suite.run(
        "engine", "ladder", str(engine), "--rungs", "1,8", "--rung-s", "1", "--warmup-s", "0.5", "-n", "4",
        "--resident", str(other), "--resident-clients", "2", "--html", str(tmp_path / "ladder.html"), "--json",
        within_s=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for name in ("alone", "beside a busy engine"):
        assert [rung["level"] for rung in said[name]["rungs"]] == [1, 8], said[name]["ended"]
        assert all(rung["finished"] > 0 for rung in said[name]["rungs"])
        assert all(rung["errors"] == {} for rung in said[name]["rungs"]), said
        assert all(rung["tokens"] >= 4 * (rung["finished"] - rung["level"]) for rung in said[name]["rungs"]), said
    assert [rung["company"] for rung in said["alone"]["rungs"]] == [None, None]
    for rung in said["beside a busy engine"]["rungs"]:
        company = rung["company"]
        assert (company["clients"], company["errors"]) == (2, {})
        assert company["tokens"] >= 4 * (company["finished"] - 2) > 0
        assert rung["company_tokens_per_s"] == company["tokens"] / rung["measured_s"]
    assert (tmp_path / "ladder.html").read_text().count("<svg") == 3
    assert len(list((tmp_path / "engine.evidence").glob("ladder-*.json"))) == 1


def test_the_command_measures_a_foreign_server_and_says_what_to_name() -> None:
    with running_openai() as url:
        done = suite.run("engine", "ladder", "--openai", url, "--rungs", "2", "--rung-s", "0.7", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["alone"]["rungs"][0]["finished"] > 0
    both: subprocess.CompletedProcess[str] = suite.run("engine", "ladder", "--openai", url, "--broker", "127.0.0.1:1")
    assert both.returncode == 2
    assert "name one thing to measure" in both.stderr
    gone = suite.run("engine", "ladder", "--openai", url, "--rungs", "1", "--rung-s", "0.1", "--warmup-s", "0")
    assert gone.returncode == 1
    assert f"{url} gives no answer" in gone.stderr


@contextmanager
def running_openai() -> Iterator[str]:
    """A server in a thread of its own, for commands that are waited for."""
    started, stop = threading.Event(), asyncio.Event()
    found: dict[str, object] = {}

    async def serve() -> None:
        async with openai_server() as server:
            found.update(url=server.url, loop=asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield str(found["url"])
    finally:
        found["loop"].call_soon_threadsafe(stop.set)  # type: ignore[attr-defined]
        thread.join(PATIENCE_S)


def test_reports_say_why_a_climb_ended() -> None:
    tally = Tally(begin=0.0, end=1.0, finished=1, tokens=10)
    ladder = Ladder("a server", LadderPlan((1, 2)), (tally.rung(1),), "at 1, it was enough")
    assert "ended early: at 1, it was enough" in report.summary({"alone": ladder})
    assert b"Ended early: at 1, it was enough." in report.page({"alone": ladder}, "ifab engine ladder")


def test_more_connections_than_the_system_allows_are_refused() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))\n"
        "from engines.targets.target import allow_connections\n"
        "allow_connections(100); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "try: allow_connections(1000)\nexcept Exception as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    soft, refusal = done.stdout.splitlines()
    assert soft == "228"
    assert refusal.startswith(ResourceExhaustedError.__name__)
    assert "1000 connections need 1128 open files, and the system allows 256" in refusal
