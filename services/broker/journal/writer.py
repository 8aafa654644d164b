# SPDX-License-Identifier: Apache-2.0
"""One thread that commits for everybody.

What is asked for while a commit runs goes into the next one, so that the cost of a durable commit is shared, and each
caller hears of its part only once it is committed. A part that is refused is undone by itself.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from services.broker.journal.values import Counts, JournalFullError
from services.common import logs
from services.common.errors import FabricError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.broker.journal.database import Connection, Database

T = TypeVar("T")

PARTS_MAX = 256
"""Most parts of one commit: what waits longer than that is committed next."""
_QUEUE_MAX = 4096
_log = logs.get("broker.journal")


@dataclass(slots=True)
class _Part:
    """What one caller wants done."""

    name: str
    change: Callable[[Connection], Any]
    counted: Callable[[Counts, Any], None] | None
    done: Future[Any] = field(default_factory=Future)
    answer: Any = None
    error: BaseException | None = None


class Writer:
    """The thread.

    Args:
        database: Where to.
        reach: Told the name of each point that is reached, in the thread: `<part>.before_commit`,
            `<part>.after_commit`.
        observe: Told of each transaction, in the thread: its seconds, and whether it was committed.
    """

    def __init__(
        self, database: Database, reach: Callable[[str], None], observe: Callable[[float, bool], None]
    ) -> None:
        self._database = database
        self._reach = reach
        self._observe = observe
        self._parts: queue.Queue[_Part | None] = queue.Queue(_QUEUE_MAX)
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self.counts = Counts()
        self._thread.start()

    @property
    def queued(self) -> int:
        """Parts that wait for the next transaction."""
        return self._parts.qsize()

    async def write(
        self, name: str, change: Callable[[Connection], T], counted: Callable[[Counts, T], None] | None = None
    ) -> T:
        """Has `change` done in a transaction and returns its answer once that is committed.

        `counted` takes the answer into the counts, in the thread, once it is committed: whether or not the caller still
        waits for it.

        Raises:
            FabricError: what `change` raised; it left no trace.
            JournalFullError: there is no room.
            UnavailableError: the database cannot be reached, or too much waits for it.
        """
        part = _Part(name, change, counted)
        try:
            self._parts.put_nowait(part)
        except queue.Full:
            raise UnavailableError("the journal is busy", retry_after_s=0.5) from None
        return await asyncio.shield(asyncio.wrap_future(part.done))

    def close(self) -> None:
        """Ends the thread after what waits."""
        self._parts.put(None)
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            parts: list[_Part] = []
            first = self._parts.get()
            try:
                while first is not None and len(parts) < PARTS_MAX:
                    parts.append(first)
                    first = self._parts.get_nowait()
            except queue.Empty:
                pass
            ending = first is None
            if parts:
                self._commit(parts)
        if self._connection is not None:
            self._connection.close()

    def _commit(self, parts: list[_Part]) -> None:
        began = time.perf_counter()
        try:
            connection = self._connection = self._connection or self._database.connect()
            connection.begin()
            for part in parts:
                self._do(connection, part)
            self._reach_all(parts, "before_commit")
            connection.commit()
            self._count(parts)
            self._observe(time.perf_counter() - began, True)
            self._reach_all(parts, "after_commit")
        except Exception as error:
            failure = self._database.failure(error)
            self.counts.full += isinstance(failure, JournalFullError)
            self._observe(time.perf_counter() - began, False)
            _log.error("journal.commit_failed", parts=len(parts), message=str(error)[:500], reason=failure.reason)
            self._recover()
            for part in parts:
                part.error = part.error or failure
        for part in parts:
            if part.error is not None:
                part.done.set_exception(part.error)
            else:
                part.done.set_result(part.answer)

    def _count(self, parts: Iterable[_Part]) -> None:
        self.counts.commits += 1
        for part in parts:
            if part.counted is not None and part.error is None:
                part.counted(self.counts, part.answer)

    def _do(self, connection: Connection, part: _Part) -> None:
        """Does one part; a refusal undoes it alone, anything else the whole commit."""
        connection.savepoint()
        try:
            part.answer = part.change(connection)
        except FabricError as error:
            part.error = error
            connection.undo()
        else:
            connection.keep()

    def _recover(self) -> None:
        """After a failed commit nothing of it is left; a connection that cannot even say so is given up."""
        try:
            if self._connection is not None:
                self._connection.rollback()
        except Exception as error:
            _log.warning("journal.connection_lost", message=str(error)[:500])
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _reach_all(self, parts: Iterable[_Part], point: str) -> None:
        for name in {part.name for part in parts if part.error is None}:
            self._reach(f"{name}.{point}")
