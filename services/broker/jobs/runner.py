# SPDX-License-Identifier: Apache-2.0
"""Keeps the core fed with a bounded frontier of the journal's jobs.

The journal holds jobs of any size; the core holds rows of the groups that this broker has claimed, a bounded number of
them, in the order of the journal. Every job that may run has its share of the frontier, so that none waits for the end
of another; whose turn it is among what the frontier holds is the core's to decide.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.rpc import code_pb2

from services.broker.frontdoor.selection import ambiguous
from services.broker.jobs import pinning
from services.broker.jobs.feed import JobFeed
from services.broker.jobs.recorder import Recorder
from services.broker.journal import LeaseLostError
from services.broker.journal.values import ENDED, State
from services.common import logs
from services.common.errors import FabricError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.frontdoor.intake import Intake
    from services.broker.frontdoor.selection import EngineDirectory
    from services.broker.jobs.shards import ShardStore
    from services.broker.journal import Journal
    from services.broker.journal.values import Costs, JobRecord
    from services.broker.work import Catalog, Core, Lane
    from services.common.tasks import Tasks

JOBS_MAX = 1000
"""Jobs that are served at the same time; more wait in order of priority and age."""
CLAIM_GROUPS = 4
"""Most groups of one claim."""
TICK_S = 0.25
"""How often the journal is asked what others, or time, have changed."""
_log = logs.get("broker.jobs")


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Bounds of the runner."""

    frontier_rows: int
    """Rows of jobs that are held at the same time, results that are not yet committed included; the last group that
    is claimed may go beyond it."""
    lease_s: float
    """How long others wait after this broker was last heard before they take its groups over, in seconds."""
    drain_s: float
    """How long rows that run get to end when the broker goes away, in seconds."""


class Runner:
    """See the module.

    Args:
        journal: Where jobs are.
        core: Runs rows.
        catalog: Engines that there are.
        directory: The same, by selector.
        intake: Plans rows.
        shards: Where payloads go.
        limits: Bounds.
        tasks: Holds the background tasks.
        job_ended: Told the prompt tokens of each job that ran to its end: as sent, as computed, and the bound.
        row_failed: Told of each row that ended with an error.
    """

    def __init__(
        self,
        journal: Journal,
        core: Core,
        catalog: Catalog,
        directory: EngineDirectory,
        intake: Intake,
        shards: ShardStore,
        limits: RunnerLimits,
        tasks: Tasks,
        job_ended: Callable[[int, int, int], None],
        row_failed: Callable[[Lane, FabricError], None],
    ) -> None:
        self._journal = journal
        self._job_ended = job_ended
        self._row_failed = row_failed
        self._core = core
        self._catalog = catalog
        self._directory = directory
        self._intake = intake
        self._limits = limits
        self._tasks = tasks
        self._recorder = Recorder(journal, shards, self._committed, self._costs)
        self._feeds: dict[int, JobFeed] = {}
        self._ending: list[JobFeed] = []
        """Given up here; some of their rows are in the core still."""
        self._news = asyncio.Event()
        self._working: list[asyncio.Task[None]] = []
        self._stopping = False
        self._owner = ""
        self._trouble = ""
        """What the last turn failed with; empty where it did not."""
        self.leases_lost = 0
        """Times that others may have taken over what was held here."""

    async def start(self) -> None:
        """Begins to work on what the journal holds.

        Raises:
            FabricError: the journal does not answer.
        """
        await self._enter()
        self._working = [
            self._tasks.start(self._recorder.run(), name="job-results"),
            self._tasks.start(self._run(), name="job-runner"),
            self._tasks.start(self._keep_lease(), name="job-lease"),
        ]

    def kick(self) -> None:
        """Something has changed: a job may run now, or no longer."""
        self._news.set()

    def stalled(self, number: int) -> str:
        """Why this broker cannot go on with a job; empty where it can."""
        feed = self._feeds.get(number)
        return self._recorder.trouble or self._trouble or ("" if feed is None else feed.stalled)

    @property
    def held(self) -> int:
        """Rows that are held, over all jobs."""
        return sum(feed.held for feed in list(self._feeds.values()))

    @property
    def waiting(self) -> int:
        """Rows of all jobs that have no result, as the journal was last heard to say."""
        return sum(job.rows - job.finished - job.failed for job in (feed.job for feed in list(self._feeds.values())))

    @property
    def payloads_full(self) -> int:
        """Times that there was no room for payloads."""
        return self._recorder.payloads_full

    def states(self) -> dict[str, int]:
        """How many jobs run, are paused, and are stalled here."""
        counts = {"running": 0, "paused": 0, "stalled": 0}
        for number, feed in list(self._feeds.items()):
            if feed.job.state is State.PAUSED:
                counts["paused"] += 1
            else:
                counts["stalled" if self.stalled(number) else "running"] += 1
        return counts

    async def drain(self) -> None:
        """Claims nothing more, lets rows that run end, keeps their results, and gives the rest back."""
        self._stopping = True
        for task in self._working[1:]:
            task.cancel()
        if self._working:
            await asyncio.gather(*self._working[1:], return_exceptions=True)
        feeds = list(self._feeds.values())
        for feed in feeds:
            self._core.pause_job(feed.core_job, True)
        try:
            async with asyncio.timeout(self._limits.drain_s):
                while any(feed.running for feed in feeds):  # noqa: ASYNC110 -- rows end in the core; it calls no event
                    await asyncio.sleep(0.02)
                await self._recorder.flushed()
        except TimeoutError:
            _log.info("jobs.drain_cut_short", rows=sum(feed.running for feed in feeds))
        for feed in feeds:
            feed.give_up()
        if self._owner:
            await self._journal.leave(self._owner)

    # -- the lease -------------------------------------------------------------------------------------------------

    async def _enter(self) -> None:
        owner = uuid.uuid4().hex
        await self._journal.enter(owner, self._limits.lease_s)
        self._owner = self._recorder.owner = owner

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._limits.lease_s / 3)
            try:
                await self._journal.renew(self._owner, self._limits.lease_s)
            except LeaseLostError:
                await self._start_over()
            except FabricError as error:
                _log.warning("lease.not_renewed", reason=error.reason, message=error.message)

    async def _start_over(self) -> None:
        """Others may have what was held here: it is given up, and this broker begins anew under another name."""
        self.leases_lost += 1
        _log.warning("lease.lost", rows=self.held)
        for number in list(self._feeds):
            self._give_up(number)
        try:
            await self._enter()
        except FabricError as error:
            self._trouble = error.message
            _log.warning("lease.not_renewed", reason=error.reason, message=error.message)
        self.kick()

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
                self._trouble = ""
            except LeaseLostError:
                await self._start_over()
            except FabricError as error:
                self._trouble = error.message
                _log.warning("jobs.turn_failed", reason=error.reason, message=error.message)
            try:
                async with asyncio.timeout(TICK_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    async def _turn(self) -> None:
        for job in await self._journal.overdue():
            await self._journal.cancel(
                job.tenant, job.job_id, why="its deadline has passed", code=code_pb2.DEADLINE_EXCEEDED
            )
        self._reconcile(await self._journal.live_jobs(JOBS_MAX))
        for feed in self._feeds.values():
            if feed.job.state is State.RUNNING:
                await self._feed_again(feed)
        while not self._stopping and not self._recorder.trouble and (needy := self._neediest()) is not None:
            await self._feed_more(needy)

    def _reconcile(self, jobs: list[JobRecord]) -> None:
        live = {job.number: job for job in jobs}
        for number in set(self._feeds) - set(live):
            self._give_up(number)
        for number, job in live.items():
            feed = self._feeds.get(number)
            if feed is None:
                feed = self._feeds[number] = JobFeed(
                    job, self._core, self._intake, self._recorder, self._block_tokens, self._row_failed
                )
            feed.update(job, paused=job.state is State.PAUSED)
            feed.exhausted = False
            feed.stalled = ""
        for ended in [each for each in self._ending if not each.in_core]:
            self._ending.remove(ended)
            self._tasks.start(self._account(ended), name="job-account")

    def _neediest(self) -> JobFeed | None:
        """The job that has least of its share of the frontier, highest priority first; None where all have theirs."""
        if self.held >= self._limits.frontier_rows:
            return None
        wanting = [
            feed
            for feed in self._feeds.values()
            if feed.job.state is State.RUNNING and not feed.exhausted and not feed.stalled
        ]
        share = self._limits.frontier_rows / max(len(wanting), 1)
        wanting = [feed for feed in wanting if feed.held < share]
        return min(wanting, key=lambda feed: (feed.held > 0, -feed.job.priority, feed.held), default=None)

    async def _feed_more(self, feed: JobFeed) -> None:
        """Claims groups of a job and hands their rows to the core."""
        if not await self._engine_is_there(feed):
            return
        groups = await self._journal.claim(self._owner, feed.job.number, CLAIM_GROUPS, feed.groups)
        feed.exhausted = len(groups) < CLAIM_GROUPS
        for group in groups:
            rows = await self._journal.rows_of(feed.job.number, group)
            if feed.over or not await feed.take_group(group, rows):
                return
        feed.moves()

    async def _feed_again(self, feed: JobFeed) -> None:
        """Hands rows that came back to the core once more."""
        while due := feed.due():
            if not await self._engine_is_there(feed):
                feed.put_back(due)
                return
            try:
                rows = await self._journal.rows_at(feed.job.number, list(due))
            except FabricError:
                feed.put_back(due)
                raise
            if feed.over:
                return
            await feed.take_again(due, rows)
            feed.moves()

    async def _engine_is_there(self, feed: JobFeed) -> bool:
        """Whether the job can run now; fixes it to an engine where it is not yet. Says why not in `stalled`."""
        selector, job = feed.spec.engine, feed.job
        wanted = type(selector)(engine_id=selector.engine_id, engine_digest=selector.engine_digest)
        pinned = job.engine_digest and not feed.spec.any_digest
        if pinned:
            wanted.engine_digest = job.engine_digest
        try:
            candidates = self._directory.candidates(wanted)
            if not candidates.one_model:
                raise ambiguous(candidates.engines)
            serving = [each for each in self._catalog.engines() if each.node_ids and each.digest in candidates.digests]
            if not serving:
                raise UnavailableError("no accepted node serves the engine of this job now")
        except FabricError as error:
            feed.stall(error.message)
            return False
        if not pinned and not feed.spec.any_digest:
            rows = await self._journal.rows_at(job.number, range(min(job.rows, pinning.ROWS)))
            try:
                best = await feed.choose(serving, rows)
            except FabricError as error:
                feed.stall(error.message)
                return False
            digest = await self._journal.pin(job.number, best.digest)
            feed.pin(digest)
            return digest == best.digest or await self._engine_is_there(feed)
        return True

    def _block_tokens(self, digests: frozenset[str]) -> int:
        """The finest blocks of engines, as the core's trees have them; 0 where they share nothing."""
        blocks = (
            engine.contract.limits.kv_block_tokens.value
            for engine in self._catalog.engines()
            if engine.digest in digests
        )
        return min((size for size in blocks if size), default=0)

    # -- ends ------------------------------------------------------------------------------------------------------

    def _costs(self, number: int) -> Costs | None:
        feed = self._feeds.get(number)
        return None if feed is None else feed.costs()

    def _committed(self, number: int, results: int, groups: list[int], ended: bool) -> None:
        feed = self._feeds.get(number)
        if feed is not None:
            feed.committed(results, groups)
        if ended:
            self._give_up(number)
        self.kick()

    def _give_up(self, number: int) -> None:
        feed = self._feeds.pop(number, None)
        if feed is not None:
            feed.give_up()
            self._ending.append(feed)

    async def _account(self, feed: JobFeed) -> None:
        """Says what became of a job that is over here, and frees what only its bound needed."""
        costs = feed.costs()
        feed.close()
        try:
            job = await self._journal.keep_costs(feed.job.number, costs)
            if job is not None and job.state in ENDED:
                await self._journal.drop_chains(job.number)
                if job.state is State.COMPLETED and job.bound_tokens >= 0:
                    self._job_ended(job.spent.prompt_tokens, job.spent.computed_tokens, job.bound_tokens)
                _log.info(
                    "job.ended", job_id=job.job_id, tenant=job.tenant, state=job.state.name, rows=job.rows,
                    finished=job.finished, failed=job.failed, prompt_tokens_logical=job.spent.prompt_tokens,
                    prompt_tokens_computed=job.spent.computed_tokens, prompt_tokens_bound=job.bound_tokens,
                    generated_tokens=job.spent.generated_tokens, reattempts=job.spent.reattempts,
                )  # fmt: skip
        except FabricError as error:
            _log.warning("job.not_accounted", reason=error.reason, message=error.message)
