# SPDX-License-Identifier: Apache-2.0
"""Threads that read, each over a connection of its own, while the writer commits."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from services.common.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from services.broker.journal.database import Connection, Database

T = TypeVar("T")


class Reader:
    """Connections and the threads that they are used on.

    Args:
        database: What is read.
        threads: Reads that run at the same time; more wait.
    """

    def __init__(self, database: Database, threads: int = 2) -> None:
        self._database = database
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="journal-reader")
        self._idle: list[Connection] = []

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Runs a query and returns its answer.

        Raises:
            FabricError: what the query raised, or `UnavailableError` where the database cannot be reached.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, query)

    @asynccontextmanager
    async def chunks(
        self, query: Callable[[Connection], Iterator[T]], count: int
    ) -> AsyncIterator[AsyncIterator[list[T]]]:
        """Runs a query whose answer may be larger than memory; gives it in lists of at most `count`."""
        # A connection of its own, and a thread of its own while it takes long: sorting must not hold up readers.
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(1, thread_name_prefix="journal-stream")
        stream = _Stream(self._database, query, count)

        async def each() -> AsyncIterator[list[T]]:
            while chunk := await loop.run_in_executor(executor, stream.next):
                yield chunk

        try:
            yield each()
        finally:
            await loop.run_in_executor(executor, stream.close)
            executor.shutdown(wait=False)

    def close(self) -> None:
        """Ends threads and connections."""
        self._executor.shutdown(wait=True)
        while self._idle:
            self._idle.pop().close()

    def _run(self, query: Callable[[Connection], T]) -> T:
        connection: Connection | None = None
        try:
            connection = self._idle.pop() if self._idle else self._database.connect()
            answer = query(connection)
        except FabricError:
            if connection is not None:
                self._idle.append(connection)
            raise
        except Exception as error:
            if connection is not None:
                connection.close()
            raise self._database.failure(error) from error
        self._idle.append(connection)
        return answer


class _Stream(Generic[T]):
    """A query that is read piece by piece."""

    def __init__(self, database: Database, query: Callable[[Connection], Iterator[T]], count: int) -> None:
        self._database = database
        self._query = query
        self._count = count
        self._connection: Connection | None = None
        self._rows: Iterator[T] = iter(())

    def next(self) -> list[T]:
        try:
            if self._connection is None:
                self._connection = self._database.connect()
                self._rows = self._query(self._connection)
            return list(islice(self._rows, self._count))
        except Exception as error:
            raise self._database.failure(error) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
