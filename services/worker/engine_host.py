# SPDX-License-Identifier: Apache-2.0
"""The loaded engine, between its own thread and the event loop.

One thread loads the engine, polls it and ends it; submit, cancel and statistics are called on the event loop, where
they never wait. Events cross over in the poll's own buffers: the thread hands a filled set to the loop and goes on with
the next; while all sets are with the loop it does not poll, and then the library itself takes no further step. So the
hand-over is bounded and copies nothing.

An engine that fails takes the process with it: everything in flight fails as UNAVAILABLE, which brokers run elsewhere,
and `on_failure` asks for the end. A device that has failed once is not trusted with a second load in the same process;
whoever started the process starts it again.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from typing import TYPE_CHECKING

from services.common import logs, reasons
from services.common.errors import FabricError, FailedPreconditionError, UnavailableError
from services.worker.events import deliver
from services.worker.native import Engine, EngineDescription, PollBuffers, Stats, native_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from services.worker.items import Item

THREAD_NAME = "engine"
POLL_MS = 500
"""How long one poll waits for events, in milliseconds."""

_BUFFER_SETS = 3
_EVENTS = 1024
_TOKENS = 64 * 1024
_PAYLOADS = 64
_PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
_TEXT_BYTES = 64 * 1024

_log = logs.get("worker.engine")


class EngineHost:
    """A loaded engine. All methods belong to the event loop it was loaded on."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        """Nothing is loaded yet.

        Args:
            on_failure: Called on the event loop, at most once, with a sentence, when the engine cannot go on.
        """
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._ids = itertools.count(1)
        self._items: dict[int, Item] = {}
        self._engine: Engine | None = None
        self._description: EngineDescription | None = None
        self._ending = threading.Event()
        self._let_go = threading.Event()  # the loop has made its last call on the engine
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._poll_began_s: float | None = None
        self._free: queue.SimpleQueue[PollBuffers | None] = queue.SimpleQueue()
        self._last_stats: Stats | None = None
        self.failure: str | None = None
        """Why the engine cannot go on; None while it can."""

    @property
    def loaded(self) -> bool:
        """Whether the engine can be asked."""
        return self._engine is not None

    @property
    def description(self) -> EngineDescription:
        """What the engine says of itself.

        Raises:
            FailedPreconditionError: it is not loaded.
        """
        if self._description is None:
            raise FailedPreconditionError("the engine is not loaded", reason=reasons.ENGINE_NOT_LOADED)
        return self._description

    @property
    def in_flight(self) -> int:
        """Items that have not ended."""
        return len(self._items)

    @property
    def poll_age_s(self) -> float:
        """How long the poll that runs now has been running, in seconds; 0 while none runs."""
        began_s = self._poll_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    async def load(self, directory: Path) -> EngineDescription:
        """Loads the engine of a directory on a thread of its own. May take minutes; may be tried again once it failed.

        Raises:
            FabricError: as `Engine.create`.
        """
        done: asyncio.Future[EngineDescription] = self._loop.create_future()
        self._ended = self._loop.create_future()
        self._ending.clear()
        self._let_go.clear()
        self._free = queue.SimpleQueue()
        threading.Thread(target=self._live, args=(directory, done), name=THREAD_NAME, daemon=True).start()
        self._description = await done
        return self._description

    def next_id(self) -> int:
        """Returns a name for an attempt that the engine has never heard."""
        return next(self._ids)

    def submit(self, items: Sequence[Item]) -> list[FabricError | None]:
        """Hands items to the engine. Each is accepted (None) or refused by itself; refused ones hear nothing more."""
        if self.failure is not None:
            return [engine_failure(self.failure)] * len(items)
        outcomes = self._running().submit([item.request for item in items])
        for item, refusal in zip(items, outcomes, strict=True):
            if refusal is None:
                self._items[item.request.id] = item
        return outcomes

    def cancel(self, items: Sequence[Item]) -> None:
        """Ends items; each still hears its end. The engine hears of each once, and of none that has ended."""
        live = [item for item in items if item.request.id in self._items and not item.cancelled]
        if live and self.failure is None:
            for item in live:
                item.cancelled = True
            self._running().cancel([item.request.id for item in live])

    def stats(self) -> Stats:
        """Reads the engine's counters; the last reading once the engine is gone.

        Raises:
            FailedPreconditionError: it is not loaded.
        """
        if self._engine is not None:
            self._last_stats = self._engine.stats()
        if self._last_stats is None:
            raise FailedPreconditionError("the engine is not loaded", reason=reasons.ENGINE_NOT_LOADED)
        return self._last_stats

    def fail(self, why: str) -> None:
        """Gives the engine up: everything in flight fails, nothing more is taken. Again changes nothing."""
        if self.failure is not None:
            return
        self.failure = why
        _log.error("engine.failed", why=why, in_flight=len(self._items))
        items, self._items = list(self._items.values()), {}
        for item in items:
            item.outlet.failed(item, engine_failure(why))
        self._on_failure(why)

    async def close(self) -> None:
        """Ends the engine and its thread. What is in flight is dropped."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self._last_stats = engine.stats()
        self._ending.set()
        self._free.put(None)
        engine.wake()
        self._let_go.set()
        await self._ended

    def _live(self, directory: Path, done: asyncio.Future[EngineDescription]) -> None:
        """Body of the thread: load, poll until told to end, close."""
        try:
            engine, description = _open(directory)
        except Exception as error:
            self._to_loop(_refuse, done, error)
            self._to_loop(_settle, self._ended)
            return
        try:
            for _ in range(_BUFFER_SETS):
                self._free.put(_buffers(description))
            self._to_loop(self._loaded, engine, description, done)
            self._poll(engine)
        except Exception as error:
            self._to_loop(self.fail, f"the thread of the engine died: {error}")
        # Not when it is told to end: the call that wakes a poll comes after that, and must find an engine.
        self._let_go.wait()
        engine.close()
        self._to_loop(_settle, self._ended)

    def _poll(self, engine: Engine) -> None:
        buffers = self._free.get()
        while buffers is not None and not self._ending.is_set():
            self._poll_began_s = time.monotonic()
            rows = engine.poll(buffers, POLL_MS)
            self._poll_began_s = None
            if len(rows):
                self._to_loop(self._deliver, buffers, rows)
                buffers = self._free.get()

    def _to_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process ends without having waited for this thread, and nobody is left to hear.
            self._ending.set()
            self._let_go.set()

    def _loaded(self, engine: Engine, description: EngineDescription, done: asyncio.Future[EngineDescription]) -> None:
        self._engine = engine
        if done.cancelled():
            self._loop.create_task(self.close())
        else:
            done.set_result(description)

    def _deliver(self, buffers: PollBuffers, rows: npt.NDArray[np.void]) -> None:
        try:
            deliver(buffers, rows, self._items, self._error_of)
        except Exception as error:
            # Items of this batch may have lost their end, which must never go unheard.
            _log.error("engine.events_lost", exc_info=error)
            self.fail("events of the engine could not be passed on")
        finally:
            self._free.put(buffers)

    def _error_of(self, status: int, text: str) -> FabricError:
        """Makes the error of an item that the library failed; UNAVAILABLE means that the engine is gone for all."""
        error = native_error(status, text)
        if not isinstance(error, UnavailableError):
            return error
        self._loop.call_soon(self.fail, text)
        return engine_failure(text)

    def _running(self) -> Engine:
        if self._engine is None:
            raise FailedPreconditionError("the engine is not loaded", reason=reasons.ENGINE_NOT_LOADED)
        return self._engine


def engine_failure(why: str) -> FabricError:
    """Returns the error of work that an engine that cannot go on has left behind; it may run elsewhere at once."""
    return UnavailableError(
        f"the engine of this worker has failed: {why}", reason=reasons.ENGINE_FAILED, retry_after_s=0.0
    )


def _open(directory: Path) -> tuple[Engine, EngineDescription]:
    engine = Engine.create(directory)
    try:
        return engine, engine.describe()
    except BaseException:
        engine.close()
        raise


def _buffers(description: EngineDescription) -> PollBuffers:
    least = description.poll
    payload_bytes = max(least.payload_bytes, min(_PAYLOADS * least.payload_bytes, _PAYLOAD_BYTES_MAX))
    return PollBuffers(
        events=max(least.events, _EVENTS),
        tokens=max(least.tokens, _TOKENS),
        payload_bytes=payload_bytes,
        text_bytes=max(least.text_bytes, _TEXT_BYTES),
    )


def _refuse(future: asyncio.Future[EngineDescription], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
