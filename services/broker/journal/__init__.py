# SPDX-License-Identifier: Apache-2.0
"""What the broker keeps of jobs: one journal, on SQLite or PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from services.broker.journal.group_tables import LeaseLostError
from services.broker.journal.journal import Journal
from services.broker.journal.sqlite import SqliteDatabase
from services.broker.journal.values import JournalFullError
from services.common.errors import StartError

if TYPE_CHECKING:
    from services.broker.journal.database import Database
    from services.broker.journal.sqlite import Synchronous

__all__ = ["Journal", "JournalFullError", "LeaseLostError", "open_database"]


def open_database(where: str, *, synchronous: Synchronous = "FULL", bytes_max: int = 0) -> Database:
    """Opens the database of a journal and brings its schema to this version.

    Args:
        where: Path of a SQLite file, or a `postgresql://` URL.
        synchronous: What a commit outlives, SQLite only; PostgreSQL's is its own setting.
        bytes_max: Size at which a SQLite file counts as full; 0 leaves it to the disk.

    Raises:
        StartError: it cannot be opened, is another broker's, or of a later version.
    """
    database: Database
    if where.startswith(("postgresql://", "postgres://")):
        try:
            from services.broker.journal.postgres import PostgresDatabase
        except ImportError as error:
            raise StartError(
                "a PostgreSQL journal needs the package psycopg: install the extra `postgresql`"
            ) from error
        database = PostgresDatabase(where)
    else:
        database = SqliteDatabase(Path(where), synchronous=synchronous, bytes_max=bytes_max)
    try:
        database.migrate()
    except BaseException:
        database.close()
        raise
    return database
