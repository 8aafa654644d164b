# SPDX-License-Identifier: Apache-2.0
"""What happens to jobs by themselves: old ones go, deleted ones are freed piece by piece, tenants have quotas."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common import logs
from services.common.errors import FabricError, ResourceExhaustedError

if TYPE_CHECKING:
    from services.broker.jobs.shards import ShardStore
    from services.broker.journal import Journal
    from services.broker.journal.values import TenantUse

_JOBS_A_ROUND = 16
_QUOTA_RETRY_S = 60.0
_log = logs.get("broker.jobs")


@dataclass(frozen=True, slots=True)
class Keeping:
    """How much is kept, and for how long. 0 means without limit."""

    retention_s: float
    """Time for which a job is kept once it has ended, in seconds."""
    kept_bytes: int
    """Bytes of rows, results and payloads beyond which jobs that have ended go, the oldest first."""
    tenant_jobs: int
    """Jobs of a tenant that have not ended."""
    tenant_rows: int
    """Rows of a tenant, of all its jobs."""
    tenant_bytes: int
    """Rows, results and payloads of a tenant, in bytes."""
    every_s: float = 10.0

    def admit_job(self, use: TenantUse) -> None:
        """Lets one more job in.

        Raises:
            ResourceExhaustedError: the tenant has as many as it may.
        """
        _within("jobs that have not ended", use.open_jobs, self.tenant_jobs)
        self.admit_rows(use)

    def admit_rows(self, use: TenantUse) -> None:
        """Lets more rows in.

        Raises:
            ResourceExhaustedError: the tenant has as many as it may.
        """
        _within("rows", use.rows, self.tenant_rows)
        _within("bytes of rows, results and payloads", use.size, self.tenant_bytes)


class Housekeeper:
    """Frees what nobody wants any more.

    Args:
        journal: Of which.
        shards: Where its payloads are.
        keeping: What is kept.
    """

    def __init__(self, journal: Journal, shards: ShardStore, keeping: Keeping) -> None:
        self._journal = journal
        self._shards = shards
        self._keeping = keeping
        self._news = asyncio.Event()

    def kick(self) -> None:
        """A job was deleted."""
        self._news.set()

    async def run(self) -> None:
        """Keeps house for ever."""
        try:
            for job in await self._journal.stale_keys():
                await self._journal.drop_keys(job.number, job.rows)
            for number in await self._journal.stale_chains():
                await self._journal.drop_chains(number)
        except FabricError as error:
            _log.warning("housekeeping.failed", reason=error.reason, message=error.message)
        while True:
            try:
                await self.once()
            except FabricError as error:
                _log.warning("housekeeping.failed", reason=error.reason, message=error.message)
            try:
                async with asyncio.timeout(self._keeping.every_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    async def once(self) -> None:
        """One round: what is too old goes, then what is too much; then room is made."""
        now = time.time()
        if self._keeping.retention_s:
            await self._let_go(now - self._keeping.retention_s, "age")
        while self._keeping.kept_bytes and await self._journal.size() > self._keeping.kept_bytes:
            if not await self._let_go(now, "size", count=1):
                break
        for number in await self._journal.hidden(_JOBS_A_ROUND):
            await asyncio.to_thread(self._shards.drop, number)
            while await self._journal.sweep(number):
                pass

    async def _let_go(self, before: float, why: str, *, count: int = _JOBS_A_ROUND) -> bool:
        """Deletes the oldest jobs that ended before a time; returns whether there were any."""
        jobs = await self._journal.oldest_ended(before, count)
        for job in jobs:
            await self._journal.delete(job.tenant, job.job_id)
            _log.info("job.let_go", job_id=job.job_id, tenant=job.tenant, why=why, rows=job.rows, size=job.size)
        return bool(jobs)


def _within(what: str, found: int, most: int) -> None:
    if most and found >= most:
        raise ResourceExhaustedError(
            f"the tenant has {found} {what}; at most {most} are kept: let jobs end, or delete some",
            retry_after_s=_QUOTA_RETRY_S,
        )
