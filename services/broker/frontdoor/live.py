# SPDX-License-Identifier: Apache-2.0
"""One live call: somebody waits for this answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2
from services.broker.frontdoor.records import Clock
from services.broker.frontdoor.transcript import OutputSink
from services.broker.work import Lane
from services.common.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from services.broker.frontdoor.intake import Plan
    from services.broker.frontdoor.records import Records
    from services.broker.work import Core, Work, WorkEnd


class LiveCall(OutputSink):
    """Runs one plan and hands its output to one caller.

    Args:
        plan: The request.
        core: Runs it.
        records: Told when it has ended.
    """

    __slots__ = ("_clock", "_digest", "_end", "_gone", "_lane", "_news", "_plan", "_records", "_work")

    def __init__(self, plan: Plan, core: Core, records: Records) -> None:
        super().__init__(plan, core)
        self._plan = plan
        self._records = records
        self._clock = Clock()
        self._lane = plan.lane or Lane.INTERACTIVE
        self._news = asyncio.Event()
        self._digest = ""
        self._end: WorkEnd | FabricError | None = None
        self._gone = False
        self._work: Work | None = None

    def submit(self, *, stream: bool, traceparent: str) -> None:
        """Hands the work to the core.

        Raises:
            FabricError: the core refused it.
        """
        self._work = self._plan.work(self, lane=self._lane, stream_tokens=stream, traceparent=traceparent)
        (refused,) = self._core.submit([self._work])
        if refused is not None:
            raise refused

    def leave(self) -> None:
        """The caller is gone, or has all it wanted: nothing is computed for it any longer."""
        if self._end is None and self._work is not None:
            self._gone = True
            self._core.cancel([self._work.key])

    async def result(self) -> broker_service_pb2.GenerationResult:
        """Waits for the answer.

        Raises:
            FabricError: it failed.
        """
        while self._end is None:
            await self._next_news()
        return self._result(self._end)

    async def events(self) -> AsyncGenerator[broker_service_pb2.GenerateStreamResponse]:
        """The messages of GenerateStream, numbered.

        A caller that reads slowly gets fewer, larger deltas; what is unsent never exceeds what `max_tokens` allows.

        Raises:
            FabricError: it failed; output that was there before has been sent.
        """
        number = 0
        while not self._digest and self._end is None:
            await self._next_news()
        if self._digest or not isinstance(self._end, FabricError):
            yield broker_service_pb2.GenerateStreamResponse(sequence_number=number, started=self._started())
        while True:
            end = self._end
            if end is None or isinstance(end, FabricError):
                for delta in self.transcript.take_deltas():
                    number += 1
                    yield broker_service_pb2.GenerateStreamResponse(sequence_number=number, delta=delta)
            if end is not None:
                break
            await self._next_news()
        yield broker_service_pb2.GenerateStreamResponse(sequence_number=number + 1, finished=self._result(end))

    def started(self, work: Work, engine_digest: str) -> None:
        """See `Sink`."""
        self._digest = engine_digest
        self._clock.mark_started()
        self._news.set()

    def on_output(self) -> None:
        """See `OutputSink`."""
        self._clock.mark_output()
        self._news.set()

    def finished(self, work: Work, end: WorkEnd) -> None:
        """See `Sink`."""
        self._digest = self._digest or end.engine_digest
        self._ended(end)

    def failed(self, work: Work, error: FabricError) -> None:
        """See `Sink`."""
        self._ended(error)

    def _ended(self, end: WorkEnd | FabricError) -> None:
        self._end = end
        self._records.live_ended(
            self._clock, self._plan, self._lane, end, gone=self._gone, early=self.ended_early,
            traceparent="" if self._work is None else self._work.traceparent,
        )  # fmt: skip
        self._news.set()

    async def _next_news(self) -> None:
        await self._news.wait()
        self._news.clear()

    def _started(self) -> broker_service_pb2.Started:
        return broker_service_pb2.Started(
            request_id=self._plan.request_id, engine_digest=self._digest, prompt_tokens=self._plan.prompt_tokens
        )

    def _result(self, end: WorkEnd | FabricError) -> broker_service_pb2.GenerationResult:
        if isinstance(end, FabricError):
            raise end
        result = broker_service_pb2.GenerationResult()
        self.transcript.write_result(end, result)
        return result
