# SPDX-License-Identifier: Apache-2.0
"""What the journal asks of a database; SQLite and PostgreSQL each answer in their own way.

Statements are written once, in the SQL that both speak, with `?` for values. A connection belongs to one thread at a
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.common.errors import FabricError

Values = tuple[Any, ...]


class Connection(Protocol):
    """One connection."""

    def begin(self) -> None:
        """Opens a transaction that may write."""

    def commit(self) -> None:
        """Makes what the transaction wrote durable."""

    def rollback(self) -> None:
        """Undoes the transaction, if there is one."""

    def savepoint(self) -> None:
        """Marks a place to which `undo` returns."""

    def keep(self) -> None:
        """Keeps what was done since the mark."""

    def undo(self) -> None:
        """Undoes what was done since the mark."""

    def rows(self, sql: str, values: Values = ()) -> list[Values]:
        """Runs a query."""

    def stream(self, sql: str, values: Values = ()) -> Iterator[Values]:
        """Runs a query whose answer may be larger than memory."""

    def change(self, sql: str, values: Values = ()) -> int:
        """Runs a statement; returns how many rows it changed."""

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Values], *, keep_old: bool = False) -> int:
        """Inserts rows; returns how many are new.

        Args:
            table: The table.
            columns: Its columns, in the order of the values; the types of the first row hold for all.
            rows: Their values.
            keep_old: Leave out rows whose primary key is there, instead of failing.
        """

    def now(self) -> float:
        """The time, in seconds since the epoch, by the one clock that all brokers of this journal share."""

    def close(self) -> None:
        """Ends it."""


class Database(Protocol):
    """Where a journal lives."""

    skip_locked: str
    """What a query ends in that takes rows for itself and passes over those that others are taking."""
    for_update: str
    """What a query ends in that keeps others from changing its rows until the transaction ends."""
    shared: bool
    """Whether several brokers may use it at the same time."""

    def connect(self) -> Connection:
        """Opens a connection."""

    def migrate(self) -> None:
        """Brings the schema to this version.

        Raises:
            StartError: it is of a later version, or cannot be read.
        """

    def failure(self, error: BaseException) -> FabricError:
        """What a caller is told of an error of the database: `JournalFullError` or `UnavailableError`."""

    def close(self) -> None:
        """Gives it up."""
