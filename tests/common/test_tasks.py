# SPDX-License-Identifier: Apache-2.0
"""Background tasks and delays between attempts."""

from __future__ import annotations

import asyncio

from services.common.backoff import Backoff
from services.common.tasks import Tasks
from tests.support.logged import captured_logs


async def test_a_task_that_fails_is_told_once_and_logged() -> None:
    told: list[str] = []
    tasks = Tasks(told.append)

    async def fail() -> None:
        raise LookupError("as asked")

    with captured_logs() as lines:
        await asyncio.wait([tasks.start(fail(), name="doomed")])
        await asyncio.sleep(0)
    assert told == ["the task doomed failed: LookupError"]
    (line,) = lines.all("task.failed")
    assert line["task"] == "doomed"


async def test_ending_ends_the_tasks_and_waits_for_their_clean_up() -> None:
    told: list[str] = []
    tasks, cleaned, running = Tasks(told.append), [], asyncio.Event()

    async def work() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    tasks.start(work(), name="endless")
    tasks.start(asyncio.sleep(0), name="short")
    await running.wait()
    await tasks.close()
    assert cleaned == ["yes"]
    assert told == []


def test_delays_double_to_a_limit_and_start_over() -> None:
    backoff = Backoff(first_s=0.1, most_s=0.5)
    for step in (0.1, 0.2, 0.4, 0.5, 0.5):
        assert step / 2 <= backoff.next_s() <= step
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_delays_of_peers_differ() -> None:
    assert len({Backoff(first_s=1.0).next_s() for _ in range(20)}) > 1
