# SPDX-License-Identifier: Apache-2.0
"""A journal of any earlier version is brought to this one with everything that it held; a later one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.broker.journal import Journal, open_database, postgres, sqlite
from services.broker.journal.schema import STEPS, VERSION
from services.broker.journal.values import State
from services.common.errors import StartError
from tests.jobs.conftest import SMALL_GROUPS
from tests.jobs.made import TENANT, work_off

if TYPE_CHECKING:
    from collections.abc import Iterator


def connect(where: str) -> Any:
    if where.startswith("postgresql"):
        return postgres.PostgresConnection(where)
    return sqlite.SqliteConnection(Path(where), "FULL", 0)


@pytest.fixture
def connection(where: str) -> Iterator[Any]:
    made = connect(where)
    yield made
    made.close()


def apply(connection: Any, upto: int) -> None:
    module: Any = postgres if isinstance(connection, postgres.PostgresConnection) else sqlite
    module.apply_steps(connection, upto)


@pytest.mark.parametrize("version", range(1, VERSION + 1))
async def test_from_each_old_version(where: str, connection: Any, version: int) -> None:
    apply(connection, version)
    connection.begin()
    connection.change(
        "INSERT INTO jobs (tenant, job_id, spec, priority, state, state_reason, row_count, finished, failed, size, "
        "engine_digest, created, end_code, prompt_tokens, computed_tokens, cached_tokens, generated_tokens, "
        "reattempts) VALUES (?, 'job', ?, 0, ?, '', 2, 1, 0, 9, '', 1.5, 0, 10, 4, 6, 1, 0)",
        (TENANT, b"spec", int(State.RUNNING)),
    )
    connection.insert("rows_in", ("job", "row_number", "row_id", "body"), [(1, n, b"r%d" % n, b"b") for n in range(2)])
    connection.insert("row_order", ("job", "place", "row_number"), [(1, 0, 0), (1, 1, 1)])
    connection.insert("row_groups", ("job", "number", "first_place", "last_place", "owner"), [(1, 0, 0, 1, "gone")])
    connection.insert("results", ("job", "row_number", "body"), [(1, 0, b"old result")])
    connection.insert("brokers", ("owner", "lease_until"), [("gone", 2.5)])
    connection.commit()
    journal = Journal(open_database(where), rule=SMALL_GROUPS)
    try:
        await journal.enter("a", 30.0)
        await journal.renew("a", 30.0)
        assert await work_off(journal, "a", 1) == [1]
        job = await journal.job(TENANT, "job")
        assert (job.state, job.finished) == (State.COMPLETED, 2)
        # What a job that runs has given out already, versions before the third did not keep.
        assert job.bound_tokens == (-1 if version < 3 else 0)
        bodies = [result.body for result in await journal.results(1, 0, count=5, bytes_max=100)]
        assert bodies == [b"old result", b"result-1"]
    finally:
        await journal.close()


def test_opening_twice_changes_nothing(where: str) -> None:
    open_database(where).close()
    open_database(where).close()


def test_a_later_version_is_refused_with_a_sentence(where: str, connection: Any) -> None:
    apply(connection, VERSION)
    if where.startswith("postgresql"):
        connection.change("UPDATE schema_version SET version = ?", (VERSION + 1,))
    else:
        connection.change(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(StartError, match=f"of version {VERSION + 1}, this broker reads up to {VERSION}"):
        open_database(where)


def test_steps_are_numbered_without_gaps() -> None:
    assert [step.number for step in STEPS] == list(range(1, VERSION + 1))


def test_a_journal_is_one_brokers_and_says_so(tmp_path: Path) -> None:
    first = open_database(str(tmp_path / "journal.db"))
    with pytest.raises(StartError, match="is another broker's"):
        open_database(str(tmp_path / "journal.db"))
    first.close()
    open_database(str(tmp_path / "journal.db")).close()


def test_what_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database\n" * 1000)
    with pytest.raises(StartError, match="cannot open the journal"):
        open_database(str(tmp_path / "text"))
    with pytest.raises(StartError, match="cannot reach the journal's PostgreSQL"):
        open_database(f"postgresql://nobody@/none?host={tmp_path}")
