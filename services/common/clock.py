# SPDX-License-Identifier: Apache-2.0
"""Time as an argument, so that what depends on it can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time in two ways."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back. For leases and limits."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump. For people."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()
