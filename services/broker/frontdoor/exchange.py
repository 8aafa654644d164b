# SPDX-License-Identifier: Apache-2.0
"""One batched stream: many requests in, many results out.

**Windows.** A stream is not read further while the prompts that it has in the core, or the results that its client has
not taken, reach a bound; gRPC's flow control then stops the client. In the second case its job is paused in the core
too. So a client that does not read stops itself and nobody else: what the broker holds for it is bounded, and so is
the share of the core's room that its waiting rows take from others.

Where the core itself has no room, a bulk row waits at the door in the same way, and an interactive one fails
RESOURCE_EXHAUSTED at once: somebody waits for it, and may try elsewhere. Cancellations that a client writes after rows
that wait are read after them; `CancelRequests` is never held up.

**Outbox.** Results are kept as the core gave them and become messages only when the client can take one. Deltas of one
row that the client has not taken yet grow together, and end up in its result if it ends first.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2
from services.broker.frontdoor.intake import LANES
from services.broker.frontdoor.rules import check_open
from services.broker.frontdoor.transcript import ROW_BYTES, OutputSink
from services.broker.work import Lane
from services.common import reasons
from services.common.errors import (
    AlreadyExistsError,
    FabricError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
    to_status,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from services.broker.frontdoor.intake import Intake, Plan
    from services.broker.frontdoor.records import Records
    from services.broker.work import Core, Work, WorkEnd

CHUNK = 256
"""Requests that are planned in one go, before other streams get their turn on the event loop."""
MESSAGE_ROWS = 256
"""Most results, and most rows with deltas, in one message; more buys little (`make bench-wire`)."""
MESSAGE_BYTES = 1024 * 1024
"""A message is sent once it may have this size: a quarter of what gRPC clients take by default."""
ROW_TOKENS = 64
"""A shorter prompt counts as so many tokens: what a row keeps in memory beside its prompt."""
_ENVELOPE_BYTES = 1024
"""Of a message, what is not its one result."""
_RETRY_S = 0.05
"""How long to wait for room in the core where it does not say."""
_RETRY_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """Bounds of one stream."""

    prompt_tokens: int
    """Prompt tokens that a stream may have in the core, ended rows not counted; a row counts as at least
    `ROW_TOKENS`."""
    message_bytes: int
    """Longest message that the server sends, in bytes."""
    result_bytes: int
    """Results that the client has not taken, in bytes, at which the stream stops."""
    room_patience_s: float
    """Longest time that a bulk row waits at the door while the core takes none of its stream, in seconds."""


class Row(OutputSink):
    """One request of a stream, from its acceptance to its result's sending."""

    __slots__ = ("_stream", "key", "lane", "tokens_held", "traceparent")

    def __init__(self, plan: Plan, stream: ExchangeStream) -> None:
        super().__init__(plan, stream.core)
        self._stream = stream
        self.key = (plan.tenant, plan.request_id)
        self.lane = plan.lane or stream.lane
        self.tokens_held = max(plan.prompt_tokens, ROW_TOKENS)
        self.traceparent = ""
        """Of its own trace, where it has failed or somebody wanted one."""

    def started(self, work: Work, engine_digest: str) -> None:
        """See `Sink`; a batched stream does not tell its client."""

    def on_output(self) -> None:
        """See `OutputSink`."""
        self._stream.row_has_output(self)

    def finished(self, work: Work, end: WorkEnd) -> None:
        """See `Sink`."""
        self._stream.row_ended(self, end)

    def failed(self, work: Work, error: FabricError) -> None:
        """See `Sink`."""
        self.traceparent = work.traceparent
        self._stream.row_ended(self, error)


@dataclass(slots=True)
class _Ended:
    """A result that waits to be sent."""

    request_id: str
    row: Row | None
    """None where the request never became one."""
    end: WorkEnd | FabricError
    weight: int
    """About how many bytes it keeps in memory."""


class ExchangeStream:
    """One Exchange call.

    Args:
        opened: How the client wants to be served.
        core: Runs the rows.
        intake: Plans them.
        records: Told what became of them.
        limits: Bounds.

    Raises:
        InvalidArgumentError: `opened` is out of range.
    """

    def __init__(
        self,
        opened: broker_service_pb2.ExchangeOpen,
        *,
        core: Core,
        intake: Intake,
        records: Records,
        limits: ExchangeLimits,
    ) -> None:
        violations = check_open(opened.job_id, opened.lane)
        if violations:
            raise InvalidArgumentError.of(violations)
        self.core = core
        self.lane = Lane(opened.lane or Lane.BULK)
        self._intake = intake
        self._records = records
        self._limits = limits
        self._deltas = opened.stream_deltas
        self._job_id = opened.job_id
        self._job = f"{opened.job_id or 'stream'}/{uuid.uuid4().hex[:12]}"
        """What the core knows the stream by: two streams may have one name."""
        self._rows: dict[str, Row] = {}
        """By request id alone, whatever the tenant: that is all that a result carries."""
        self._outbox: deque[_Ended] = deque()
        self._fresh: dict[Row, None] = {}
        """Rows with output that no message has carried, in the order in which it came."""
        self._tokens_held = 0
        self._bytes_held = 0
        self._paused = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._draining = False
        self._input_ended = False
        self._closed = False
        self._requests = 0
        self._failed = 0
        self._first_at: float | None = None
        self._last_at = 0.0

    async def responses(
        self, messages: AsyncIterator[broker_service_pb2.ExchangeRequest], first: broker_service_pb2.ExchangeRequest
    ) -> AsyncGenerator[broker_service_pb2.ExchangeResponse]:
        """Runs the stream: yields its responses, the report last.

        Args:
            messages: What the client sends after the first message.
            first: The message that opened the stream.

        Raises:
            InvalidArgumentError: the client opened the stream twice.
            UnavailableError: the broker drains, and every row that it had taken has ended and been sent.
        """
        reader = asyncio.create_task(self._read(messages, first))
        reader.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                while self._outbox or self._fresh:
                    response, weight = self._message()
                    yield response
                    self._sent(weight)
                if reader.done():
                    reader.result()
                if not self._rows:
                    if self._input_ended:
                        break
                    if self._draining:
                        raise draining()
                await self._news.wait()
                self._news.clear()
            self._closed = True
            yield broker_service_pb2.ExchangeResponse(report=self._report(complete=True))
        finally:
            reader.cancel()
            if not self._closed:
                self._abandon()
            await asyncio.gather(reader, return_exceptions=True)

    def drain(self) -> None:
        """Takes nothing more in; the stream ends once its rows have."""
        self._draining = True
        self._news.set()

    def row_has_output(self, row: Row) -> None:
        """A row has something new to send."""
        if self._deltas and not self._closed:
            self._fresh[row] = None
            self._news.set()

    def row_ended(self, row: Row, end: WorkEnd | FabricError) -> None:
        """The core is done with a row."""
        del self._rows[row.key[1]]
        self._tokens_held -= row.tokens_held
        self._room.set()
        self._fresh.pop(row, None)
        weight = _weight(end) if isinstance(end, FabricError) else row.transcript.weight(end)
        self._end(_Ended(row.transcript.request_id, row, end, weight), row.key[0], row.lane)

    async def _read(
        self, messages: AsyncIterator[broker_service_pb2.ExchangeRequest], first: broker_service_pb2.ExchangeRequest
    ) -> None:
        await self._take_message(first)
        async for message in messages:
            if message.HasField("open"):
                raise InvalidArgumentError.of([Violation("open", "is set again; only the first message carries it")])
            await self._take_message(message)
        self._input_ended = True

    async def _take_message(self, message: broker_service_pb2.ExchangeRequest) -> None:
        requests = message.requests
        for start in range(0, len(requests), CHUNK):
            await self._window_has_room()
            await self._take(requests[start : start + CHUNK])
            await asyncio.sleep(0)
        if message.cancel_request_ids:
            wanted = (self._rows.get(request_id) for request_id in message.cancel_request_ids)
            self.core.cancel([row.key for row in wanted if row is not None])

    async def _take(self, requests: Sequence[broker_service_pb2.GenerationRequest]) -> None:
        """Plans requests and hands them to the core, in order, as window and core let them through."""
        self._requests += len(requests)
        if self._first_at is None:
            self._first_at = time.monotonic()
        waiting: deque[Work] = deque()
        for request, plan in zip(requests, await self._intake.plan(requests), strict=True):
            if isinstance(plan, FabricError):
                self._refuse(request.request_id, request.tenant, request.lane, plan)
            else:
                row = Row(plan, self)
                waiting.append(plan.work(row, lane=self.lane, stream_tokens=self._deltas, job=self._job))
        accepted_at = time.monotonic()
        while waiting:
            await self._window_has_room()
            batch = self._next_batch(waiting)
            retry = self._submit(batch)
            if len(retry) < len(batch):
                accepted_at = time.monotonic()
            if not retry:
                continue
            if time.monotonic() - accepted_at > self._limits.room_patience_s:
                for work, error in retry:
                    self._refuse(work.key[1], work.key[0], work.lane, error)
            else:
                waiting.extendleft(work for work, _ in reversed(retry))
                await asyncio.sleep(min(retry[0][1].retry_after_s or _RETRY_S, _RETRY_MAX_S))

    def _next_batch(self, waiting: deque[Work]) -> list[Work]:
        """Takes from `waiting` what the window has room for; at least one."""
        batch: list[Work] = []
        held = self._tokens_held
        while waiting and (not batch or held < self._limits.prompt_tokens):
            batch.append(waiting.popleft())
            held += _row(batch[-1]).tokens_held
        return batch

    def _submit(self, batch: list[Work]) -> list[tuple[Work, FabricError]]:
        """Hands work to the core; returns what should wait for room there."""
        retry: list[tuple[Work, FabricError]] = []
        own: list[Work] = []
        for work in batch:
            # Known before it is handed in, since it may end at once; a repeated id must not displace its first row.
            if self._rows.setdefault(work.key[1], _row(work)) is _row(work):
                self._tokens_held += _row(work).tokens_held
                own.append(work)
            else:
                again = AlreadyExistsError(f"request_id {work.key[1]!r} is in flight on this stream")
                self._refuse(work.key[1], work.key[0], work.lane, again)
        for work, refused in zip(own, self._refusals(own), strict=True):
            if refused is None:
                continue
            del self._rows[work.key[1]]
            self._tokens_held -= _row(work).tokens_held
            if isinstance(refused, ResourceExhaustedError) and work.lane is Lane.BULK:
                retry.append((work, refused))
            else:
                self._refuse(work.key[1], work.key[0], work.lane, refused)
        return retry

    def _refusals(self, batch: list[Work]) -> list[FabricError | None]:
        return [draining() for _ in batch] if self._draining else self.core.submit(batch)

    def _refuse(self, request_id: str, tenant: str, lane: int, error: FabricError) -> None:
        """A request ends before it became a row."""
        self._end(_Ended(request_id, None, error, _weight(error)), tenant, LANES.get(lane, self.lane))

    def _end(self, ended: _Ended, tenant: str, lane: Lane) -> None:
        self._last_at = time.monotonic()
        if isinstance(ended.end, FabricError):
            self._failed += 1
            self._records.row_failed(
                lane, self._job_id, ended.request_id[:128], tenant[:64], ended.end,
                traceparent="" if ended.row is None else ended.row.traceparent,
            )  # fmt: skip
        else:
            early = ended.row is not None and ended.row.ended_early
            self._records.row_finished(lane, ended.end, early=early)
        if not self._closed:
            self._outbox.append(ended)
            self._bytes_held += ended.weight
            if not self._paused and self._bytes_held >= self._limits.result_bytes:
                self._paused = True
                self.core.pause_job(self._job, True)
            self._news.set()
        elif not self._rows:
            self._report(complete=False)

    async def _window_has_room(self) -> None:
        while self._tokens_held >= self._limits.prompt_tokens or self._paused:
            self._room.clear()
            await self._room.wait()

    def _sent(self, weight: int) -> None:
        self._bytes_held -= weight
        # Half the bound between stop and go: not a pause for every message.
        if self._paused and self._bytes_held <= self._limits.result_bytes // 2:
            self._paused = False
            self.core.pause_job(self._job, False)
            self._room.set()

    def _message(self) -> tuple[broker_service_pb2.ExchangeResponse, int]:
        """Makes the next message; returns how many bytes of results its sending frees.

        A row is never in outbox and fresh rows both, so its deltas precede its result whatever comes first here.
        """
        response = broker_service_pb2.ExchangeResponse()
        size = weight = 0
        while self._outbox and len(response.outcomes) < MESSAGE_ROWS:
            if size and size + self._outbox[0].weight > MESSAGE_BYTES:
                break
            ended = self._outbox.popleft()
            weight += ended.weight
            outcome = response.outcomes.add(request_id=ended.request_id)
            if isinstance(ended.end, FabricError):
                outcome.failed.CopyFrom(to_status(ended.end))
            elif ended.row is not None:
                ended.row.transcript.write_result(ended.end, outcome.finished)
                self._check_size(ended.row, outcome)
            size += outcome.ByteSize()
        while self._fresh and len(response.deltas) < MESSAGE_ROWS and size < MESSAGE_BYTES:
            row = next(iter(self._fresh))
            del self._fresh[row]
            size += row.transcript.write_deltas(response.deltas)
        return response, weight

    def _check_size(self, row: Row, outcome: broker_service_pb2.RequestOutcome) -> None:
        """Turns a result that no message can carry into an error, before it ends the stream and its neighbours."""
        size, limit = outcome.ByteSize(), self._limits.message_bytes - _ENVELOPE_BYTES
        if size > limit:
            error = ResourceExhaustedError(f"the result has {size} bytes; a message carries at most {limit}")
            self._failed += 1
            self._records.row_failed(row.lane, self._job_id, row.key[1], row.key[0], error)
            outcome.failed.CopyFrom(to_status(error))

    def _abandon(self) -> None:
        """The client is gone, or the stream failed: nothing is computed for it any longer."""
        self._closed = True
        self._outbox.clear()
        self._fresh.clear()
        if self._rows:
            self.core.cancel([row.key for row in self._rows.values()])
        else:
            self._report(complete=False)

    def _report(self, *, complete: bool) -> broker_service_pb2.JobReport:
        """Ends the accounting; called once, when every row has ended."""
        report = self.core.end_job(self._job)
        report.job_id = self._job_id
        report.requests = self._requests
        report.failed = self._failed
        report.wall_ms = round(1000 * (self._last_at - self._first_at)) if self._first_at is not None else 0
        self._records.job_ended(report, complete=complete)
        return report


def draining() -> UnavailableError:
    """The refusal of new work by a broker that is going away."""
    return UnavailableError(
        "the broker is going away and takes nothing new", reason=reasons.DRAINING, retry_after_s=1.0
    )


def _weight(error: FabricError) -> int:
    return ROW_BYTES + sum(len(violation.description) for violation in error.violations)


def _row(work: Work) -> Row:
    assert isinstance(work.sink, Row)  # noqa: S101 -- every work of a stream was made with one
    return work.sink
