# SPDX-License-Identifier: Apache-2.0
"""What tenants take of what they may: open calls, and requests a minute."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.common import reasons
from services.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.common.security.access_file import Quota

_RETRY_S = 1.0
_IDLE_MAX = 10_000
"""Tenants whose use is remembered; a remembered one is full after a minute anyway."""


class Bucket:
    """Requests that one tenant may still bring: a minute's worth at most, and refilled evenly.

    What is taken may leave it in debt, which later takers wait for: a message is never too large to pass.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left: float | None = None
        self._at = clock()

    def take(self, count: int, a_minute: int) -> float:
        """Takes `count` where there is room for one at least.

        Returns:
            0 where they were taken; otherwise how long to wait, in seconds, and nothing was taken.
        """
        now = self._clock()
        left = a_minute if self._left is None else min(self._left + (now - self._at) * a_minute / 60, a_minute)
        self._at = now
        if left < 1:
            self._left = left
            return max((1 - left) * 60 / a_minute, 0.001)
        self._left = left - count
        return 0.0


class Quotas:
    """What every tenant takes now. Used on one event loop.

    Args:
        of: Says what a tenant may take.
        clock: Monotonic time in seconds.
    """

    def __init__(self, of: Callable[[str], Quota], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._of = of
        self._clock = clock
        self._calls: dict[str, int] = {}
        self._buckets: dict[str, Bucket] = {}

    @contextmanager
    def call(self, tenant: str) -> Iterator[None]:
        """Holds one of the tenant's places for open calls.

        Raises:
            ResourceExhaustedError: all are taken.
        """
        most, now = self._of(tenant).calls, self._calls.get(tenant, 0)
        if most is not None and now >= most:
            raise ResourceExhaustedError(
                f"{now} calls of the tenant are open, as many as it may have",
                reason=reasons.QUOTA_EXCEEDED,
                metadata={"limit": str(most)},
                retry_after_s=_RETRY_S,
            )
        self._calls[tenant] = now + 1
        try:
            yield
        finally:
            left = self._calls[tenant] - 1
            if left:
                self._calls[tenant] = left
            else:
                del self._calls[tenant]

    def take(self, tenant: str, count: int) -> None:
        """Counts the requests of a single call.

        Raises:
            ResourceExhaustedError: the minute's worth is used up; says when there is more.
        """
        most, wait_s = self._wait(tenant, count)
        if wait_s:
            raise ResourceExhaustedError(
                f"the tenant has sent {most} requests within a minute, as many as it may",
                reason=reasons.QUOTA_EXCEEDED,
                metadata={"limit": str(most)},
                retry_after_s=wait_s,
            )

    async def pace(self, tenant: str, count: int) -> None:
        """Counts the requests of one message of a stream, and returns when there is room for them.

        A stream is slowed down rather than ended: nothing is read from it meanwhile, which its client sees as a window
        that is full.
        """
        while wait_s := self._wait(tenant, count)[1]:  # noqa: ASYNC110 -- a bucket is refilled by time alone
            await asyncio.sleep(wait_s)

    def _wait(self, tenant: str, count: int) -> tuple[int, float]:
        most = self._of(tenant).requests_a_minute
        if most is None or count == 0:
            return 0, 0.0
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= _IDLE_MAX:
                self._buckets.pop(next(iter(self._buckets)))
            bucket = self._buckets[tenant] = Bucket(self._clock)
        return most, bucket.take(count, most)
