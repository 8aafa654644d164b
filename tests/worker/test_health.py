# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING

import pytest

from engines.simulated import RequestFault
from services.common.rpc import channel
from services.worker.health import SLACK_S, Health, Progress
from services.worker.native import Stats
from tests.worker.made import work
from tests.worker.peers import Broker, health, health_over
from tests.worker.running import Running, running

if TYPE_CHECKING:
    from pathlib import Path

PERIOD_S = 0.25
HOUR_S = 3600.0


def stats(*, tick: int, queued: int = 0, active: int = 0, failed: bool = False) -> Stats:
    fields = {field.name: 0 for field in dataclasses.fields(Stats)}
    changed = {"progress_tick": tick, "queued": queued, "active": active, "engine_failed": failed}
    return Stats(**{**fields, **changed, "step_us": (), "step_fill": (), "held_back": False})  # type: ignore[arg-type]


class Watch:
    """Feeds readings at the pulse's pace, by a clock of its own."""

    def __init__(self, longest_step_ms: int) -> None:
        self.progress = Progress(longest_step_ms)
        self.now_s = 1000.0

    def read(self, reading: Stats, *, for_s: float, poll_age_s: float = 0.0) -> str | None:
        """Returns the verdict after the same reading for a while."""
        verdict = None
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += PERIOD_S
            verdict = self.progress.observe(reading, poll_age_s=poll_age_s, now_s=self.now_s, period_s=PERIOD_S)
        return verdict


def test_idle_for_an_hour_is_healthy() -> None:
    watch = Watch(longest_step_ms=1000)
    assert watch.read(stats(tick=7), for_s=HOUR_S) is None


def test_work_after_an_idle_hour_has_its_whole_time() -> None:
    watch = Watch(longest_step_ms=1000)
    watch.read(stats(tick=7), for_s=HOUR_S)
    assert watch.read(stats(tick=7, queued=1), for_s=1.0 + SLACK_S - PERIOD_S) is None


def test_one_long_step_within_its_bound_is_healthy_and_beyond_it_is_not() -> None:
    watch = Watch(longest_step_ms=60_000)
    assert watch.read(stats(tick=7, active=4), for_s=60.0) is None
    verdict = watch.read(stats(tick=7, active=4), for_s=SLACK_S + 2 * PERIOD_S)
    assert verdict is not None
    assert "4 active" in verdict
    assert "65 s" in verdict


def test_what_moves_again_is_healthy_again() -> None:
    watch = Watch(longest_step_ms=1000)
    assert watch.read(stats(tick=7, queued=3), for_s=20.0) is not None
    assert watch.read(stats(tick=8, queued=3), for_s=PERIOD_S) is None


def test_slow_but_steady_progress_is_healthy() -> None:
    watch = Watch(longest_step_ms=1000)
    for tick in range(100):
        assert watch.read(stats(tick=tick, active=1), for_s=5.0) is None


def test_time_in_which_the_process_itself_stood_is_not_held_against_the_engine() -> None:
    watch = Watch(longest_step_ms=1000)
    watch.read(stats(tick=7, active=1), for_s=1.0)
    watch.now_s += HOUR_S
    assert watch.read(stats(tick=7, active=1), for_s=PERIOD_S) is None


def test_a_poll_that_does_not_come_back_is_a_stall_even_without_work() -> None:
    watch = Watch(longest_step_ms=1000)
    verdict = watch.read(stats(tick=7), for_s=PERIOD_S, poll_age_s=30.0)
    assert verdict is not None
    assert "poll" in verdict


def test_a_failed_engine_is_not_healthy() -> None:
    assert Watch(longest_step_ms=1000).read(stats(tick=7, failed=True), for_s=PERIOD_S) is not None


# ---- over a real engine and a real server, by a clock that runs SPEED times as fast as time ----

SPEED = 60.0
BEAT_S = 2.0
"""Between readings, by that clock; of a longer time between two, only twice that is held against an engine, so that
readings of a busy machine count the less."""
NAMES = ("", "ifabric.worker.v1.WorkerService", "engine/simulated-test")


class Clocked:
    """The worker's pulse over what a server publishes, its clock given."""

    def __init__(self, made: Running, longest_step_ms: int) -> None:
        self.made = made
        self.progress = Progress(longest_step_ms)
        self.health = Health(made.server)

    async def start(self) -> None:
        await self.health.name_engine("simulated-test")
        await self.health.set("load", None)

    async def beat(self, now_s: float) -> Stats:
        host = self.made.host
        reading = host.stats()
        against = self.progress.observe(reading, poll_age_s=host.poll_age_s, now_s=now_s, period_s=BEAT_S)
        await self.health.set("progress", against)
        return reading

    async def ask(self) -> set[str]:
        """What a client hears now, over all names."""
        return {await health(self.made.address, name) for name in NAMES}

    async def heard_through_a_step(self, digest: str) -> set[str]:
        """All that a client hears while one step of 60 s runs."""
        heard: set[str] = set()
        async with Broker(self.made.address, digest) as broker, channel(self.made.address) as near:
            await broker.dispatch(work(1, [SLOW], max_tokens=1))
            ended = asyncio.ensure_future(broker.finish_of(1))
            while not ended.done():
                reading = await self.beat(time.monotonic() * SPEED)
                if reading.queued + reading.active:
                    heard.add(await health_over(near, NAMES[-1]))
                await asyncio.wait([ended], timeout=BEAT_S / SPEED)
            await ended
        return heard


SLOW = 500
SLOW_STEP = (RequestFault("slow_step", "prompt_token", SLOW, int(60_000 / SPEED)),)
"""A step of 60 s by the clock of these tests; the fault itself knows no time scale."""


async def test_a_client_hears_serving_while_the_engine_is_idle_for_an_hour(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        clocked = Clocked(made, longest_step_ms=1000)
        await clocked.start()
        for beat in range(int(HOUR_S / BEAT_S)):
            await clocked.beat(1000.0 + beat * BEAT_S)
            if beat % 300 == 0:
                assert await clocked.ask() == {"SERVING"}, f"after {beat * BEAT_S:.0f} s"
        assert await clocked.ask() == {"SERVING"}
        async with Broker(made.address, made.digest) as broker:
            await broker.dispatch(work(1))
            await broker.finish_of(1)


@pytest.mark.parametrize(("longest_step_ms", "expected"), [(90_000, {"SERVING"}), (10_000, {"SERVING", "NOT_SERVING"})])
async def test_a_client_hears_serving_through_one_step_of_60_s_that_the_contract_allows(
    tmp_path: Path, longest_step_ms: int, expected: set[str]
) -> None:
    """To a contract that allows 10 s the same step is a stall, until it ends."""
    async with running(tmp_path, longest_step_ms=longest_step_ms, request_faults=SLOW_STEP) as made:
        clocked = Clocked(made, longest_step_ms)
        await clocked.start()
        assert await clocked.heard_through_a_step(made.digest) == expected
        await clocked.beat(time.monotonic() * SPEED)
        assert await clocked.ask() == {"SERVING"}
