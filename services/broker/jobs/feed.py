# SPDX-License-Identifier: Apache-2.0
"""One job on its way through the core: rows that are held, what they came from, what comes back.

A row is held from the moment it is read from the journal until its result is committed, or until it goes back because
nobody could serve it. Only its number, id and group are kept; its request lies with the core, once.
"""

from __future__ import annotations

import asyncio
import heapq
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2, job_service_pb2
from services.broker.frontdoor.intake import Plan
from services.broker.frontdoor.records import outcome
from services.broker.frontdoor.transcript import OutputSink
from services.broker.jobs import pinning, rules
from services.broker.jobs.bound import Prompt, group_bound
from services.broker.journal.values import Bound, Costs, Result
from services.broker.work import Lane
from services.common import logs, reasons
from services.common.errors import (
    AlreadyExistsError,
    FabricError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.broker.frontdoor.intake import Intake
    from services.broker.jobs.recorder import Recorder
    from services.broker.journal.values import Group, JobRecord, StoredRow
    from services.broker.work import CatalogEngine, Core, Work, WorkEnd

PLAN_ROWS = 256
"""Rows that are planned in one go, before others get their turn on the event loop."""
ROUNDS_MAX = 6
"""Times that a row may come back UNAVAILABLE, each time after the core's own attempts, before that is its result."""
_AGAIN_S = 0.5
_AGAIN_MOST_S = 15.0
_log = logs.get("broker.jobs")


class JobRow(OutputSink):
    """One row in the core."""

    __slots__ = ("_feed", "group", "key", "row", "row_id", "running")

    def __init__(self, plan: Plan, core: Core, feed: JobFeed, row: StoredRow, group: int) -> None:
        super().__init__(plan, core)
        self._feed = feed
        self.key = (plan.tenant, plan.request_id)
        self.row = row.row
        self.row_id = row.row_id
        self.group = group
        self.running = False

    def on_output(self) -> None:
        """See `OutputSink`; output is kept until the row has ended."""

    def started(self, work: Work, engine_digest: str) -> None:
        """See `Sink`."""
        self.running = True

    def finished(self, work: Work, end: WorkEnd) -> None:
        """See `Sink`."""
        self._feed.row_finished(self, end)

    def failed(self, work: Work, error: FabricError) -> None:
        """See `Sink`."""
        self._feed.row_failed(self, error)


def core_id(job: int, row: int) -> str:
    """The id under which the core has a row, by the journal's numbers of the job and of the row in it."""
    return f"job/{job}/{row}"


class JobFeed:
    """A job that this broker works on.

    Args:
        job: As the journal has it.
        core: Runs the rows.
        intake: Plans them.
        recorder: Takes their results.
        blocks: Tokens of a block on engines, by their digests; 0 where nothing is shared.
        failed: Told of each row that ended with an error.
    """

    def __init__(
        self,
        job: JobRecord,
        core: Core,
        intake: Intake,
        recorder: Recorder,
        blocks: Callable[[frozenset[str]], int],
        failed: Callable[[Lane, FabricError], None],
    ) -> None:
        self.job = job
        self._failed = failed
        self.spec = job_service_pb2.JobSpec.FromString(job.spec)
        self.stretch = uuid.uuid4().hex
        """Names this stretch of work on the job."""
        self.core_job = f"job/{job.number}/{self.stretch[:8]}"
        self._core = core
        self._intake = intake
        self._recorder = recorder
        self._blocks = blocks
        self._rows: dict[int, JobRow] = {}
        self.groups: dict[int, int] = {}
        """Rows of each held group that have not ended; a group is held until its last result is committed."""
        self._again: list[tuple[float, int, int]] = []
        """Rows to read again: when, row, group; a heap."""
        self._rounds: dict[int, int] = {}
        self._paused = False
        self._now = asyncio.get_running_loop().time
        self._uncommitted = 0
        self.exhausted = False
        """Whether nothing was left to claim when it was last asked for."""
        self.stalled = ""
        """Why it cannot go on; empty where it can."""
        self._told = ""
        """What the log says of that."""
        self.over = False
        """Whether it is given up here: it has ended, was deleted, or is others' now."""

    @property
    def held(self) -> int:
        """Rows that are held."""
        return len(self._rows) + len(self._again) + self._uncommitted

    @property
    def in_core(self) -> int:
        """Rows that the core has."""
        return len(self._rows)

    @property
    def running(self) -> int:
        """Of these, rows that a worker has."""
        return sum(row.running for row in self._rows.values())

    def costs(self) -> Costs:
        """What the job has cost here up to now."""
        return Costs(self.stretch, self._core.job_costs(self.core_job).to_json())

    def update(self, job: JobRecord, *, paused: bool) -> None:
        """Takes the journal's newest word."""
        self.job = job
        if paused != self._paused:
            self._paused = paused
            self._core.pause_job(self.core_job, paused)

    def pin(self, digest: str) -> None:
        """The job runs on this engine from now on."""
        self.job = replace(self.job, engine_digest=digest)

    def committed(self, results: int, groups: Sequence[int]) -> None:
        """Results, and the ends of groups, are in the journal."""
        self._uncommitted -= results
        for group in groups:
            self.groups.pop(group, None)

    def give_up(self) -> None:
        """Ends what is in the core; what still comes back is dropped."""
        self.over = True
        self._again.clear()
        if self._rows:
            self._core.cancel([row.key for row in self._rows.values()])

    def close(self) -> None:
        """Ends the core's accounting; called once, when the core has no row any more. The journal has its own."""
        self._core.end_job(self.core_job)

    def stall(self, why: str) -> None:
        """It cannot go on. Found out again with every turn, and said once: nobody but the log names the job."""
        self.stalled = why
        if why != self._told:
            self._told = why
            _log.warning("job.stalled", job_id=self.job.job_id, tenant=self.job.tenant, why=why)

    def moves(self) -> None:
        """It can go on: what it has not handed to the core yet can be."""
        if self._told:
            self._told = ""
            _log.info("job.went_on", job_id=self.job.job_id, tenant=self.job.tenant)

    async def take_group(self, group: Group, rows: Sequence[StoredRow]) -> bool:
        """Hands the rows of a claimed group to the core.

        Returns:
            Whether it was taken. One of which nobody can tell now what its rows are (their tokenizer cannot be had) is
            not held, and comes with the next claim; `stalled` says why.
        """
        plans: list[Plan | FabricError] = []
        for start in range(0, len(rows), PLAN_ROWS):
            piece = await self._plan(rows[start : start + PLAN_ROWS])
            passing = next((plan for plan in piece if isinstance(plan, FabricError) and pinning.passes(plan)), None)
            if passing is not None:
                self.stall(passing.message)
                return False
            plans += piece
        if self.over:
            return False
        if not group.counted:
            bound = await asyncio.to_thread(self._bound, group, rows, plans)
            self._recorder.group_begins(self.job.number, group.number, bound)
        self.groups[group.number] = len(rows)
        if not rows:
            self._recorder.group_done(self.job.number, group.number)
        for start in range(0, len(rows), PLAN_ROWS):
            end = start + PLAN_ROWS
            self._submit(rows[start:end], [group.number] * PLAN_ROWS, plans[start:end])
            await asyncio.sleep(0)
        return True

    def _bound(self, group: Group, rows: Sequence[StoredRow], plans: Sequence[Plan | FabricError]) -> Bound:
        found = [plan for plan in plans if isinstance(plan, Plan)]
        if not found:
            return Bound(0, 0, (), ())
        text = broker_service_pb2.GenerationRequest.FromString(rows[0].body).prompt.HasField("text")
        prompts = [Prompt(plan.tokens, plan.salt) for plan in found]
        return group_bound(prompts, self._blocks(found[0].engine_digests), group.reach, text=text)

    def due(self) -> dict[int, int]:
        """Takes out rows that are to be tried again now: group by row."""
        found: dict[int, int] = {}
        while self._again and self._again[0][0] <= self._now() and len(found) < PLAN_ROWS:
            _, row, group = heapq.heappop(self._again)
            found[row] = group
        return found

    async def take_again(self, due: dict[int, int], rows: Sequence[StoredRow]) -> None:
        """Hands rows to the core once more; those that have a result by now are done."""
        for number in set(due) - {row.row for row in rows}:
            self._row_done(number, due[number])
        self._submit(rows, [due[row.row] for row in rows], await self._plan(rows))

    def put_back(self, due: dict[int, int]) -> None:
        """Keeps rows for later that could not be read."""
        for row, group in due.items():
            self._later(row, group)

    async def choose(self, engines: Sequence[CatalogEngine], rows: Sequence[StoredRow]) -> CatalogEngine:
        """Chooses the build that the job is held to by its first rows; see `pinning.choose`."""
        return await pinning.choose(
            self._intake, engines, [self._request(row, held=False) for row in rows], self._core.nodes_taking
        )

    async def _plan(self, rows: Sequence[StoredRow]) -> list[Plan | FabricError]:
        requests = [self._request(row) for row in rows]
        plans = await self._intake.plan(requests)
        if self.spec.any_digest or self.spec.engine.engine_digest:
            return plans
        return await pinning.told(self._intake, requests, plans, self.spec.engine)

    def _submit(self, rows: Sequence[StoredRow], groups: Sequence[int], plans: Sequence[Plan | FabricError]) -> None:
        if self.over:
            return
        works: list[Work] = []
        for row, group, plan in zip(rows, groups, plans, strict=False):
            if isinstance(plan, Plan):
                sink = JobRow(plan, self._core, self, row, group)
                self._rows[row.row] = sink
                works.append(plan.work(sink, lane=Lane.BULK, stream_tokens=False, job=self.core_job))
            elif pinning.passes(plan):
                self._later(row.row, group, plan.retry_after_s)
            else:
                self._end_badly(row.row, row.row_id, group, plan)
        for work, refused in zip(works, self._core.submit(works), strict=True):
            if refused is not None:
                self._refused(work, refused)

    def _refused(self, work: Work, error: FabricError) -> None:
        row = _row(work)
        del self._rows[row.row]
        if isinstance(error, ResourceExhaustedError | UnavailableError | AlreadyExistsError):
            self._later(row.row, row.group, error.retry_after_s)
        else:
            self._end_badly(row.row, row.row_id, row.group, error)

    def _request(self, row: StoredRow, *, held: bool = True) -> broker_service_pb2.GenerationRequest:
        sent = broker_service_pb2.GenerationRequest.FromString(row.body)
        made = rules.row_request(self.spec.defaults, sent)
        made.request_id = core_id(self.job.number, row.row)
        made.tenant = self.job.tenant
        made.lane = broker_service_pb2.LANE_BULK
        if not made.HasField("priority"):
            made.priority = self.job.priority
        made.engine.CopyFrom(self.spec.engine)
        if held and self.job.engine_digest and not self.spec.any_digest:
            made.engine.engine_digest = self.job.engine_digest
        return made

    # -- what comes back -------------------------------------------------------------------------------------------

    def row_finished(self, row: JobRow, end: WorkEnd) -> None:
        """The core is done with a row; one that was cancelled here goes back."""
        self._rows.pop(row.row, None)
        if self.over:
            return
        if outcome(end, early=row.ended_early) == "cancelled":
            self._later(row.row, row.group)
            return
        made = job_service_pb2.RowResult(row=row.row, row_id=row.row_id.decode())
        try:
            row.transcript.write_result(end, made.finished)
        except Exception:
            # Whatever it was, the row ends with an error of its own, and its neighbours go on.
            _log.exception("row.result_failed", job=self.job.job_id, row=row.row)
            self._end_badly(row.row, row.row_id, row.group, InternalError("the result could not be written"))
            return
        made.finished.request_id = ""
        payload = b""
        if made.finished.HasField("payload"):
            payload = made.finished.payload.data
            made.finished.payload.data = b""
        self._uncommitted += 1
        self._recorder.add(
            self.job.number, Result(row.row, made.SerializeToString(), failed=False), payload=payload, end=end
        )
        self._row_done(row.row, row.group)

    def row_failed(self, row: JobRow, error: FabricError) -> None:
        """The core gives a row up: for good where the row is at fault, for now where nobody could serve it."""
        self._rows.pop(row.row, None)
        if self.over:
            return
        if isinstance(error, UnavailableError | ResourceExhaustedError):
            rounds = self._rounds.get(row.row, 0) + 1
            if rounds < ROUNDS_MAX or error.reason == reasons.DRAINING:
                self._rounds[row.row] = rounds
                self._later(row.row, row.group, min(_AGAIN_S * 2**rounds, _AGAIN_MOST_S))
                return
        self._end_badly(row.row, row.row_id, row.group, error)

    def _end_badly(self, row: int, row_id: bytes, group: int, error: FabricError) -> None:
        self._uncommitted += 1
        self._failed(Lane.BULK, error)
        self._recorder.add(self.job.number, rules.failure(row, row_id, error))
        self._row_done(row, group)

    def _row_done(self, row: int, group: int) -> None:
        self._rounds.pop(row, None)
        self.groups[group] -= 1
        if not self.groups[group]:
            self._recorder.group_done(self.job.number, group)

    def _later(self, row: int, group: int, after_s: float | None = None) -> None:
        heapq.heappush(self._again, (self._now() + (after_s or _AGAIN_S), row, group))


def _row(work: Work) -> JobRow:
    assert isinstance(work.sink, JobRow)  # noqa: S101 -- every work of a feed was made with one
    return work.sink
