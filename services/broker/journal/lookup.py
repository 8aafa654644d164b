# SPDX-License-Identifier: Apache-2.0
"""Where one row of a job is, for people who ask; rows are not indexed by id, so that this looks through all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from services.broker.journal.database import Connection


class RowPlace(NamedTuple):
    """What the journal knows of a row."""

    number: int
    result: bytes | None
    """Serialized RowResult; None where it has not ended."""
    owner: str
    """Broker that has taken the row's group; empty where none has, or where the job has no order yet."""
    groups_before: int
    """Groups of the job that come before the row's and have not ended."""


def find_row(at: Connection, job: int, row_id: bytes) -> RowPlace | None:
    """Returns where the first row of that id is; None where the job has none."""
    found = at.rows("SELECT MIN(row_number) FROM rows_in WHERE job = ? AND row_id = ?", (job, row_id))
    if found[0][0] is None:
        return None
    number = int(found[0][0])
    bodies = at.rows("SELECT body FROM results WHERE job = ? AND row_number = ?", (job, number))
    groups = at.rows(
        "SELECT number, owner FROM row_groups WHERE job = ? AND EXISTS (SELECT 1 FROM row_order WHERE "
        "row_order.job = row_groups.job AND row_number = ? AND place >= first_place AND place <= last_place)",
        (job, number),
    )
    group, owner = groups[0] if groups else (0, "")
    before = at.rows("SELECT COUNT(*) FROM row_groups WHERE job = ? AND number < ?", (job, group))
    return RowPlace(number, bytes(bodies[0][0]) if bodies else None, str(owner), int(before[0][0]))
