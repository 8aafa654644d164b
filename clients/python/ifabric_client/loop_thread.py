# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from ifabric_client.errors import ClosedError, closed_meanwhile

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class LoopThread:
    """The loop and its thread, which begin at once."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ifabric-client", daemon=True)
        self._lock = threading.Lock()
        """Held where work is handed over: what came before the end is ended by it, and nothing comes after it."""
        self._ended = False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and waits for it; an interrupt of the waiting cancels it.

        Raises:
            CallError: CANCELLED where the loop was ended meanwhile.
            ClosedError: the loop has been ended.
        """
        with self._lock:
            if self._ended:
                work.close()
                raise ClosedError
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise closed_meanwhile() from None
        except BaseException:
            future.cancel()
            raise

    def end(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Runs `last`, cancels what runs besides, and ends loop and thread. Again, it changes nothing."""
        with self._lock:
            if self._ended:
                if last is not None:
                    last.close()
                return
            self._ended = True
            done = asyncio.run_coroutine_threadsafe(_end_all(last), self._loop)
        if threading.current_thread() is self._thread:
            # The collector came by in the loop's own thread, which cannot wait for itself.
            done.add_done_callback(lambda _: self._loop.stop())
            return
        done.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all(last: Coroutine[Any, Any, None] | None) -> None:
    if last is not None:
        await last
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
