# SPDX-License-Identifier: Apache-2.0
"""Named points at which a process may be told to die, for the proofs that nothing accepted is lost.

Nobody sets them outside of tests. The end is SIGKILL's: no handler, no flush, no goodbye.
"""

from __future__ import annotations

import os
import signal
import threading

POINTS = (
    "upload.middle", "upload.before_commit", "upload.after_commit",
    "seal.middle", "seal.before_commit", "seal.after_commit",
    "claim.after_commit",
    "results.before_commit", "results.after_commit",
    "export.middle",
)  # fmt: skip
"""What `<part>.before_commit` and `<part>.after_commit` mean is said in `journal.writer`; `middle` is between two
messages or pieces of the same call."""


class CrashPoint:
    """Ends the process when a point is reached for the nth time.

    Args:
        where: `point` or `point:n`; empty for never.

    Raises:
        ValueError: there is no such point.
    """

    def __init__(self, where: str) -> None:
        point, _, times = where.partition(":")
        if point and point not in POINTS:
            raise ValueError(f"one of {', '.join(POINTS)}, or one of them with :n for its nth time")
        self._point = point
        self._left = int(times or 1)
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        """Called at each point, from any thread."""
        if point != self._point:
            return
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
