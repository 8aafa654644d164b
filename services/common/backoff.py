# SPDX-License-Identifier: Apache-2.0
"""Waiting between attempts to reach a peer, so that services may start in any order."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Delays that double from `first_s` to `most_s`, each cut by a random part so that peers do not come in step."""

    def __init__(self, *, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """Starts over; called when an attempt succeeded."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Returns the next delay, in seconds: between half of the step and the whole of it."""
        step, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return step * random.uniform(0.5, 1.0)  # noqa: S311 -- spreads peers, protects nothing

    async def wait(self) -> None:
        """Sleeps for the next delay."""
        await asyncio.sleep(self.next_s())
