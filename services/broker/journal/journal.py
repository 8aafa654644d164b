# SPDX-License-Identifier: Apache-2.0
"""The journal: jobs, rows and results that outlive every process.

What a call that writes has returned is committed. Calls are safe from the event loop: statements run on threads. All
of them raise `UnavailableError` where the database cannot be reached, and those that bring something `JournalFullError`
where there is no room for it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

from services.broker.journal import group_tables, job_table, lookup, row_tables
from services.broker.journal.group_tables import LeaseLostError
from services.broker.journal.order import GroupRule, groups
from services.broker.journal.reader import Reader
from services.broker.journal.values import JobRecord, State
from services.broker.journal.writer import Writer
from services.common.errors import FailedPreconditionError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from services.broker.journal.database import Connection, Database
    from services.broker.journal.lookup import RowPlace
    from services.broker.journal.order import Key
    from services.broker.journal.values import (
        Batch,
        Costs,
        Counts,
        Group,
        Recorded,
        Result,
        Row,
        Share,
        StoredRow,
        TenantUse,
    )


def _nothing(_point: str) -> None:
    """What most processes do at a named point."""


def _unobserved(_seconds: float, _committed: bool) -> None:
    """What nobody wants to hear of transactions."""


def _noting(forms: set[bytes], keys: Iterator[Key]) -> Iterator[Key]:
    """Passes keys on and notes the forms of their prompts."""
    for key in keys:
        forms.add(key.sort_key[:1])
        yield key


class Journal:
    """A journal on a database.

    Args:
        database: Where it lives; its schema is of this version.
        reach: Told each named point, for tests that end the process there.
        rule: Where orders are cut into groups.
        observe: Told of each transaction: its seconds, and whether it was committed.
    """

    def __init__(
        self,
        database: Database,
        reach: Callable[[str], None] = _nothing,
        rule: GroupRule | None = None,
        observe: Callable[[float, bool], None] = _unobserved,
    ) -> None:
        self._database = database
        self._reach = reach
        self._rule = rule or GroupRule()
        self._writer = Writer(database, reach, observe)
        self._reader = Reader(database)
        self._sealing: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._for_update = database.for_update

    @property
    def shared(self) -> bool:
        """Whether other brokers may work on the same jobs."""
        return self._database.shared

    @property
    def counts(self) -> Counts:
        """What was committed since the start."""
        return self._writer.counts

    @property
    def queued(self) -> int:
        """Changes that wait for the next transaction."""
        return self._writer.queued

    async def close(self) -> None:
        """Commits what waits and gives the database up."""
        await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._reader.close)
        self._database.close()

    # -- jobs ------------------------------------------------------------------------------------------------------

    async def create(
        self,
        tenant: str,
        job_id: str,
        spec: bytes,
        *,
        priority: int,
        deadline: float | None,
        admit: Callable[[TenantUse], None],
    ) -> JobRecord:
        """Makes a job, or returns the one that is there.

        Args:
            tenant: The owner.
            job_id: The client's id.
            spec: Serialized; compared with that of a job of this id.
            priority: Order among the tenant's jobs.
            deadline: Seconds since the epoch.
            admit: Given what the tenant has before a new job; raises where that is enough.

        Raises:
            AlreadyExistsError: there is one of this id with another spec.
        """

        def change(at: Connection) -> JobRecord:
            use = job_table.tenant_use(at, tenant)
            job, new = job_table.create(at, tenant, job_id, spec, priority, deadline)
            if new:
                admit(use)
            return job

        return await self._writer.write("create", change)

    async def job(self, tenant: str, job_id: str) -> JobRecord:
        """Returns a job.

        Raises:
            NotFoundError: this tenant has none of that id.
        """
        return await self._reader.read(lambda at: job_table.by_id(at, tenant, job_id))

    async def jobs(self, tenant: str, *, before: int, count: int) -> list[JobRecord]:
        """Returns jobs of a tenant with numbers below `before`, newest first."""
        return await self._reader.read(lambda at: job_table.page(at, tenant, before, count))

    async def live_jobs(self, count: int) -> list[JobRecord]:
        """Returns jobs that run or are paused, in the order in which they are served."""
        return await self._reader.read(lambda at: job_table.live(at, count))

    async def job_by_number(self, number: int) -> JobRecord | None:
        """Returns a job by the journal's own number; None where it was deleted."""
        return await self._reader.read(lambda at: job_table.by_number(at, number))

    async def shares(self, number: int) -> dict[str, Share]:
        """Returns what each node did for a job, by node."""
        return await self._reader.read(lambda at: job_table.shares(at, number))

    async def costs(self, number: int) -> list[bytes]:
        """Returns what each stretch of work on a job has cost, as it was kept."""
        return await self._reader.read(lambda at: job_table.costs(at, number))

    async def keep_costs(self, number: int, costs: Costs) -> JobRecord | None:
        """Keeps what a stretch of work on a job has cost in the end; returns the job, None where it was deleted."""

        def change(at: Connection) -> JobRecord | None:
            job = job_table.by_number(at, number, self._for_update)
            if job is not None:
                job_table.keep_costs(at, number, costs)
            return job

        return await self._writer.write("costs", change)

    async def set_paused(self, tenant: str, job_id: str, *, paused: bool) -> JobRecord:
        """Stops a job or lets it go on. Idempotent.

        Raises:
            NotFoundError: there is no such job.
            FailedPreconditionError: it takes rows still, or has ended.
        """
        return await self._change_job(
            "pause", tenant, job_id, lambda at, job: job_table.set_paused(at, job, paused=paused)
        )

    async def update(self, tenant: str, job_id: str, *, priority: int | None, deadline: float | None) -> JobRecord:
        """Changes priority or deadline; None leaves it.

        Raises:
            NotFoundError: there is no such job.
            FailedPreconditionError: it has ended.
        """
        return await self._change_job(
            "update", tenant, job_id, lambda at, job: job_table.update(at, job, priority, deadline)
        )

    async def cancel(self, tenant: str, job_id: str, *, why: str, code: int) -> JobRecord:
        """Ends a job: rows without a result count as failed with `code`. Nothing happens where it has ended.

        Raises:
            NotFoundError: there is no such job.
        """
        return await self._change_job("cancel", tenant, job_id, lambda at, job: job_table.cancel(at, job, why, code))

    async def delete(self, tenant: str, job_id: str) -> int:
        """Removes an ended job from sight and returns its number; `sweep` frees what it takes.

        Raises:
            NotFoundError: there is no such job.
            FailedPreconditionError: it has not ended.
        """
        return (await self._change_job("delete", tenant, job_id, job_table.hide, gone=True)).number

    async def pin(self, number: int, digest: str) -> str:
        """Fixes a job to an engine unless it is fixed already; returns the digest in force."""
        return await self._writer.write("pin", lambda at: job_table.pin(at, number, digest))

    async def _change_job(
        self,
        name: str,
        tenant: str,
        job_id: str,
        change: Callable[[Connection, JobRecord], None],
        *,
        gone: bool = False,
    ) -> JobRecord:
        def both(at: Connection) -> JobRecord:
            job = job_table.by_id(at, tenant, job_id, self._for_update)
            change(at, job)
            return job if gone else job_table.by_id(at, tenant, job_id)

        return await self._writer.write(name, both)

    # -- rows ------------------------------------------------------------------------------------------------------

    async def append(
        self, tenant: str, job_id: str, first: int, rows: Sequence[Row], *, admit: Callable[[TenantUse], None]
    ) -> int:
        """Takes rows in and returns how many the job has now. Rows that are there already are compared.

        Raises:
            NotFoundError: there is no such job.
            InvalidArgumentError: rows are missing before the first.
            AlreadyExistsError: a row that is there has other content.
            FailedPreconditionError: the job takes no more rows.
        """

        def change(at: Connection) -> tuple[int, int]:
            job = job_table.by_id(at, tenant, job_id, self._for_update)
            if first + len(rows) > job.rows:
                admit(job_table.tenant_use(at, tenant))
            return job.rows, row_tables.append(at, job, first, rows)

        def counted(counts: Counts, answer: tuple[int, int]) -> None:
            before, after = answer
            counts.accepted += after - before
            counts.failed += sum(1 for row in rows[before - first :] if row.failure) if after > before else 0

        _, durable = await self._writer.write("upload", change, counted)
        return durable

    async def seal(
        self, tenant: str, job_id: str, row_count: int, repeated: Callable[[int, bytes], Result]
    ) -> JobRecord:
        """Puts a job's rows in order and lets it run. Idempotent.

        The order is written piece by piece, so that others commit in between; until the last the job is as it was.

        Args:
            tenant: The owner.
            job_id: The job.
            row_count: Rows that the client sent.
            repeated: Makes the result of a row whose id an earlier row has.

        Raises:
            NotFoundError: there is no such job.
            FailedPreconditionError: the job has another number of rows.
        """
        job = await self.job(tenant, job_id)
        async with self._sealing[job.number]:
            job = await self.job(tenant, job_id)
            if job.rows != row_count:
                raise FailedPreconditionError(
                    f"row_count is {row_count}; job_id {job_id!r} has {job.rows} durable rows: upload the others first",
                    metadata={"durable_rows": str(job.rows)},
                )
            if job.state is State.UPLOADING:
                await self._refuse_repeated(job, repeated)
                await self._put_in_order(job)
                await self._writer.write("seal", lambda at: self._open(at, job))
                await self.drop_keys(job.number, job.rows)
        self._sealing.pop(job.number, None)
        return await self.job(tenant, job_id)

    async def _refuse_repeated(self, job: JobRecord, repeated: Callable[[int, bytes], Result]) -> None:
        def found(at: Connection) -> Iterator[Result]:
            return (repeated(row, row_id) for row, row_id in row_tables.repeated_ids(at, job.number))

        def keep(at: Connection, chunk: Sequence[Result]) -> int:
            self._still_open(at, job)
            return group_tables.keep_failures(at, job.number, chunk)

        def counted(counts: Counts, kept: int) -> None:
            counts.failed += kept

        async with self._reader.chunks(found, row_tables.ORDER_CHUNK) as chunks:
            async for chunk in chunks:
                await self._writer.write("seal", lambda at, chunk=chunk: keep(at, chunk), counted)  # type: ignore[misc]

    async def _put_in_order(self, job: JobRecord) -> None:
        forms: set[bytes] = set()

        def cut(at: Connection) -> Iterator[tuple[Group, list[int]]]:
            return groups(_noting(forms, row_tables.sorted_keys(at, job.number)), self._rule)

        def put(at: Connection, chunk: Sequence[tuple[Group, list[int]]]) -> None:
            self._still_open(at, job)
            row_tables.put_order(at, job.number, chunk)

        await self._writer.write("seal", lambda at: row_tables.forget_order(at, job.number))
        groups_a_chunk = max(row_tables.ORDER_CHUNK // self._rule.rows_max, 1)
        async with self._reader.chunks(cut, groups_a_chunk) as chunks:
            async for chunk in chunks:
                self._reach("seal.middle")
                await self._writer.write("seal", lambda at, chunk=chunk: put(at, chunk))  # type: ignore[misc]
        if len(forms) > 1:
            await self._writer.write("seal", lambda at: row_tables.forget_reach(at, job.number))

    def _still_open(self, at: Connection, job: JobRecord) -> None:
        """Another broker may seal, or end, the same job meanwhile: only one of them writes its order."""
        now = job_table.by_number(at, job.number, self._for_update)
        if now is None or now.state is not State.UPLOADING or now.rows != job.rows:
            raise UnavailableError(f"job_id {job.job_id!r} was changed while it was sealed", retry_after_s=0.1)

    def _open(self, at: Connection, job: JobRecord) -> None:
        self._still_open(at, job)
        now = job_table.by_number(at, job.number)
        if now is None or row_tables.ordered(at, job.number) != now.rows - now.failed:
            raise UnavailableError(f"job_id {job.job_id!r} was sealed by two at once", retry_after_s=0.1)
        if now.failed == now.rows:
            group_tables.complete(at, job.number)
        else:
            job_table.start(at, job.number)

    async def drop_keys(self, number: int, rows: int) -> None:
        """Frees the keys of a sealed job."""
        for first in range(0, rows, row_tables.ORDER_CHUNK):
            await self._writer.write("keys", lambda at, first=first: row_tables.drop_keys(at, number, first))  # type: ignore[misc]

    async def results(self, number: int, first: int, *, count: int, bytes_max: int) -> list[Result]:
        """Returns results of a job from a row on, without gaps."""
        return await self._reader.read(lambda at: row_tables.results(at, number, first, count, bytes_max))

    async def next_result(self, number: int, first: int) -> int | None:
        """Returns the number of the first row at or behind `first` that has a result; None where none has."""
        return await self._reader.read(lambda at: row_tables.next_result(at, number, first))

    async def row_ids(self, number: int, first: int, count: int) -> list[bytes]:
        """Returns ids of a job's rows from one on."""
        return await self._reader.read(lambda at: row_tables.row_ids(at, number, first, count))

    async def find_row(self, number: int, row_id: bytes) -> RowPlace | None:
        """Returns where a row of a job is, by its id; None where there is none."""
        return await self._reader.read(lambda at: lookup.find_row(at, number, row_id))

    # -- groups ----------------------------------------------------------------------------------------------------

    async def enter(self, owner: str, lease_s: float) -> None:
        """Gives a broker its lease; `owner` was never used before."""
        await self._writer.write("lease", lambda at: group_tables.enter(at, owner, lease_s))

    async def renew(self, owner: str, lease_s: float) -> None:
        """Renews a lease, and frees what silent brokers held.

        Raises:
            LeaseLostError: this one's lease has ended: others may have what it held.
        """
        if not await self._writer.write("lease", lambda at: group_tables.renew(at, owner, lease_s)):
            raise LeaseLostError("the lease of this broker has ended")

    async def leave(self, owner: str) -> None:
        """Ends a lease: what the broker held is free at once."""
        await self._writer.write("lease", lambda at: group_tables.leave(at, owner))

    async def claim(self, owner: str, job: int, count: int, held: Collection[int]) -> list[Group]:
        """Takes groups of a job that nobody has, the first in order; none where none is left.

        Groups of this broker that are not among `held` come first, and count: it claimed them and did not take them.

        Raises:
            LeaseLostError: the broker has no lease.
        """
        return await self._writer.write(
            "claim", lambda at: group_tables.claim(at, self._database, owner, job, count, held)
        )

    async def rows_of(self, job: int, group: Group) -> list[StoredRow]:
        """Returns the rows of a group that have no result, in order."""
        return await self._reader.read(lambda at: row_tables.of_group(at, job, group))

    async def rows_at(self, job: int, numbers: Sequence[int]) -> list[StoredRow]:
        """Returns rows by number, at most a few hundred, those left out that have a result."""
        return await self._reader.read(lambda at: row_tables.at_numbers(at, job, numbers))

    async def record(self, owner: str, batches: Sequence[Batch]) -> list[bool]:
        """Keeps results; says of each batch's job whether it has ended, now or before."""

        def change(at: Connection) -> list[Recorded]:
            return [group_tables.record(at, self._database, owner, batch) for batch in batches]

        def counted(counts: Counts, answer: list[Recorded]) -> None:
            counts.finished += sum(each.finished for each in answer)
            counts.failed += sum(each.failed for each in answer)

        return [each.ended for each in await self._writer.write("results", change, counted)]

    # -- housekeeping ----------------------------------------------------------------------------------------------

    async def overdue(self) -> list[JobRecord]:
        """Returns jobs whose deadline has passed and that have not ended."""
        return await self._reader.read(job_table.overdue)

    async def oldest_ended(self, before: float, count: int) -> list[JobRecord]:
        """Returns jobs that ended before a time, in seconds since the epoch, the oldest first."""
        return await self._reader.read(lambda at: job_table.oldest_ended(at, before, count))

    async def hidden(self, count: int) -> Sequence[int]:
        """Returns numbers of deleted jobs that take room still."""
        return await self._reader.read(lambda at: job_table.hidden(at, count))

    async def stale_keys(self) -> list[JobRecord]:
        """Returns sealed jobs whose keys are there still."""

        def query(at: Connection) -> list[JobRecord]:
            found = (job_table.by_number(at, number) for number in row_tables.jobs_with_stale_keys(at))
            return [job for job in found if job is not None]

        return await self._reader.read(query)

    async def stale_chains(self) -> list[int]:
        """Returns numbers of jobs that have ended and whose bound's chains are there still."""
        return await self._reader.read(group_tables.jobs_with_stale_chains)

    async def drop_chains(self, number: int) -> None:
        """Frees what the bound of an ended job was made with."""
        while await self._writer.write(
            "chains", lambda at: group_tables.drop_chains(at, number, row_tables.ORDER_CHUNK)
        ):
            pass

    async def sweep(self, number: int) -> bool:
        """Frees a piece of what a deleted job takes; returns whether anything was left."""
        return await self._writer.write("sweep", lambda at: row_tables.sweep(at, number))

    async def size(self) -> int:
        """Bytes of the rows, results and payloads of all jobs.

        What files take says nothing: a database keeps the room that deleted rows have had.
        """
        return await self._reader.read(job_table.size)
