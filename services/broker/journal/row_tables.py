# SPDX-License-Identifier: Apache-2.0
"""Statements about rows: in, put in order, out. Each runs inside its caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.journal import group_tables
from services.broker.journal.order import Key
from services.broker.journal.values import JobRecord, Payload, Result, Row, State, StoredRow
from services.common import reasons
from services.common.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.broker.journal.database import Connection, Values
    from services.broker.journal.values import Group

ORDER_CHUNK = 16_384
"""Rows of an order, or of keys, that are written or removed in one part."""


def append(at: Connection, job: JobRecord, first: int, rows: Sequence[Row]) -> int:
    """Takes rows in, of which the first may be there already; returns how many the job has now.

    Raises:
        InvalidArgumentError: rows are missing before the first.
        AlreadyExistsError: a row that is there has other content.
        FailedPreconditionError: the job takes no more rows.
    """
    if first > job.rows:
        raise InvalidArgumentError.of(
            [Violation("first_row", f"is {first}; the job has {job.rows} rows: go on from there")]
        )
    known = min(job.rows - first, len(rows))
    if known:
        _compare(at, job, first, rows[:known])
    new = rows[known:]
    if not new:
        return job.rows
    if job.state is not State.UPLOADING:
        raise FailedPreconditionError(
            f"job_id {job.job_id!r} is {job.state.name} and takes no rows beyond its {job.rows}"
        )
    numbered = list(enumerate(new, job.rows))
    at.insert(
        "rows_in",
        ("job", "row_number", "row_id", "body"),
        [(job.number, number, row.row_id, row.body) for number, row in numbered],
    )
    keys = [(job.number, number, len(row.body), row.sort_key) for number, row in numbered if not row.failure]
    if keys:
        at.insert("row_keys", ("job", "row_number", "size", "sort_key"), keys)
    failures = [(job.number, number, row.failure) for number, row in numbered if row.failure]
    if failures:
        at.insert("results", ("job", "row_number", "body"), failures)
    size = sum(len(row.row_id) + len(row.body) + len(row.failure) for row in new)
    at.change(
        "UPDATE jobs SET row_count = row_count + ?, failed = failed + ?, size = size + ? WHERE number = ?",
        (len(new), len(failures), size, job.number),
    )
    return job.rows + len(new)


def _compare(at: Connection, job: JobRecord, first: int, rows: Sequence[Row]) -> None:
    stored = at.rows(
        "SELECT row_number, row_id, body FROM rows_in WHERE job = ? AND row_number >= ? AND row_number < ? "
        "ORDER BY row_number",
        (job.number, first, first + len(rows)),
    )
    for (number, row_id, body), row in zip(stored, rows, strict=True):
        if bytes(row_id) != row.row_id or bytes(body) != row.body:
            raise AlreadyExistsError(
                f"row {number} of job_id {job.job_id!r} is there with other content", reason=reasons.ID_IN_USE,
                metadata={"row": str(number)},
            )  # fmt: skip


def repeated_ids(at: Connection, job: int) -> Iterator[tuple[int, bytes]]:
    """Yields each row whose id an earlier row has, with the id."""
    sql = (
        "SELECT row_number, row_id FROM (SELECT row_number, row_id, ROW_NUMBER() OVER (PARTITION BY row_id ORDER BY "
        "row_number) AS nth FROM rows_in WHERE job = ?) AS numbered WHERE nth > 1 ORDER BY row_number"
    )
    for number, row_id in at.stream(sql, (job,)):
        yield number, bytes(row_id)


def sorted_keys(at: Connection, job: int) -> Iterator[Key]:
    """Yields the keys of the rows that have no result, in order; the database sorts."""
    sql = (
        "SELECT row_number, size, sort_key FROM row_keys WHERE job = ? AND NOT EXISTS (SELECT 1 FROM results WHERE "
        "results.job = row_keys.job AND results.row_number = row_keys.row_number) ORDER BY sort_key, row_number"
    )
    for number, size, key in at.stream(sql, (job,)):
        yield Key(number, size, bytes(key))


def forget_order(at: Connection, job: int) -> None:
    """Removes what an earlier attempt to seal a job has left."""
    at.change("DELETE FROM row_order WHERE job = ?", (job,))
    at.change("DELETE FROM row_groups WHERE job = ?", (job,))


def put_order(at: Connection, job: int, cut: Sequence[tuple[Group, list[int]]]) -> None:
    """Writes a piece of a job's order."""
    places = [(job, place, row) for group, rows in cut for place, row in enumerate(rows, group.first)]
    at.insert("row_order", ("job", "place", "row_number"), places)
    at.insert(
        "row_groups",
        ("job", "number", "first_place", "last_place", "owner", "reach"),
        [
            (job, group.number, group.first, group.last, "", -1 if group.reach is None else group.reach)
            for group, _ in cut
        ],
    )


def forget_reach(at: Connection, job: int) -> None:
    """Says of all groups of a job that their keys do not tell what they share with others."""
    at.change("UPDATE row_groups SET reach = -1 WHERE job = ?", (job,))


def ordered(at: Connection, job: int) -> int:
    """Returns how many rows of a job have a place."""
    return int(at.rows("SELECT COUNT(*) FROM row_order WHERE job = ?", (job,))[0][0])


def drop_keys(at: Connection, job: int, first: int) -> None:
    """Removes keys of a piece of a job's rows; they have served once it is sealed."""
    at.change(
        "DELETE FROM row_keys WHERE job = ? AND row_number >= ? AND row_number < ?", (job, first, first + ORDER_CHUNK)
    )


def jobs_with_stale_keys(at: Connection) -> list[int]:
    """Returns jobs that are sealed and have keys still: a broker ended between the two."""
    sql = (
        "SELECT number FROM jobs WHERE state <> ? AND EXISTS (SELECT 1 FROM row_keys WHERE row_keys.job = jobs.number)"
    )
    return [int(number) for (number,) in at.rows(sql, (int(State.UPLOADING),))]


def of_group(at: Connection, job: int, group: Group) -> list[StoredRow]:
    """Returns the rows of a group that have no result, in order."""
    sql = (
        "SELECT rows_in.row_number, row_id, rows_in.body FROM row_order JOIN rows_in ON rows_in.job = row_order.job "
        "AND rows_in.row_number = row_order.row_number LEFT JOIN results ON results.job = row_order.job AND "
        "results.row_number = row_order.row_number WHERE row_order.job = ? AND place >= ? AND place <= ? "
        "AND results.job IS NULL ORDER BY place"
    )
    return [_stored(found) for found in at.rows(sql, (job, group.first, group.last))]


def at_numbers(at: Connection, job: int, numbers: Sequence[int]) -> list[StoredRow]:
    """Returns rows by number, those left out that have a result."""
    marks = ", ".join("?" * len(numbers))
    sql = (
        f"SELECT row_number, row_id, body FROM rows_in WHERE job = ? AND row_number IN ({marks}) AND NOT EXISTS "  # noqa: S608
        "(SELECT 1 FROM results WHERE results.job = rows_in.job AND results.row_number = rows_in.row_number) "
        "ORDER BY row_number"
    )
    return [_stored(found) for found in at.rows(sql, (job, *numbers))]


def results(at: Connection, job: int, first: int, count: int, bytes_max: int) -> list[Result]:
    """Returns results from a row on, without gaps, until the count or, with at least one, the bytes are reached."""
    sql = (
        "SELECT row_number, body, shard, shard_offset, shard_size, crc32 FROM results WHERE job = ? AND "
        "row_number >= ? ORDER BY row_number LIMIT ?"
    )
    taken: list[Result] = []
    size = 0
    for number, body, shard, offset, length, crc32 in at.stream(sql, (job, first, count)):
        size += len(body) + length
        if number != first + len(taken) or (taken and size > bytes_max):
            break
        payload = Payload(shard, offset, length, crc32) if shard else None
        taken.append(Result(number, bytes(body), failed=False, payload=payload))
    return taken


def next_result(at: Connection, job: int, first: int) -> int | None:
    """Returns the number of the first row at or behind `first` that has a result; None where none has."""
    found = at.rows("SELECT MIN(row_number) FROM results WHERE job = ? AND row_number >= ?", (job, first))
    return None if found[0][0] is None else int(found[0][0])


def row_ids(at: Connection, job: int, first: int, count: int) -> list[bytes]:
    """Returns ids of rows from one on."""
    found = at.rows(
        "SELECT row_id FROM rows_in WHERE job = ? AND row_number >= ? ORDER BY row_number LIMIT ?", (job, first, count)
    )
    return [bytes(row_id) for (row_id,) in found]


def sweep(at: Connection, job: int) -> bool:
    """Removes a piece of what a deleted job held; returns whether anything was left to remove."""
    for table, key in (
        ("results", "row_number"), ("rows_in", "row_number"), ("row_keys", "row_number"), ("row_order", "place"),
        ("row_groups", "number"),
    ):  # fmt: skip
        least = at.rows(f"SELECT MIN({key}) FROM {table} WHERE job = ?", (job,))[0][0]  # noqa: S608 -- names of ours
        if least is not None:
            at.change(f"DELETE FROM {table} WHERE job = ? AND {key} < ?", (job, least + ORDER_CHUNK))  # noqa: S608
            return True
    if group_tables.drop_chains(at, job, ORDER_CHUNK):
        return True
    at.change("DELETE FROM node_shares WHERE job = ?", (job,))
    at.change("DELETE FROM job_costs WHERE job = ?", (job,))
    at.change("DELETE FROM jobs WHERE number = ?", (job,))
    return False


def _stored(found: Values) -> StoredRow:
    return StoredRow(found[0], bytes(found[1]), bytes(found[2]))
