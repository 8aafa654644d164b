# SPDX-License-Identifier: Apache-2.0
"""Log lines of the library, handed to a function of ours."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.native._library import LogFn, library

LogSink = Callable[[int, str, str], object]
"""Takes (level: 10, 20, 30 or 40 as in `logging`, component, message). Called on any thread; must not block."""

_kept: list[object] = []
"""The callback in force, so that it outlives every call that the library may make to it."""


def forward_logs(sink: LogSink | None, min_level: int = 20) -> None:
    """Sends the library's log lines to `sink`; None sends them nowhere.

    After it returns the sink before is not called any more. Lines below `min_level` are not even made.

    Raises:
        FailedPreconditionError: the library cannot be loaded.
    """
    if sink is None:
        library().ifab_log_set(LogFn(), None, min_level)
        _kept.clear()
        return

    def call(_context: object, level: int, component: bytes, message: bytes) -> None:
        sink(level, component.decode("utf-8", "replace"), message.decode("utf-8", "replace"))

    callback = LogFn(call)
    library().ifab_log_set(callback, None, min_level)
    _kept[:] = [callback]
