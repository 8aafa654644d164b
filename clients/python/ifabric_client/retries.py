# SPDX-License-Identifier: Apache-2.0
"""When a call is made again, and after how long: as long as the broker asks for, else longer each time."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a client puts up with a broker that is away or has no room."""

    limit_s: float = 60.0
    """Time without any success after which the error is raised, in seconds; 0 never tries again."""
    first_s: float = 0.1
    """First pause where the broker names none, in seconds; it doubles from there."""
    most_s: float = 5.0
    """Longest such pause, in seconds. What the broker names is waited for however long it is, within `limit_s`."""


class Patience:
    """One call's tries, or one job's."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._next_s = policy.first_s
        self._since: float | None = None

    def progress(self) -> None:
        """Something came: the time starts over."""
        self._since = None
        self._next_s = self._policy.first_s

    async def wait(self, error: Exception, retry_after_s: float | None) -> None:
        """Waits before the next try.

        Args:
            error: Why the last one failed.
            retry_after_s: What the broker asked for, in seconds; None where it did not.

        Raises:
            Exception: `error`, where the time is up or would be before the pause is over.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
        step, self._next_s = self._next_s, min(self._next_s * 2, self._policy.most_s)
        # A part is left to chance, so that clients that failed together do not come back together; never earlier than
        # the broker asked for.
        spread = random.uniform(0.5, 1.0)  # noqa: S311 -- spreads clients, protects nothing
        pause_s = step * spread if retry_after_s is None else retry_after_s + step * (1 - spread)
        if now + pause_s - self._since > self._policy.limit_s:
            raise error
        await asyncio.sleep(pause_s)
