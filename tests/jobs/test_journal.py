# SPDX-License-Identifier: Apache-2.0
"""What a journal promises, on both databases."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from services.broker.jobs import rules
from services.broker.journal import Journal, LeaseLostError, open_database
from services.broker.journal.values import ENDED, State, TenantUse
from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from tests.jobs.conftest import SMALL_GROUPS
from tests.jobs.made import SENT, TENANT, anything, batch, created, made_row, result, rows, sealed, work_off
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Generator

LEASE_S = 30.0


async def test_a_job_is_made_once(journal: Journal) -> None:
    first = await created(journal)
    assert (first.state, first.rows, first.spec) == (State.UPLOADING, 0, SENT)
    assert await created(journal) == first
    with pytest.raises(AlreadyExistsError) as caught:
        await journal.create(TENANT, "job", b"another", priority=0, deadline=None, admit=anything)
    assert caught.value.reason == "ID_IN_USE"
    other = await journal.create("other tenant", "job", b"another", priority=0, deadline=None, admit=anything)
    assert other.number != first.number


async def test_a_quota_stops_new_jobs_and_new_rows_but_nothing_that_is_there(journal: Journal) -> None:
    def full(use: TenantUse) -> None:
        raise ResourceExhaustedError(f"{use.open_jobs} jobs, {use.rows} rows, {use.size} bytes")

    await created(journal)
    assert await journal.append(TENANT, "job", 0, rows(3), admit=anything) == 3
    with pytest.raises(ResourceExhaustedError, match="1 jobs, 3 rows, 33 bytes"):
        await created(journal, "second", admit=full)
    with pytest.raises(NotFoundError):
        await journal.job(TENANT, "second")
    assert (await created(journal, admit=full)).rows == 3
    assert await journal.append(TENANT, "job", 1, rows(2, 1), admit=full) == 3
    with pytest.raises(ResourceExhaustedError):
        await journal.append(TENANT, "job", 3, rows(1, 3), admit=full)
    assert (await journal.job(TENANT, "job")).rows == 3


async def test_rows_that_are_sent_again_are_compared(journal: Journal) -> None:
    await created(journal)
    assert await journal.append(TENANT, "job", 0, rows(10), admit=anything) == 10
    assert await journal.append(TENANT, "job", 4, rows(10, 4), admit=anything) == 14
    with pytest.raises(AlreadyExistsError) as caught:
        await journal.append(TENANT, "job", 12, [made_row(12), made_row(99)], admit=anything)
    assert caught.value.metadata == {"row": "13"}
    with pytest.raises(InvalidArgumentError, match="the job has 14 rows"):
        await journal.append(TENANT, "job", 15, rows(1, 15), admit=anything)
    with pytest.raises(NotFoundError):
        await journal.append(TENANT, "none", 0, rows(1), admit=anything)
    assert (await journal.job(TENANT, "job")).rows == 14


async def test_a_refused_part_leaves_its_neighbours_of_the_same_commit_alone(journal: Journal) -> None:
    await created(journal)
    blocker = asyncio.create_task(journal.append(TENANT, "job", 0, rows(1), admit=anything))
    ends = await asyncio.gather(
        blocker,
        journal.append(TENANT, "job", 7, rows(1, 7), admit=anything),
        journal.append(TENANT, "job", 1, rows(1, 1), admit=anything),
        return_exceptions=True,
    )
    assert [ends[0], type(ends[1]), ends[2]] == [1, InvalidArgumentError, 2]


async def test_sealing_orders_rows_by_their_keys_and_a_job_without_rows_is_done(journal: Journal) -> None:
    await created(journal)
    with pytest.raises(FailedPreconditionError, match="has 0 durable rows"):
        await journal.seal(TENANT, "job", 5, rules.repeated)
    job = await sealed(journal, 100)
    assert job.state is State.RUNNING
    assert await journal.seal(TENANT, "job", 100, rules.repeated) == job
    with pytest.raises(FailedPreconditionError, match="takes no rows"):
        await journal.append(TENANT, "job", 100, rows(1, 100), admit=anything)
    assert await journal.append(TENANT, "job", 90, rows(10, 90), admit=anything) == 100
    await journal.enter("a", LEASE_S)
    done = await work_off(journal, "a", job.number)
    assert done == sorted(range(100), key=lambda number: made_row(number).sort_key)
    await created(journal, "empty")
    assert (await journal.seal(TENANT, "empty", 0, rules.repeated)).state is State.COMPLETED


async def test_groups_hold_what_shares_a_head_and_are_bounded(journal: Journal) -> None:
    job = await sealed(journal, 200)
    await journal.enter("a", LEASE_S)
    groups = await journal.claim("a", job.number, 1000, ())
    assert [group.first for group in groups] == [0, *(group.last + 1 for group in groups[:-1])]
    assert groups[-1].last == 199
    assert all(group.last - group.first < SMALL_GROUPS.rows_max for group in groups)
    heads = [{made_row(row.row).sort_key[:24] for row in await journal.rows_of(job.number, group)}
             for group in groups]  # fmt: skip
    # 28 or 29 rows a head: two groups each, and none has rows of two heads.
    assert [len(each) for each in heads] == [1] * len(groups)
    assert len(groups) == 14


async def test_a_repeated_id_fails_the_later_row_only(journal: Journal) -> None:
    await created(journal)
    sent = rows(6)
    sent[4] = sent[4]._replace(row_id=b"row-1")
    await journal.append(TENANT, "job", 0, sent, admit=anything)
    job = await journal.seal(TENANT, "job", 6, rules.repeated)
    assert (job.failed, job.finished, job.state) == (1, 0, State.RUNNING)
    await journal.enter("a", LEASE_S)
    assert sorted(await work_off(journal, "a", job.number)) == [0, 1, 2, 3, 5]
    job = await journal.job(TENANT, "job")
    assert (job.failed, job.finished, job.state) == (1, 5, State.COMPLETED)


async def test_of_two_results_for_a_row_the_first_is_kept_and_counted(journal: Journal) -> None:
    job = await sealed(journal, 3)
    await journal.enter("a", LEASE_S)
    assert await journal.record("a", [batch(job.number, [result(0, b"first"), result(1)])]) == [False]
    assert await journal.record("a", [batch(job.number, [result(0, b"second"), result(1, failed=True)])]) == [False]
    now = await journal.job(TENANT, "job")
    assert (now.finished, now.failed) == (2, 0)
    kept = await journal.results(job.number, 0, count=10, bytes_max=1 << 20)
    assert [each.body for each in kept] == [b"first", b"result-1"]
    assert await journal.record("a", [batch(job.number, [result(2, failed=True)])]) == [True]
    now = await journal.job(TENANT, "job")
    assert (now.finished, now.failed, now.state) == (2, 1, State.COMPLETED)
    assert now.ended is not None
    assert (await journal.shares(job.number))["node"].rows == 5
    assert now.spent.prompt_tokens == 50


async def test_results_are_read_without_gaps_and_within_bounds(journal: Journal) -> None:
    job = await sealed(journal, 10)
    await journal.enter("a", LEASE_S)
    await journal.record("a", [batch(job.number, [result(row, b"x" * 100) for row in (0, 1, 2, 4, 5)])])

    async def read(first: int, count: int = 100, bytes_max: int = 1 << 20) -> list[int]:
        return [each.row for each in await journal.results(job.number, first, count=count, bytes_max=bytes_max)]

    assert await read(0) == [0, 1, 2]
    assert await read(1, count=1) == [1]
    assert await read(0, bytes_max=250) == [0, 1]
    assert await read(0, bytes_max=1) == [0]
    assert await read(3) == []
    assert await read(4) == [4, 5]
    assert await journal.next_result(job.number, 3) == 4
    assert await journal.next_result(job.number, 6) is None
    assert await journal.row_ids(job.number, 8, 5) == [b"row-8", b"row-9"]


async def test_a_claimed_group_is_nobody_elses_until_its_lease_has_ended(journal: Journal) -> None:
    job = await sealed(journal, 64)
    await journal.enter("a", LEASE_S)
    await journal.enter("b", LEASE_S)
    of_a = await journal.claim("a", job.number, 2, ())
    of_b = await journal.claim("b", job.number, 1000, ())
    assert {group.number for group in of_a}.isdisjoint(group.number for group in of_b)
    assert await journal.claim("b", job.number, 1000, {group.number for group in of_b}) == []
    await journal.renew("a", 0.001)

    async def taken_over() -> bool:
        await journal.renew("b", LEASE_S)
        return await journal.claim("b", job.number, 1000, {group.number for group in of_b}) == of_a

    await wait_until(taken_over)
    with pytest.raises(LeaseLostError):
        await journal.claim("a", job.number, 1, ())
    with pytest.raises(LeaseLostError):
        await journal.renew("a", LEASE_S)
    # What the silent one had computed is still worth keeping, and its end of a group that is another's changes nothing.
    rows_of = [row.row for row in await journal.rows_of(job.number, of_a[0])]
    await journal.record("a", [batch(job.number, [result(row) for row in rows_of], (of_a[0].number,))])
    assert await journal.rows_of(job.number, of_a[0]) == []
    # It is the other's still, and comes again to one who does not know.
    assert of_a[0] in await journal.claim("b", job.number, 0, ())


async def test_what_was_claimed_and_not_taken_comes_again_in_the_place_of_more(journal: Journal) -> None:
    job = await sealed(journal, 64)
    await journal.enter("a", LEASE_S)
    first = await journal.claim("a", job.number, 2, ())
    assert [group.number for group in first] == [0, 1]
    assert await journal.claim("a", job.number, 2, ()) == first
    assert [group.number for group in await journal.claim("a", job.number, 3, {0})] == [1, 2, 3]


async def test_leaving_frees_at_once(journal: Journal) -> None:
    job = await sealed(journal, 64)
    await journal.enter("a", LEASE_S)
    await journal.enter("b", LEASE_S)
    of_a = await journal.claim("a", job.number, 1000, ())
    await journal.leave("a")
    assert await journal.claim("b", job.number, 1000, ()) == of_a


async def test_a_cancelled_job_keeps_what_it_has_and_takes_nothing_more(journal: Journal) -> None:
    job = await sealed(journal, 10)
    await journal.enter("a", LEASE_S)
    await journal.record("a", [batch(job.number, [result(3)])])
    ended = await journal.cancel(TENANT, "job", why="enough", code=1)
    assert (ended.state, ended.finished, ended.failed, ended.state_reason) == (State.CANCELLED, 1, 9, "enough")
    assert await journal.cancel(TENANT, "job", why="again", code=4) == ended
    assert await journal.record("a", [batch(job.number, [result(4)])]) == [True]
    assert await journal.claim("a", job.number, 10, ()) == []
    assert await journal.results(job.number, 4, count=10, bytes_max=1000) == []
    with pytest.raises(FailedPreconditionError):
        await journal.set_paused(TENANT, "job", paused=True)
    with pytest.raises(FailedPreconditionError):
        await journal.update(TENANT, "job", priority=1, deadline=None)


async def test_pause_priority_deadline_and_pin(journal: Journal) -> None:
    first = await sealed(journal, 1, "first")
    await sealed(journal, 1, "second")
    assert [job.job_id for job in await journal.live_jobs(10)] == ["first", "second"]
    await journal.update(TENANT, "second", priority=5, deadline=12.0)
    assert [job.job_id for job in await journal.live_jobs(10)] == ["second", "first"]
    assert [job.job_id for job in await journal.overdue()] == ["second"]
    assert (await journal.update(TENANT, "second", priority=None, deadline=None)).priority == 5
    assert (await journal.set_paused(TENANT, "first", paused=True)).state is State.PAUSED
    assert (await journal.set_paused(TENANT, "first", paused=True)).state is State.PAUSED
    assert (await journal.set_paused(TENANT, "first", paused=False)).state is State.RUNNING
    assert await journal.pin(first.number, "one") == "one"
    assert await journal.pin(first.number, "two") == "one"


async def test_lists_go_from_new_to_old_a_page_at_a_time(journal: Journal) -> None:
    for number in range(5):
        await created(journal, f"job-{number}")
    page = await journal.jobs(TENANT, before=2**62, count=3)
    assert [job.job_id for job in page] == ["job-4", "job-3", "job-2"]
    rest = await journal.jobs(TENANT, before=page[-1].number, count=3)
    assert [job.job_id for job in rest] == ["job-1", "job-0"]
    assert await journal.jobs("nobody", before=2**62, count=3) == []


async def test_a_deleted_job_is_gone_and_leaves_nothing(journal: Journal) -> None:
    job = await sealed(journal, 50)
    with pytest.raises(FailedPreconditionError, match="cancel it first"):
        await journal.delete(TENANT, "job")
    await journal.enter("a", LEASE_S)
    await work_off(journal, "a", job.number)
    assert [each.number for each in await journal.oldest_ended(2**40, 10)] == [job.number]
    assert await journal.delete(TENANT, "job") == job.number
    with pytest.raises(NotFoundError):
        await journal.job(TENANT, "job")
    assert await journal.job_by_number(job.number) is None
    again = await created(journal)
    assert again.number > job.number
    while await journal.sweep(job.number):
        pass
    assert await journal.hidden(10) == []
    assert await journal.row_ids(job.number, 0, 100) == []
    assert await journal.results(job.number, 0, count=100, bytes_max=1000) == []


async def test_everything_is_there_after_the_journal_was_opened_anew(where: str) -> None:
    first = Journal(open_database(where), rule=SMALL_GROUPS)
    job = await sealed(first, 40)
    await first.enter("a", LEASE_S)
    await work_off(first, "a", job.number, groups=2)
    before = await first.job(TENANT, "job")
    await first.leave("a")
    await first.close()
    second = Journal(open_database(where), rule=SMALL_GROUPS)
    try:
        assert await second.job(TENANT, "job") == before
        await second.enter("b", LEASE_S)
        rest = await work_off(second, "b", job.number)
        after = await second.job(TENANT, "job")
        assert len(rest) == 40 - before.finished
        assert (after.finished, after.state) == (40, State.COMPLETED)
        assert after.state in ENDED
    finally:
        await second.close()


async def test_many_workers_on_one_journal_do_every_row_once(where: str) -> None:
    journal = Journal(open_database(where), rule=SMALL_GROUPS)
    journals = [journal]
    if journal.shared:
        journals += [Journal(open_database(where), rule=SMALL_GROUPS) for _ in range(3)]
    try:
        job = await sealed(journal, 300)

        async def one(at: Journal, owner: str) -> list[int]:
            await at.enter(owner, LEASE_S)
            return await work_off(at, owner, job.number)

        parts = await asyncio.gather(*(one(at, f"{n}-{k}") for n, at in enumerate(journals) for k in range(2)))
        assert sorted(row for part in parts for row in part) == list(range(300))
        now = await journal.job(TENANT, "job")
        assert (now.finished, now.state, now.spent.prompt_tokens) == (300, State.COMPLETED, 3000)
    finally:
        for each in journals:
            await each.close()


def test_what_sqlite_sorts_lies_beside_the_journal(tmp_path: Path) -> None:
    """As long as the keys of a job, which is more than a pod's folder for temporary files may hold."""
    folder = tmp_path / "it's here"
    database = open_database(str(folder / "journal.db"))
    connection = database.connect()
    try:
        twelve_mib = (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 6000) "
            "SELECT i, hex(randomblob(1024)) AS sort_key FROM n ORDER BY sort_key"
        )
        with closing(cast("Generator[object]", connection.stream(twelve_mib))) as sorting:
            next(sorting)
            own = Path("/proc/self/fd")
            held = {os.readlink(own / number) for number in os.listdir(own) if (own / number).is_symlink()}
        assert [each for each in held if each.startswith(f"{folder}/") and each.endswith("(deleted)")]
    finally:
        connection.close()
        database.close()
