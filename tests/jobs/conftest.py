# SPDX-License-Identifier: Apache-2.0
"""Journals for tests: one suite, both databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.broker.journal import Journal, open_database
from services.broker.journal.order import GroupRule
from tests.jobs.databases import PostgresServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

SMALL_GROUPS = GroupRule(shared_bytes=16, rows_min=4, rows_max=16, bytes_max=64 * 1024)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for the whole run."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new journal is, once for each database."""
    if request.param == "sqlite":
        return str(tmp_path / "journal.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
async def journal(where: str) -> AsyncIterator[Journal]:
    """A journal on each database, with small groups."""
    made = Journal(open_database(where), rule=SMALL_GROUPS)
    yield made
    await made.close()
