# SPDX-License-Identifier: Apache-2.0
"""The journal in one SQLite file.

Write-ahead log with `synchronous=FULL`: a commit is on the disk, as far as the disk tells the truth, before anybody
hears of it, so that it outlives a power cut. One broker at a time: a lock on a file beside it says whose it is.
"""

from __future__ import annotations

import fcntl
import functools
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from services.broker.journal.schema import STEPS, VERSION, for_sqlite
from services.broker.journal.values import JournalFullError
from services.common.errors import FabricError, StartError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.broker.journal.database import Values

Synchronous = Literal["FULL", "NORMAL"]
_BUSY_S = 10.0
_CACHE_KIB = 4 * 1024
"""Pages that a connection keeps. More is slower, if anything: a reader's are void with the next commit, what the writer
touches is spread over the whole file, and the system's own cache holds that."""
_CHECKPOINT_PAGES = 4096
"""The log is written back about every 16 MiB; smaller than that it costs, larger it only grows."""
_FETCH = 4096


class SqliteConnection:
    """See `database.Connection`."""

    def __init__(self, path: Path, synchronous: Synchronous, bytes_max: int) -> None:
        self._raw = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        for pragma in (
            "journal_mode=WAL", f"synchronous={synchronous}", f"cache_size=-{_CACHE_KIB}", "temp_store=FILE",
            f"wal_autocheckpoint={_CHECKPOINT_PAGES}", f"journal_size_limit={64 * 1024 * 1024}",
        ):  # fmt: skip
            self._raw.execute(f"PRAGMA {pragma}")
        if bytes_max:
            (page,) = self._raw.execute("PRAGMA page_size").fetchone()
            self._raw.execute(f"PRAGMA max_page_count={max(bytes_max // page, 1)}")

    def begin(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        """See `database.Connection`."""
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def savepoint(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("SAVEPOINT part")

    def keep(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("RELEASE part")

    def undo(self) -> None:
        """See `database.Connection`."""
        self._raw.execute("ROLLBACK TO part")
        self._raw.execute("RELEASE part")

    def rows(self, sql: str, values: Values = ()) -> list[Values]:
        """See `database.Connection`."""
        return self._raw.execute(sql, values).fetchall()

    def stream(self, sql: str, values: Values = ()) -> Iterator[Values]:
        """See `database.Connection`."""
        cursor = self._raw.execute(sql, values)
        try:
            while rows := cursor.fetchmany(_FETCH):
                yield from rows
        finally:
            cursor.close()

    def change(self, sql: str, values: Values = ()) -> int:
        """See `database.Connection`."""
        return self._raw.execute(sql, values).rowcount

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Values], *, keep_old: bool = False) -> int:
        """See `database.Connection`."""
        before = self._raw.total_changes
        self._raw.executemany(_insertion(table, tuple(columns), keep_old), rows)
        return self._raw.total_changes - before

    def now(self) -> float:
        """See `database.Connection`."""
        return time.time()

    def close(self) -> None:
        """See `database.Connection`."""
        self._raw.close()


def _sort_in(folder: Path) -> None:
    """Has SQLite put what it sorts into a folder, for the whole process.

    A job's keys can be as long as its rows; the system's folder for such files is often small, in a pod some memory.
    """
    where = str(folder.resolve())
    with closing(sqlite3.connect(":memory:")) as connection:
        if connection.execute("PRAGMA temp_store_directory").fetchone() != (where,):
            quoted = where.replace("'", "''")  # a pragma takes no parameters
            connection.execute(f"PRAGMA temp_store_directory = '{quoted}'")


class SqliteDatabase:
    """See `database.Database`.

    Args:
        path: The file; its folder is made where it is not there.
        synchronous: `FULL` outlives a power cut; `NORMAL` only the end of the process, and then loses nothing either.
        bytes_max: Size that the file may reach before it counts as full; 0 leaves it to the disk.

    Raises:
        StartError: the file cannot be opened, or another broker has it.
    """

    skip_locked = ""
    for_update = ""
    shared = False

    def __init__(self, path: Path, *, synchronous: Synchronous = "FULL", bytes_max: int = 0) -> None:
        self.path = path
        self._synchronous = synchronous
        self._bytes_max = bytes_max
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = Path(f"{path}.lock").open("wb")  # noqa: SIM115 -- held as long as the journal is
        except OSError as error:
            raise StartError(f"cannot open the journal {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StartError(
                f"the journal {path} is another broker's; name another file, or a PostgreSQL URL for several brokers"
            ) from None
        _sort_in(path.parent)

    def connect(self) -> SqliteConnection:
        """See `database.Database`."""
        return SqliteConnection(self.path, self._synchronous, self._bytes_max)

    def migrate(self) -> None:
        """Brings the schema to this version.

        Raises:
            StartError: it is of a later version, or the file is none of SQLite's.
        """
        try:
            connection = self.connect()
        except sqlite3.Error as error:
            raise StartError(f"cannot open the journal {self.path}: {error}") from error
        try:
            apply_steps(connection)
            connection.begin()
            # This process holds the file alone, so whoever had leases is no more.
            connection.change("UPDATE row_groups SET owner = '' WHERE owner <> ''")
            connection.change("DELETE FROM brokers")
            connection.commit()
        except sqlite3.Error as error:
            raise StartError(f"cannot bring the journal {self.path} to version {VERSION}: {error}") from error
        finally:
            connection.close()

    def failure(self, error: BaseException) -> FabricError:
        """See `database.Database`."""
        if isinstance(error, FabricError):
            return error
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno == 28):
            return JournalFullError("the journal's disk is full", retry_after_s=5.0)
        return UnavailableError(f"the journal failed: {type(error).__name__}", retry_after_s=1.0)

    def close(self) -> None:
        """See `database.Database`."""
        self._lock.close()


def apply_steps(connection: SqliteConnection, upto: int = VERSION) -> None:
    """Applies the steps that are missing, each in a transaction of its own.

    Raises:
        StartError: the file is of a later version.
    """
    (found,) = connection.rows("PRAGMA user_version")[0]
    if found > VERSION:
        raise StartError(f"the journal is of version {found}, this broker reads up to {VERSION}: use the newer broker")
    for step in STEPS:
        if found < step.number <= upto:
            connection.begin()
            for statement in step.statements:
                connection.change(for_sqlite(statement))
            connection.change(f"PRAGMA user_version = {step.number}")
            connection.commit()


@functools.lru_cache
def _insertion(table: str, columns: tuple[str, ...], keep_old: bool) -> str:
    verb = "INSERT OR IGNORE" if keep_old else "INSERT"
    return f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
