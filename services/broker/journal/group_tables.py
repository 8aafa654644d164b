# SPDX-License-Identifier: Apache-2.0
"""Statements about groups: who works on them, under which lease, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.journal import job_table
from services.broker.journal.values import ENDED, Group, Recorded, Result, State
from services.common import reasons
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from services.broker.journal.database import Connection, Database
    from services.broker.journal.values import Batch, Bound


class LeaseLostError(FailedPreconditionError):
    """Others have taken over what this broker held: it has been silent for longer than its lease."""

    default_reason = reasons.LEASE_LOST


def enter(at: Connection, owner: str, lease_s: float) -> None:
    """Gives a broker its lease."""
    at.change("INSERT INTO brokers (owner, lease_until) VALUES (?, ?)", (owner, at.now() + lease_s))


def renew(at: Connection, owner: str, lease_s: float) -> bool:
    """Renews a lease, and frees the groups of brokers whose lease has ended; returns whether this one's had not."""
    now = at.now()
    kept = at.change(
        "UPDATE brokers SET lease_until = ? WHERE owner = ? AND lease_until >= ?", (now + lease_s, owner, now)
    )
    silent = "SELECT owner FROM brokers WHERE lease_until < ?"
    at.change(f"UPDATE row_groups SET owner = '' WHERE owner IN ({silent})", (now,))  # noqa: S608 -- words of ours
    at.change("DELETE FROM brokers WHERE lease_until < ?", (now,))
    return kept == 1


def holds_lease(at: Connection, owner: str) -> bool:
    """Whether a broker has a lease, whose row is then kept until the transaction ends."""
    return at.change("UPDATE brokers SET lease_until = lease_until WHERE owner = ?", (owner,)) == 1


def leave(at: Connection, owner: str) -> None:
    """Ends a lease in order: what the broker held is free at once."""
    at.change("UPDATE row_groups SET owner = '' WHERE owner = ?", (owner,))
    at.change("DELETE FROM brokers WHERE owner = ?", (owner,))


def claim(at: Connection, database: Database, owner: str, job: int, count: int, held: Collection[int]) -> list[Group]:
    """Takes groups of a job that nobody has, the first in order.

    Groups that are this broker's and that it does not hold come first, and count: it could not take them when it
    claimed them, or never heard of it.

    Raises:
        LeaseLostError: the broker has no lease.
    """
    if not holds_lease(at, owner):
        raise LeaseLostError("the lease of this broker has ended")
    of_the_job = "SELECT number, first_place, last_place, reach, counted FROM row_groups WHERE job = ? AND owner = ?"
    own = at.rows(f"{of_the_job} ORDER BY number", (job, owner))
    again = [group for group in own if group[0] not in held]
    free = f"{of_the_job} ORDER BY number LIMIT ?{database.skip_locked}"
    found = at.rows(free, (job, "", max(count - len(again), 0)))
    for number, *_ in found:
        at.change("UPDATE row_groups SET owner = ? WHERE job = ? AND number = ?", (owner, job, number))
    return [
        Group(number, first, last, None if reach < 0 else reach, bool(counted))
        for number, first, last, reach, counted in (*again, *found)
    ]


def record(at: Connection, database: Database, owner: str, batch: Batch) -> Recorded:
    """Keeps results: of two for one row the first.

    A job that was ended meanwhile keeps none of them.
    """
    job = job_table.by_number(at, batch.job, database.for_update)
    if job is None or job.state in ENDED:
        return Recorded(ended=True)
    for number, bound in batch.bounds:
        _count(at, batch.job, number, bound)
    counts = [
        _keep(at, batch.job, [result for result in batch.results if result.failed is failed])
        for failed in (False, True)
    ]
    finished, failed = counts
    spent = batch.spent
    at.change(
        "UPDATE jobs SET finished = finished + ?, failed = failed + ?, size = size + ?, "
        "prompt_tokens = prompt_tokens + ?, computed_tokens = computed_tokens + ?, cached_tokens = cached_tokens + ?, "
        "generated_tokens = generated_tokens + ?, reattempts = reattempts + ? WHERE number = ?",
        (
            finished, failed, sum(map(_size, batch.results)), spent.prompt_tokens,
            spent.computed_tokens, spent.cached_tokens, spent.generated_tokens, spent.reattempts, batch.job,
        ),
    )  # fmt: skip
    for node_id, share in batch.shares.items():
        at.change(
            "INSERT INTO node_shares (job, node_id, row_count, computed_tokens, generated_tokens) "
            "VALUES (?, ?, ?, ?, ?) ON CONFLICT (job, node_id) DO UPDATE SET "
            "row_count = node_shares.row_count + excluded.row_count, "
            "computed_tokens = node_shares.computed_tokens + excluded.computed_tokens, "
            "generated_tokens = node_shares.generated_tokens + excluded.generated_tokens",
            (batch.job, node_id, share.rows, share.computed_tokens, share.generated_tokens),
        )
    if batch.costs is not None:
        job_table.keep_costs(at, batch.job, batch.costs)
    for group in batch.groups:
        at.change("DELETE FROM row_groups WHERE job = ? AND number = ? AND owner = ?", (batch.job, group, owner))
    if job.finished + job.failed + finished + failed < job.rows:
        return Recorded(ended=False, finished=finished, failed=failed)
    complete(at, batch.job)
    return Recorded(ended=True, finished=finished, failed=failed)


def _count(at: Connection, job: int, number: int, bound: Bound) -> None:
    """Adds a group to the bound of its job, once, whoever had it."""
    if not at.change("UPDATE row_groups SET counted = 1 WHERE job = ? AND number = ? AND counted = 0", (job, number)):
        return
    blocks, ends = (
        at.insert("bound_chains", ("job", "chain"), [(job, chain) for chain in chains], keep_old=True) if chains else 0
        for chains in (bound.blocks, bound.ends)
    )
    at.change(
        "UPDATE jobs SET bound_tokens = bound_tokens + ? WHERE number = ? AND bound_tokens >= 0",
        (bound.tokens + bound.block_tokens * blocks - ends, job),
    )


def drop_chains(at: Connection, job: int, count: int) -> bool:
    """Removes a piece of what the bound of an ended job was made with; returns whether anything was left."""
    piece = "SELECT chain FROM bound_chains WHERE job = ? LIMIT ?"
    return at.change(f"DELETE FROM bound_chains WHERE job = ? AND chain IN ({piece})", (job, job, count)) > 0  # noqa: S608


def jobs_with_stale_chains(at: Connection) -> list[int]:
    """Returns jobs that have ended and whose bound's chains are there still."""
    ended = ", ".join(str(int(state)) for state in ENDED)
    sql = f"SELECT number FROM jobs WHERE state IN ({ended}) AND EXISTS (SELECT 1 FROM bound_chains WHERE job = number)"  # noqa: S608
    return [int(number) for (number,) in at.rows(sql)]


def complete(at: Connection, job: int) -> None:
    """Ends a job whose rows have all ended."""
    at.change(
        "UPDATE jobs SET state = ?, state_reason = '', ended = ? WHERE number = ?",
        (int(State.COMPLETED), at.now(), job),
    )
    at.change("DELETE FROM row_groups WHERE job = ?", (job,))


def _size(result: Result) -> int:
    return len(result.body) + (result.payload.size if result.payload is not None else 0)


def _keep(at: Connection, job: int, results: Sequence[Result]) -> int:
    if not results:
        return 0
    return at.insert(
        "results",
        ("job", "row_number", "body", "shard", "shard_offset", "shard_size", "crc32"),
        [(job, result.row, result.body, *(result.payload or ("", 0, 0, 0))) for result in results],
        keep_old=True,
    )


def keep_failures(at: Connection, job: int, failures: Sequence[Result]) -> int:
    """Keeps results of rows that will never be dispatched; returns how many had none."""
    kept = _keep(at, job, failures)
    at.change("UPDATE jobs SET failed = failed + ? WHERE number = ?", (kept, job))
    return kept
