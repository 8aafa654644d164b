# SPDX-License-Identifier: Apache-2.0
"""One live call that ends every engine it meets, while others are served: all through the whole suite."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from engines.simulated import KILL_PROCESS, RequestFault
from services.common import reasons
from services.common.errors import FabricError, FailedPreconditionError
from tests.chaos.client import client_of, request
from tests.chaos.metrics import scraped
from tests.jobs.running import Fabric

if TYPE_CHECKING:
    from pathlib import Path

    from tests.jobs.running import Service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

SPECIAL = 500
WITHIN_S = 100.0


async def _keep(workers: list[Service], enough: asyncio.Event) -> int:
    """Starts each worker again that has ended, as whoever runs workers would; returns how many had."""
    ended = 0
    while not enough.is_set():
        for worker in workers:
            if worker.process is not None and worker.process.process.poll() is not None:
                ended += 1
                worker.kill()  # it has ended; this lets go of its pipes
                await asyncio.to_thread(worker.start)
        await asyncio.sleep(0.02)
    return ended


async def test_live_calls_and_rows_outlive_a_live_call_that_ends_its_workers(tmp_path: Path) -> None:
    engine = {
        "request_faults": (RequestFault(KILL_PROCESS, "prompt_token", SPECIAL),),
        "step_us": 10_000, "slots": 64,
    }  # fmt: skip
    with Fabric(tmp_path, engine=engine, broker={"bulk_linger_s": 0}) as fabric:
        fabric.start()
        enough = asyncio.Event()
        keeper = asyncio.create_task(_keep(fabric.workers, enough))
        async with client_of(fabric) as client:
            good = [asyncio.create_task(client.one(request("", [1, 2, at], 30), within_s=WITHIN_S)) for at in range(12)]
            rows = asyncio.create_task(
                client.exchange([request(f"r{at}", [3, 4, at], 30) for at in range(12)], within_s=WITHIN_S)
            )
            bad = asyncio.create_task(client.one(request("", [SPECIAL, 5], 2), within_s=WITHIN_S))
            later = [asyncio.create_task(client.one(request("", [6, 7, at], 30), within_s=WITHIN_S)) for at in range(4)]
            ends = await asyncio.gather(*good, *later, bad, return_exceptions=True)
            error = ends.pop()
            assert isinstance(error, FailedPreconditionError), error
            assert error.reason == reasons.QUARANTINED
            assert [end for end in ends if isinstance(end, BaseException)] == []
            outcomes = await rows
            assert [only for (only,) in outcomes.values() if isinstance(only, FabricError)] == []
            assert len(outcomes) == 12
        enough.set()
        assert 2 <= await keeper <= 5
        assert scraped(fabric.brokers[0], "ifabric_broker_quarantined_total") == 1
