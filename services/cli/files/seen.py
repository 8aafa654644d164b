# SPDX-License-Identifier: Apache-2.0
"""Ids that came before, in memory that does not grow with their number.

Digests of ids go into a private database that SQLite keeps in a bounded cache and moves to a temporary file beyond it.
"""

from __future__ import annotations

import sqlite3
from typing import Self

import xxhash

_CACHE_KIB = 32 * 1024


class SeenIds:
    """A set of ids: `with SeenIds() as seen: seen.add("a")`."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA temp_store=FILE; PRAGMA cache_size=-{_CACHE_KIB};"
            "CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID; BEGIN"
        )

    def add(self, row_id: str) -> bool:
        """Takes an id in; returns whether it is new."""
        digest = xxhash.xxh3_128_digest(row_id.encode())
        return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        """Gives memory and disk back."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
