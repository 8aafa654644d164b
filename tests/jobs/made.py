# SPDX-License-Identifier: Apache-2.0
"""Rows, results and jobs for tests of the journal, without a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.broker.jobs import rules
from services.broker.journal.values import Batch, Result, Row, Share, Spent

if TYPE_CHECKING:
    from services.broker.journal import Journal
    from services.broker.journal.values import JobRecord, TenantUse

TENANT = "t"
SENT = b"spec"


def anything(_use: TenantUse) -> None:
    """A quota without limit."""


def rows(count: int, start: int = 0) -> list[Row]:
    """Rows whose heads repeat every seven rows: arrival order is not the order of their keys."""
    return [made_row(number) for number in range(start, start + count)]


def made_row(number: int) -> Row:
    """One of them."""
    head = b"%c" % (97 + number * 3 % 7) * 24
    return Row(b"row-%d" % number, b"body-%d" % number, head + b"%06d" % number, b"")


def result(number: int, body: bytes = b"", *, failed: bool = False) -> Result:
    """A result of a row."""
    return Result(number, body or b"result-%d" % number, failed=failed)


def batch(job: int, results: list[Result], groups: tuple[int, ...] = ()) -> Batch:
    """Results of rows with ten prompt tokens each."""
    count = len(results)
    spent = Spent(prompt_tokens=10 * count, computed_tokens=4 * count, cached_tokens=6 * count, generated_tokens=count)
    return Batch(job, tuple(results), groups, spent, {"node": Share(count, 4 * count, count)})


async def created(journal: Journal, job_id: str = "job", **changes: Any) -> JobRecord:
    """A job that takes rows."""
    wanted: dict[str, Any] = {"priority": 0, "deadline": None, "admit": anything, **changes}
    return await journal.create(TENANT, job_id, SENT, **wanted)


async def sealed(journal: Journal, count: int, job_id: str = "job") -> JobRecord:
    """A job that runs."""
    await created(journal, job_id)
    await journal.append(TENANT, job_id, 0, rows(count), admit=anything)
    return await journal.seal(TENANT, job_id, count, rules.repeated)


async def work_off(journal: Journal, owner: str, job: int, *, groups: int = 1000) -> list[int]:
    """Claims groups of a job and gives every row a result; returns the rows in the order in which they came."""
    done: list[int] = []
    for _ in range(groups):
        claimed = await journal.claim(owner, job, 1, ())
        if not claimed:
            break
        taken = [row.row for row in await journal.rows_of(job, claimed[0])]
        await journal.record(owner, [batch(job, [result(row) for row in taken], (claimed[0].number,))])
        done += taken
    return done
