# SPDX-License-Identifier: Apache-2.0
"""Which row lies in which shard: an SQLite file that is also the whole state of a mining run.

A shard counts once its rows are in here, in one transaction, after its file is on the disk. What is not in here, a
crash left: it is deleted, and its rows run again.

    shards(number, file, rows, bytes, sha256)
    rows(line, row_id, shard, position, prompt_tokens)        position: index into the shard's tensor, from 0
    failures(line, row_id, error)                             error: JSON, as in results
    facts(name, value)                                        of the whole run: what it was made of, by which engine
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from services.cli.mine.shards import Shard

FILE = "index.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shards (
  number INTEGER PRIMARY KEY, file TEXT NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows (
  line INTEGER PRIMARY KEY, row_id TEXT NOT NULL UNIQUE, shard INTEGER NOT NULL, position INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS failures (line INTEGER PRIMARY KEY, row_id TEXT NOT NULL, error TEXT NOT NULL);
"""


class MinedRow(NamedTuple):
    """A row whose payload is in a shard; they stand in the order of the shard."""

    line: int
    row_id: str
    prompt_tokens: int


class FailedRow(NamedTuple):
    """A row that has no payload."""

    line: int
    row_id: str
    error: dict[str, object]


@dataclass(frozen=True, slots=True)
class Counts:
    """What is there."""

    rows: int
    failed: int
    shards: int
    bytes: int


class Index:
    """The index of a folder: `with Index(folder) as index: …`. It commits to the disk itself.

    Raises:
        sqlite3.DatabaseError: The file is no index, or the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._database = sqlite3.connect(folder / FILE, isolation_level=None)
        self._database.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._database.close()

    def facts(self) -> dict[str, str]:
        """Facts of the run; none where it has not begun."""
        return dict(self._database.execute("SELECT name, value FROM facts"))

    def begin(self, facts: Mapping[str, str]) -> None:
        """Notes the facts of a run that begins."""
        with self._database:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())

    def files(self) -> set[str]:
        """Names of the shards that count."""
        return {name for (name,) in self._database.execute("SELECT file FROM shards")}

    def next_shard(self) -> int:
        """Number of the next shard."""
        (last,) = self._database.execute("SELECT max(number) FROM shards").fetchone()
        return 0 if last is None else int(last) + 1

    def has(self, line: int) -> bool:
        """Whether the row of a line has ended, well or not."""
        found = "SELECT 1 FROM rows WHERE line = ?1 UNION ALL SELECT 1 FROM failures WHERE line = ?1"
        return self._database.execute(found, (line,)).fetchone() is not None

    def add(self, shard: Shard | None, rows: Sequence[MinedRow], failures: Sequence[FailedRow]) -> None:
        """Lets a shard with its rows, and rows without payload, count."""
        with self._database:
            self._database.execute("BEGIN")
            if shard is not None:
                self._database.execute(
                    "INSERT INTO shards VALUES (?, ?, ?, ?, ?)",
                    (shard.number, shard.file, len(rows), shard.size_bytes, shard.sha256),
                )
                self._database.executemany(
                    "INSERT INTO rows VALUES (?, ?, ?, ?, ?)",
                    (
                        (row.line, row.row_id, shard.number, position, row.prompt_tokens)
                        for position, row in enumerate(rows)
                    ),
                )
            self._database.executemany(
                "INSERT INTO failures VALUES (?, ?, ?)",
                ((row.line, row.row_id, orjson.dumps(row.error).decode()) for row in failures),
            )

    def counts(self) -> Counts:
        """What is there."""
        query = (
            "SELECT (SELECT count(*) FROM rows), (SELECT count(*) FROM failures), count(*), coalesce(sum(bytes), 0) "
            "FROM shards"
        )
        return Counts(*self._database.execute(query).fetchone())

    def failures(self) -> Iterator[dict[str, object]]:
        """Yields the documents of rows without payload, in the order of their lines."""
        for line, row_id, error in self._database.execute("SELECT line, row_id, error FROM failures ORDER BY line"):
            yield {"id": row_id, "line": line, "error": orjson.loads(error)}
