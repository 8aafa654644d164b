# SPDX-License-Identifier: Apache-2.0
"""The journal in PostgreSQL, for several brokers at once.

A commit is on the server's disk, as far as `fsync` and `synchronous_commit` of the server say so; a connection that
finds the latter off turns it on for itself. Brokers share the server's clock and nothing else.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from services.broker.journal.schema import STEPS, VERSION
from services.broker.journal.values import JournalFullError
from services.common import logs
from services.common.errors import FabricError, StartError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.broker.journal.database import Values

_CONNECT_S = 5
_LOCK_MS = 10_000
_IDLE_MS = 60_000
"""A broker that stands still in the middle of a transaction loses it: nobody waits for its locks for ever."""
_MIGRATION_LOCK = 7_110_442_163
"""Number of the advisory lock under which one broker migrates while others wait."""
_FETCH = 2048
_ARRAYS = {int: "bigint[]", bytes: "bytea[]", str: "text[]", float: "double precision[]"}
_log = logs.get("broker.journal")


class PostgresConnection:
    """See `database.Connection`."""

    def __init__(self, url: str) -> None:
        self._raw = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            application_name="ifabric-broker",
        )
        self._raw.execute(f"SET lock_timeout = {_LOCK_MS}")
        self._raw.execute(f"SET idle_in_transaction_session_timeout = {_IDLE_MS}")
        self._raw.execute("SET client_min_messages = warning")
        if self.rows("SHOW synchronous_commit")[0][0] == "off":
            self._raw.execute("SET synchronous_commit = on")

    def begin(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("BEGIN")

    def commit(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        """See `database.Connection`."""
        if self._raw.info.transaction_status != TransactionStatus.IDLE:
            self._raw.execute("ROLLBACK")

    def savepoint(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("SAVEPOINT part")

    def keep(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("RELEASE SAVEPOINT part")

    def undo(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("ROLLBACK TO SAVEPOINT part")
        self._raw.execute("RELEASE SAVEPOINT part")

    def rows(self, sql: str, values: Values = ()) -> list[Values]:
        """See `database.Connection`."""
        with self._raw.cursor(binary=True) as cursor:
            return cursor.execute(_marked(sql), values).fetchall()

    def stream(self, sql: str, values: Values = ()) -> Iterator[Values]:
        """See `database.Connection`; the server keeps the answer and sends it piece by piece."""
        with self._raw.transaction(), self._raw.cursor(name="stream", binary=True) as cursor:
            cursor.itersize = _FETCH
            yield from cursor.execute(_marked(sql), values)

    def change(self, sql: str, values: Values = ()) -> int:
        """See `database.Connection`."""
        return self._raw.execute(_marked(sql), values).rowcount

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Values], *, keep_old: bool = False) -> int:
        """See `database.Connection`; one statement, a column an array."""
        sql = _insertion(table, tuple(columns), tuple(type(value) for value in rows[0]), keep_old)
        return self._raw.execute(sql, [list(column) for column in zip(*rows, strict=True)]).rowcount

    def now(self) -> float:
        """See `database.Connection`."""
        return float(self.rows("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)")[0][0])

    def close(self) -> None:
        """See `database.Connection`."""
        self._raw.close()


class PostgresDatabase:
    """See `database.Database`.

    Args:
        url: `postgresql://…`, as libpq reads it; passwords come from where libpq finds them.
    """

    skip_locked = " FOR UPDATE SKIP LOCKED"
    for_update = " FOR UPDATE"
    shared = True

    def __init__(self, url: str) -> None:
        self._url = url

    def connect(self) -> PostgresConnection:
        """See `database.Database`."""
        return PostgresConnection(self._url)

    def migrate(self) -> None:
        """See `database.Database`; brokers that start together take turns."""
        try:
            connection = self.connect()
        except psycopg.Error as error:
            raise StartError(f"cannot reach the journal's PostgreSQL: {_sentence(error)}") from error
        try:
            connection.rows(f"SELECT pg_advisory_lock({_MIGRATION_LOCK})")
            apply_steps(connection)
            if connection.rows("SHOW fsync")[0][0] == "off":
                _log.warning("journal.not_durable", message="fsync is off: a power cut may lose what was acknowledged")
        except psycopg.Error as error:
            raise StartError(f"cannot bring the journal to version {VERSION}: {_sentence(error)}") from error
        finally:
            connection.close()

    def failure(self, error: BaseException) -> FabricError:
        """See `database.Database`."""
        if isinstance(error, FabricError):
            return error
        if isinstance(error, errors.DiskFull | errors.IoError):
            return JournalFullError("the journal's disk is full", retry_after_s=5.0)
        return UnavailableError(f"the journal failed: {type(error).__name__}", retry_after_s=1.0)

    def close(self) -> None:
        """See `database.Database`."""


def apply_steps(connection: PostgresConnection, upto: int = VERSION) -> None:
    """Applies the steps that are missing, each in a transaction of its own.

    Raises:
        StartError: the database is of a later version.
    """
    connection.change("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
    rows = connection.rows("SELECT version FROM schema_version")
    found = int(rows[0][0]) if rows else 0
    if found > VERSION:
        raise StartError(f"the journal is of version {found}, this broker reads up to {VERSION}: use the newer broker")
    for step in STEPS:
        if found < step.number <= upto:
            connection.begin()
            for statement in step.statements:
                connection.change(statement)
            connection.change("DELETE FROM schema_version")
            connection.change("INSERT INTO schema_version (version) VALUES (?)", (step.number,))
            connection.commit()


@functools.lru_cache
def _marked(sql: str) -> str:
    return sql.replace("?", "%s")


@functools.lru_cache
def _insertion(table: str, columns: tuple[str, ...], types: tuple[type[Any], ...], keep_old: bool) -> str:
    arrays = ", ".join(f"%b::{_ARRAYS[kind]}" for kind in types)
    ending = " ON CONFLICT DO NOTHING" if keep_old else ""
    return f"INSERT INTO {table} ({', '.join(columns)}) SELECT * FROM unnest({arrays}){ending}"  # noqa: S608 -- names of ours


def _sentence(error: psycopg.Error) -> str:
    return " ".join(str(error).split())[:300]
