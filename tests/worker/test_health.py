# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

from services.worker.health import SLACK_S, Progress
from services.worker.native import Stats

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
