# SPDX-License-Identifier: Apache-2.0
"""Things to do at a time, on the core's clock; the caller says what time it is."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Timers:
    """A heap of callbacks."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = itertools.count()
        self.now = 0.0
        """The latest time that the clock has said."""

    def read(self, now: float) -> None:
        """Takes in what the clock says; it never goes back."""
        self.now = max(self.now, now)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls back once it is `when` or later. Nothing is cancelled: the callback looks whether it still matters."""
        heapq.heappush(self._heap, (when, next(self._tickets), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls back so long after what the clock last said."""
        self.at(self.now + delay_s, call)

    @property
    def next_at(self) -> float | None:
        """When the next one is due; None where there is none."""
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Calls whatever is due."""
        self.read(now)
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
