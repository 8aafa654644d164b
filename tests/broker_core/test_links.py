# SPDX-License-Identifier: Apache-2.0
"""What a link does with a worker that misbehaves, or only seems to: it ends alone, and nothing else with it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from ifabric.worker.v1 import worker_service_pb2 as wire
from services.broker.work import WorkEnd
from services.common import reasons
from services.common.errors import FailedPreconditionError
from tests.broker_core.conftest import SLOW
from tests.broker_core.made import RecordingSink, work
from tests.broker_core.tap import Tap
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.work import Work
    from services.broker.work import WorkEnd as End

pytestmark = pytest.mark.e2e


class _Garbler:
    """Cuts a byte off the tokens of the first messages that bring ends: no whole number of ids is left."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, message: bytes) -> bytes:
        response = wire.ExecuteResponse.FromString(message)
        if not self.left or not response.finished:
            return message
        self.left -= 1
        for item in response.finished:
            for sample in item.samples:
                sample.token_ids = sample.token_ids[:-1]
        return response.SerializeToString()


async def test_a_worker_that_sends_garbage_costs_its_own_stream_and_nothing_else(fleet: Callable[..., Any]) -> None:
    async with Tap() as tap, fleet() as made:
        tap.bend = garbler = _Garbler(1)
        await made.start_worker("bent", tap=tap)
        await made.start_worker("straight")
        await made.up("bent", "straight")
        works = made.works(200, max_tokens=8)
        ends = await made.ended(works)
        assert garbler.left == 0, "the garbage was sent"
        assert all(isinstance(end, WorkEnd) for end in ends)
        assert any(end.attempts == 2 for end in ends)
        assert made.broker.decision.requests.counters.quarantined == 0
        assert not made.failures
        await made.up("bent", "straight")  # it is given another chance


async def test_a_request_that_cannot_be_sent_ends_alone(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        await made.start_worker("w1")
        await made.up("w1")
        good = [work([at + 1] * 9, digests=frozenset({made.digest()})) for at in range(20)]
        poison = work([99] * 9, digests=frozenset({made.digest()}))
        poison.stop_token_ids = (1 << 40,)  # no field of the wire takes it
        ends = await made.ended(made.submit([*good[:10], poison, *good[10:]]))
        end = ends.pop(10)
        assert isinstance(end, FailedPreconditionError)
        assert end.reason == reasons.QUARANTINED
        assert all(isinstance(end, WorkEnd) for end in ends)
        assert not made.failures


class _Raising(RecordingSink):
    """A sink that breaks its promise."""

    def finished(self, work: Work, end: End) -> None:
        super().finished(work, end)
        raise RuntimeError("a fault in the front door")


async def test_a_sink_that_raises_costs_nobody_else_the_end(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        await made.start_worker("w1")
        await made.up("w1")
        digests = frozenset({made.digest()})
        sinks = [_Raising() if at % 2 else RecordingSink() for at in range(10)]
        works = made.submit([work([at + 1] * 9, sink=sink, digests=digests) for at, sink in enumerate(sinks)])
        assert all(isinstance(end, WorkEnd) for end in await made.ended(works))
        assert not made.failures


async def test_a_slow_worker_is_left_its_time_where_nobody_else_could_take_the_work(fleet: Callable[..., Any]) -> None:
    async with fleet(silence_limit_s=2.0) as made:
        # A step takes 24 times what its contract allows: the stream answers, the engine makes no progress.
        await made.start_worker("slow", time_mode="real", step_us=2_400_000, longest_step_ms=100)
        await made.up("slow")
        ends = await made.ended(made.works(3, max_tokens=1))
        assert all(isinstance(end, WorkEnd) and end.attempts == 1 for end in ends)
        assert made.broker.decision.requests.counters.lost_attempts == 0


async def test_the_silence_of_an_only_worker_makes_nobody_suspect(fleet: Callable[..., Any]) -> None:
    async with fleet(silence_limit_s=1.2) as made:
        only = await made.start_worker("only", **SLOW)
        await made.up("only")
        works = made.works(8, max_tokens=60)
        await wait_until(lambda: made.outstanding("only") == 8)
        only.signal(signal.SIGSTOP)
        await wait_until(lambda: made.broker.decision.requests.counters.lost_attempts == 8)
        only.signal(signal.SIGCONT)
        ends = await made.ended(works)
        assert all(isinstance(end, WorkEnd) and end.attempts >= 2 for end in ends)
        entries_apart = len(made.broker.decision.scheduler.suspects)
        assert entries_apart == made.broker.decision.requests.counters.quarantined == 0
