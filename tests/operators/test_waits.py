# SPDX-License-Identifier: Apache-2.0
"""Who sends rows to be analyzed slowly holds up others for so long and no longer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ifabric.broker.v1 import operator_service_pb2 as pb
from services.broker.operators.estimate import Waits
from services.common.errors import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def _dawdling(pause_s: float) -> AsyncIterator[pb.AnalyzeRowsRequest]:
    while True:
        await asyncio.sleep(pause_s)  # what the client does, not what the test waits for
        yield pb.AnalyzeRowsRequest()


async def _all(waits: Waits, messages: AsyncIterator[pb.AnalyzeRowsRequest]) -> int:
    taken = 0
    while await waits.next(messages) is not None:
        taken += 1
    return taken


async def test_who_sends_nothing_is_told_so() -> None:
    with pytest.raises(DeadlineExceededError, match=r"no rows came for 0\.05 s"):
        await _all(Waits(silence_s=0.05, all_s=60), _dawdling(30))


async def test_who_dawdles_is_told_when_it_was_enough() -> None:
    with pytest.raises(DeadlineExceededError, match=r"rows were waited for 0\.2 s in all, .*analyze a part of them"):
        await _all(Waits(silence_s=30, all_s=0.2), _dawdling(0.01))


async def test_what_comes_at_once_is_taken_to_its_end() -> None:
    async def quick() -> AsyncIterator[pb.AnalyzeRowsRequest]:
        for _ in range(1_000):
            yield pb.AnalyzeRowsRequest()

    assert await _all(Waits(), quick()) == 1_000
