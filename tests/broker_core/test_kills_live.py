# SPDX-License-Identifier: Apache-2.0
"""Workers that die, hang or are cut off under a job, with real processes: nothing lost or doubled, nobody blamed."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest

from engines.simulated import KILL_PROCESS, RequestFault
from services.broker.work import Lane, WorkEnd
from services.common import reasons
from services.common.errors import FailedPreconditionError, UnavailableError
from tests.broker_core.conftest import SLOW
from tests.broker_core.made import RecordingSink, work
from tests.broker_core.tap import Tap
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.broker_core.conftest import Fleet

pytestmark = pytest.mark.e2e


async def _replace_the_dead(fleet: Fleet, enough: asyncio.Event, **engine: Any) -> None:
    """Starts a worker for each that has ended, as whoever runs workers would, until it is enough."""
    number = 0
    while not enough.is_set():
        for name, process in list(fleet.workers.items()):
            if process.process.poll() is not None:
                del fleet.workers[name]
                number += 1
                await fleet.start_worker(f"again{number}", **engine)
        await asyncio.sleep(0.02)


@pytest.mark.slow  # tests/chaos/test_poison.py does the same to a whole suite
async def test_a_row_that_kills_its_worker_is_quarantined_and_its_neighbours_finish(fleet: Callable[..., Any]) -> None:
    engine = {"request_faults": (RequestFault(KILL_PROCESS, "prompt_token", 300),), "time_mode": "real"}
    async with fleet() as made:
        for at in range(2):
            await made.start_worker(f"w{at}", **engine)
        await made.up("w0", "w1")
        digests = frozenset({made.digest()})
        neighbours = [work([at + 1, *range(7)], digests=digests) for at in range(60)]
        deadly = work([300, *range(7)], digests=digests)
        enough = asyncio.Event()
        keeper = asyncio.create_task(_replace_the_dead(made, enough, **engine))
        try:
            ends = await made.ended(made.submit([*neighbours[:30], deadly, *neighbours[30:]]), within_s=100)
        finally:
            enough.set()
            await keeper
        end = ends.pop(30)
        assert isinstance(end, FailedPreconditionError)
        assert end.reason == reasons.QUARANTINED
        assert all(isinstance(end, WorkEnd) for end in ends)
        assert made.broker.decision.requests.counters.quarantined == 1


async def test_a_worker_that_is_cut_off_loses_its_work_and_answers_to_nobody(fleet: Callable[..., Any]) -> None:
    async with Tap() as tap, fleet(silence_limit_s=3.0) as made:
        await made.start_worker("far", tap=tap, **SLOW)
        await made.start_worker("near", **SLOW)
        await made.up("far", "near")
        made.broker.cordon("near", True)
        works = made.works(4, max_tokens=120)
        stream = RecordingSink()
        works += made.works(1, max_tokens=120, lane=Lane.INTERACTIVE, stream=True, sink=stream, job="")
        await wait_until(lambda: len(stream.heard) > 2)
        made.broker.cordon("near", False)
        tap.mute()  # the sockets stay open, and nothing comes through any more
        ends = await made.ended(works)
        assert isinstance(ends.pop(), UnavailableError), "a started stream is not begun again"
        assert all(isinstance(end, WorkEnd) and end.node_id == "near" and end.attempts == 2 for end in ends)


@pytest.mark.slow
async def test_fifty_kills_and_hangs_through_ten_thousand_rows(fleet: Callable[..., Any]) -> None:
    chance, rows, kills = random.Random(5), 10_000, 50
    engine = {"time_mode": "real", "step_us": 30_000}
    async with fleet(silence_limit_s=4.0) as made:
        for at in range(3):
            await made.start_worker(f"w{at}", **engine)
        await made.up("w0", "w1", "w2")
        digests = frozenset({made.digest()})
        prompts = [[*range(at % 40, at % 40 + 32), at % 250, at // 250] for at in range(rows)]
        works = made.submit([work(prompt, max_tokens=8, digests=digests) for prompt in prompts])
        for kill in range(kills):
            await made.ended_at_least(rows * kill // (kills + 10), works)
            victim = chance.choice(sorted(made.workers))
            process = made.workers.pop(victim)
            process.signal(signal.SIGKILL if kill % 5 else signal.SIGSTOP)
            await made.start_worker(f"n{kill}", **engine)
        ends = await made.ended(works, within_s=120)
        simulation = made.simulation()
        for prompt, end in zip(prompts, ends, strict=True):
            assert isinstance(end, WorkEnd)
            assert end.samples[0].tokens.tolist() == simulation.tokens(prompt, 8)
        counters = made.broker.decision.requests.counters
        assert counters.quarantined == 0
        assert counters.lost_attempts > 0
        report = made.broker.end_job("j")
        assert report.reattempts == sum(end.attempts - 1 for end in ends)
