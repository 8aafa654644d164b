# SPDX-License-Identifier: Apache-2.0
"""Results on their way into the journal.

One commit runs at a time; what ends meanwhile goes into the next, so that batches grow with the rate by themselves.
Nothing is dropped where the journal cannot take it: it is tried again, and the jobs stand still until it can.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.broker.journal.values import Batch, JournalFullError, Share, Spent
from services.common import logs
from services.common.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.jobs.shards import ShardStore
    from services.broker.journal import Journal
    from services.broker.journal.values import Bound, Costs, Result
    from services.broker.work import WorkEnd

_RETRY_S = 0.5
_log = logs.get("broker.jobs")


@dataclass(slots=True)
class _Pending:
    """What of one job waits to be committed."""

    results: list[Result] = field(default_factory=list)
    payloads: list[tuple[int, bytes]] = field(default_factory=list)
    """Index into `results`, and the data."""
    groups: list[int] = field(default_factory=list)
    bounds: list[tuple[int, Bound]] = field(default_factory=list)
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reattempts: int = 0
    shares: dict[str, Share] = field(default_factory=dict)

    def spend(self, end: WorkEnd) -> None:
        """Adds what a row has cost."""
        usage = end.usage
        self.prompt_tokens += usage.prompt_tokens
        self.computed_tokens += usage.computed_tokens
        self.cached_tokens += usage.cached_tokens
        self.generated_tokens += usage.generated_tokens
        self.reattempts += end.attempts - 1
        share = self.shares.get(end.node_id, Share())
        self.shares[end.node_id] = Share(
            share.rows + 1,
            share.computed_tokens + usage.computed_tokens,
            share.generated_tokens + usage.generated_tokens,
        )

    def batch(self, job: int, costs: Costs | None) -> Batch:
        """All of it as a value, with what the job has cost here."""
        spent = Spent(
            self.prompt_tokens, self.computed_tokens, self.cached_tokens, self.generated_tokens, self.reattempts
        )
        return Batch(job, tuple(self.results), tuple(self.groups), spent, self.shares, tuple(self.bounds), costs)


class Recorder:
    """Takes results on the event loop and has them committed.

    Args:
        journal: Where to.
        shards: Where payloads go.
        committed: Told after each commit, with job, how many of its results and which of its groups were in it, and
            whether the job has ended.
        costs: Says what a job has cost here up to now; None where it is not worked on.
    """

    def __init__(
        self,
        journal: Journal,
        shards: ShardStore,
        committed: Callable[[int, int, list[int], bool], None],
        costs: Callable[[int], Costs | None],
    ) -> None:
        self._journal = journal
        self._shards = shards
        self._committed = committed
        self._costs = costs
        self._pending: defaultdict[int, _Pending] = defaultdict(_Pending)
        self._news = asyncio.Event()
        self._clear = asyncio.Event()
        self._clear.set()
        self.owner = ""
        """Whose lease the groups are held under."""
        self.trouble = ""
        """Why nothing can be kept at the moment; empty where it can."""
        self.payloads_full = 0
        """Times that there was no room for payloads."""

    def add(self, job: int, result: Result, *, payload: bytes = b"", end: WorkEnd | None = None) -> None:
        """A row has ended."""
        pending = self._pending[job]
        if payload:
            pending.payloads.append((len(pending.results), payload))
        pending.results.append(result)
        if end is not None:
            pending.spend(end)
        self._wake()

    def group_begins(self, job: int, group: int, bound: Bound) -> None:
        """A group is given out; called before any of its rows ends, so that nothing of it is kept without its bound."""
        self._pending[job].bounds.append((group, bound))
        self._wake()

    def group_done(self, job: int, group: int) -> None:
        """Every row of a group was added, or had a result before."""
        self._pending[job].groups.append(group)
        self._wake()

    async def run(self) -> None:
        """Commits for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._pending:
                taken, self._pending = self._pending, defaultdict(_Pending)
                ended = await self._commit(taken)
                for (job, pending), over in zip(taken.items(), ended, strict=True):
                    self._committed(job, len(pending.results), pending.groups, over)
            self._clear.set()

    async def flushed(self) -> None:
        """Returns once everything that was added is committed."""
        await self._clear.wait()

    def _wake(self) -> None:
        self._clear.clear()
        self._news.set()

    async def _commit(self, taken: dict[int, _Pending]) -> list[bool]:
        """Commits what was taken, however often it takes; says of each job whether it has ended."""
        costs = {job: self._costs(job) for job in taken}
        while True:
            try:
                for job, pending in taken.items():
                    await self._place(job, pending)
                ended = await self._journal.record(
                    self.owner, [each.batch(job, costs[job]) for job, each in taken.items()]
                )
            except FabricError as error:
                self.trouble = error.message
                _log.warning("results.not_committed", reason=error.reason, message=error.message)
                await asyncio.sleep(_RETRY_S)
            else:
                self.trouble = ""
                return ended

    async def _place(self, job: int, pending: _Pending) -> None:
        """Writes payloads; done once, however often the commit that follows is tried."""
        if not pending.payloads:
            return
        data = [payload for _, payload in pending.payloads]
        try:
            places = await asyncio.to_thread(self._shards.append, job, data)
        except JournalFullError:
            self.payloads_full += 1
            raise
        for (index, _), place in zip(pending.payloads, places, strict=True):
            pending.results[index] = pending.results[index]._replace(payload=place)
        pending.payloads.clear()
