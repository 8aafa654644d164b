# SPDX-License-Identifier: Apache-2.0
"""Statements about jobs as a whole. Each runs inside its caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.journal.values import ENDED, JobRecord, Share, Spent, State, TenantUse
from services.common import reasons
from services.common.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.broker.journal.database import Connection, Values
    from services.broker.journal.values import Costs

_COLUMNS = (
    "number, tenant, job_id, spec, priority, deadline, state, state_reason, row_count, finished, failed, size, "
    "engine_digest, created, ended, end_code, bound_tokens, prompt_tokens, computed_tokens, cached_tokens, "
    "generated_tokens, reattempts"
)
_ENDED = ", ".join(str(int(state)) for state in ENDED)
_LIVE = ", ".join(str(int(state)) for state in (State.RUNNING, State.PAUSED))


def create(
    at: Connection, tenant: str, job_id: str, spec: bytes, priority: int, deadline: float | None
) -> tuple[JobRecord, bool]:
    """Makes a job, or returns the one of this id; and whether it is new.

    Raises:
        AlreadyExistsError: there is one of this id with another spec.
    """
    found = at.rows(f"SELECT {_COLUMNS} FROM jobs WHERE tenant = ? AND job_id = ?", (tenant, job_id))  # noqa: S608
    if found:
        job = _record(found[0])
        if job.spec != spec:
            raise AlreadyExistsError(
                f"job_id {job_id!r} is a job with another spec; choose another id, or delete the job",
                reason=reasons.ID_IN_USE,
            )
        return job, False
    at.change(
        "INSERT INTO jobs (tenant, job_id, spec, priority, deadline, state, state_reason, row_count, finished, failed, "
        "size, engine_digest, created, end_code, prompt_tokens, computed_tokens, cached_tokens, generated_tokens, "
        "reattempts) VALUES (?, ?, ?, ?, ?, ?, '', 0, 0, 0, 0, '', ?, 0, 0, 0, 0, 0, 0)",
        (tenant, job_id, spec, priority, deadline, int(State.UPLOADING), at.now()),
    )
    return by_id(at, tenant, job_id), True


def by_id(at: Connection, tenant: str, job_id: str, ending: str = "") -> JobRecord:
    """Returns a job by the client's id.

    Args:
        at: Where.
        tenant: The owner.
        job_id: The id.
        ending: `Database.for_update` where the transaction goes on to change it.

    Raises:
        NotFoundError: this tenant has none of that id.
    """
    found = at.rows(f"SELECT {_COLUMNS} FROM jobs WHERE tenant = ? AND job_id = ?{ending}", (tenant, job_id))  # noqa: S608
    if not found:
        raise NotFoundError(f"job_id {job_id!r} is no job of this tenant", reason=reasons.JOB_UNKNOWN)
    return _record(found[0])


def by_number(at: Connection, number: int, ending: str = "") -> JobRecord | None:
    """Returns a job by its number; None where it was deleted."""
    found = at.rows(f"SELECT {_COLUMNS} FROM jobs WHERE number = ? AND job_id IS NOT NULL{ending}", (number,))  # noqa: S608
    return _record(found[0]) if found else None


def page(at: Connection, tenant: str, before: int, count: int) -> list[JobRecord]:
    """Returns jobs of a tenant with numbers below `before`, newest first."""
    sql = f"SELECT {_COLUMNS} FROM jobs WHERE tenant = ? AND job_id IS NOT NULL AND number < ? ORDER BY number DESC LIMIT ?"  # noqa: S608, E501
    return [_record(found) for found in at.rows(sql, (tenant, before, count))]


def live(at: Connection, count: int) -> list[JobRecord]:
    """Returns jobs that run or are paused, in the order in which they are served."""
    sql = f"SELECT {_COLUMNS} FROM jobs WHERE state IN ({_LIVE}) AND job_id IS NOT NULL ORDER BY priority DESC, number LIMIT ?"  # noqa: S608, E501
    return [_record(found) for found in at.rows(sql, (count,))]


def overdue(at: Connection) -> list[JobRecord]:
    """Returns jobs whose deadline has passed and that have not ended."""
    sql = f"SELECT {_COLUMNS} FROM jobs WHERE deadline < ? AND state NOT IN ({_ENDED}) AND job_id IS NOT NULL"  # noqa: S608
    return [_record(found) for found in at.rows(sql, (at.now(),))]


def start(at: Connection, number: int) -> None:
    """Lets a sealed job run."""
    at.change("UPDATE jobs SET state = ? WHERE number = ?", (int(State.RUNNING), number))


def set_paused(at: Connection, job: JobRecord, *, paused: bool) -> None:
    """Stops a job that runs, or lets a stopped one go on; as it is wanted already, nothing happens.

    Raises:
        FailedPreconditionError: the job takes rows still, or has ended.
    """
    wanted = State.PAUSED if paused else State.RUNNING
    if job.state not in (State.RUNNING, State.PAUSED):
        raise FailedPreconditionError(
            f"job_id {job.job_id!r} is {job.state.name}; only a job that is RUNNING or PAUSED can be paused or resumed"
        )
    at.change("UPDATE jobs SET state = ? WHERE number = ?", (int(wanted), job.number))


def update(at: Connection, job: JobRecord, priority: int | None, deadline: float | None) -> None:
    """Changes what may be changed.

    Raises:
        FailedPreconditionError: the job has ended.
    """
    if job.state in ENDED:
        raise FailedPreconditionError(f"job_id {job.job_id!r} has ended: it is {job.state.name}")
    at.change(
        "UPDATE jobs SET priority = ?, deadline = ? WHERE number = ?",
        (
            job.priority if priority is None else priority,
            job.deadline if deadline is None else deadline,
            job.number,
        ),
    )


def cancel(at: Connection, job: JobRecord, why: str, code: int) -> None:
    """Ends a job; rows without a result count as failed from now on. Nothing happens where it has ended."""
    if job.state in ENDED:
        return
    at.change(
        "UPDATE jobs SET state = ?, state_reason = ?, end_code = ?, ended = ?, failed = row_count - finished "
        "WHERE number = ?",
        (int(State.CANCELLED), why, code, at.now(), job.number),
    )
    at.change("DELETE FROM row_groups WHERE job = ?", (job.number,))


def hide(at: Connection, job: JobRecord) -> None:
    """Deletes an ended job as far as anybody can see; `sweep` removes what it held.

    Raises:
        FailedPreconditionError: it has not ended.
    """
    if job.state not in ENDED:
        raise FailedPreconditionError(
            f"job_id {job.job_id!r} is {job.state.name}; only a job that has ended can be deleted: cancel it first"
        )
    at.change("UPDATE jobs SET job_id = NULL WHERE number = ?", (job.number,))


def pin(at: Connection, number: int, digest: str) -> str:
    """Fixes a job to an engine, unless it is fixed already; returns the digest in force."""
    at.change("UPDATE jobs SET engine_digest = ? WHERE number = ? AND engine_digest = ''", (digest, number))
    found = at.rows("SELECT engine_digest FROM jobs WHERE number = ?", (number,))
    return str(found[0][0]) if found else digest


def shares(at: Connection, number: int) -> dict[str, Share]:
    """Returns what each node did for a job."""
    found = at.rows(
        "SELECT node_id, row_count, computed_tokens, generated_tokens FROM node_shares WHERE job = ? ORDER BY node_id",
        (number,),
    )
    return {node_id: Share(*counts) for node_id, *counts in found}


def costs(at: Connection, number: int) -> list[bytes]:
    """Returns what each stretch of work on a job has cost."""
    found = at.rows("SELECT body FROM job_costs WHERE job = ? ORDER BY stretch", (number,))
    return [bytes(body) for (body,) in found]


def keep_costs(at: Connection, number: int, costs: Costs) -> None:
    """Keeps what a stretch of work on a job has cost up to now."""
    at.change(
        "INSERT INTO job_costs (job, stretch, body) VALUES (?, ?, ?) "
        "ON CONFLICT (job, stretch) DO UPDATE SET body = excluded.body",
        (number, *costs),
    )


def tenant_use(at: Connection, tenant: str) -> TenantUse:
    """Returns what a tenant has."""
    sql = (
        f"SELECT COUNT(CASE WHEN state NOT IN ({_ENDED}) THEN 1 END), COALESCE(SUM(row_count), 0), "  # noqa: S608
        "COALESCE(SUM(size), 0) FROM jobs WHERE tenant = ? AND job_id IS NOT NULL"
    )
    open_jobs, rows, size = at.rows(sql, (tenant,))[0]
    return TenantUse(int(open_jobs), int(rows), int(size))


def size(at: Connection) -> int:
    """Returns the bytes of rows, results and payloads of all jobs."""
    return int(at.rows("SELECT COALESCE(SUM(size), 0) FROM jobs WHERE job_id IS NOT NULL")[0][0])


def oldest_ended(at: Connection, before: float, count: int) -> list[JobRecord]:
    """Returns jobs that ended before a time, the oldest first."""
    sql = f"SELECT {_COLUMNS} FROM jobs WHERE state IN ({_ENDED}) AND job_id IS NOT NULL AND ended < ? ORDER BY ended LIMIT ?"  # noqa: S608, E501
    return [_record(found) for found in at.rows(sql, (before, count))]


def hidden(at: Connection, count: int) -> Sequence[int]:
    """Returns numbers of deleted jobs whose rows are there still."""
    return [int(number) for (number,) in at.rows("SELECT number FROM jobs WHERE job_id IS NULL LIMIT ?", (count,))]


def _record(found: Values) -> JobRecord:
    return JobRecord(
        number=found[0], tenant=found[1], job_id=found[2], spec=bytes(found[3]), priority=found[4], deadline=found[5],
        state=State(found[6]), state_reason=found[7], rows=found[8], finished=found[9], failed=found[10],
        size=found[11], engine_digest=found[12], created=found[13], ended=found[14], end_code=found[15],
        bound_tokens=found[16], spent=Spent(*found[17:22]),
    )  # fmt: skip
