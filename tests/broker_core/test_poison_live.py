# SPDX-License-Identifier: Apache-2.0
"""A live request that brings every engine to a stand, with real worker processes whose streams go on answering."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from engines.simulated import SLOW_STEP, RequestFault
from services.broker.work import Lane, WorkEnd
from services.common import reasons
from services.common.errors import FailedPreconditionError
from tests.broker_core.made import RecordingSink, work
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.e2e

STANDS_MS = 2_500


def _workers(made: Any) -> list[Any]:
    return list(made.broker.decision.scheduler.workers.values())


@pytest.mark.parametrize("to_the_end", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_an_engine_that_stands_still_gets_nothing_until_it_moves(
    fleet: Callable[..., Any], to_the_end: bool
) -> None:
    """Its stream answers all the while: were it taken for one that serves, everybody new would go there and be lost."""
    engine = {
        "request_faults": (RequestFault(SLOW_STEP, "prompt_token", 300, STANDS_MS),),
        "time_mode": "real", "step_us": 2_000, "longest_step_ms": 100,
    }  # fmt: skip
    async with fleet(silence_limit_s=1.0) as made:
        for name in ("w0", "w1"):
            await made.start_worker(name, **engine)
        await made.up("w0", "w1")
        digests = frozenset({made.digest()})

        def live(ids: list[int]) -> Any:
            sink = RecordingSink(takes_back=True)
            return work([*ids, *range(7)], digests=digests, lane=Lane.INTERACTIVE, job="", sink=sink)

        beside = [live([at + 1]) for at in range(40)]
        bad = live([300])
        made.submit([*beside[:20], bad, *beside[20:]])
        await wait_until(lambda: any(worker.standing for worker in _workers(made)), what="a stall shows")
        later: list[Any] = []
        while not bad.sink.ends and (to_the_end or len(later) < 8):
            standing = [worker for worker in _workers(made) if worker.standing]
            assert not any(worker.outstanding for worker in standing)
            later += made.submit([live([len(later) % 200 + 50])])
            await asyncio.sleep(0.05)
        if to_the_end:
            assert isinstance(bad.sink.end, FailedPreconditionError)
            assert bad.sink.end.reason == reasons.QUARANTINED
        else:
            made.broker.cancel([bad.key])
        ends = await made.ended([*beside, *later])
        assert all(isinstance(end, WorkEnd) for end in ends)
        assert made.broker.decision.requests.counters.quarantined == to_the_end
