# SPDX-License-Identifier: Apache-2.0
"""Background tasks that nobody forgets: a task that fails ends the process, and ending the process ends the tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from services.common import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_log = logs.get("common.tasks")


class Tasks:
    """Holds the background tasks of one owner.

    A task may return when it has nothing left to do. One that raises is a fault: it is logged and `on_failure` is told,
    which normally stops the process, so that nothing goes on half alive.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        """Args: on_failure: Called once for each task that fails, with a sentence that names it."""
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Runs `work` in the background; `name` appears in the log should it fail."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancels what runs and waits until it has ended."""
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("task.failed", task=task.get_name(), exc_info=error)
            self._on_failure(f"the task {task.get_name()} failed: {type(error).__name__}")
