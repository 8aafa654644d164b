# SPDX-License-Identifier: Apache-2.0
"""Health by progress: a worker is healthy while its work moves, not while its process exists.

Work that stands still for longer than one step of the engine may take, and 5 seconds, is a stall: the engine's thread
is dead, the library is stuck, or a step never ends. An engine without work is healthy for as long as it likes, and so
is one in a single long step within its bound. What has stalled and moves again is healthy again, without anybody's
help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common import logs
from services.worker.engine_host import POLL_MS

if TYPE_CHECKING:
    from services.common.rpc import Server
    from services.worker.native import Stats

SLACK_S = 5.0
"""How much longer than the longest step work may stand still."""

_log = logs.get("worker.health")


class Progress:
    """Tells a stall from idleness and from a long step, reading by reading."""

    def __init__(self, longest_step_ms: int) -> None:
        """Nothing was read yet.

        Args:
            longest_step_ms: Longest time that one step may take, from the contract.
        """
        self._bound_s = longest_step_ms / 1000 + SLACK_S
        self._tick: int | None = None
        self._read_s: float | None = None
        self._still_s = 0.0

    def observe(self, stats: Stats, *, poll_age_s: float, now_s: float, period_s: float) -> str | None:
        """Takes one reading in.

        Args:
            stats: The engine's counters.
            poll_age_s: How long the poll that runs now has been running.
            now_s: Monotonic time.
            period_s: Time that is meant to lie between readings. Where more does, the process itself did not run, and
                what nobody watched is not held against the engine.

        Returns:
            Why the engine is not healthy; None where it is.
        """
        passed_s = 0.0 if self._read_s is None else min(now_s - self._read_s, 2 * period_s)
        self._read_s = now_s
        waiting = stats.queued + stats.active
        if waiting and stats.progress_tick == self._tick:
            self._still_s += passed_s
        else:
            self._still_s = 0.0
        self._tick = stats.progress_tick
        if stats.engine_failed:
            return "the engine has failed"
        if self._still_s > self._bound_s:
            return (
                f"{stats.queued} queued and {stats.active} active have not moved for {self._still_s:.1f} s; "
                f"the limit is {self._bound_s:g} s"
            )
        if poll_age_s > POLL_MS / 1000 + self._bound_s:
            return f"a poll of {POLL_MS} ms has not come back for {poll_age_s:.1f} s"
        return None


class Health:
    """The worker's health names: `""`, the service's own, and `engine/<engine_id>`.

    They are SERVING while no condition speaks against it.
    """

    def __init__(self, server: Server) -> None:
        """Not serving: nothing is loaded.

        Args:
            server: Where health is published.
        """
        self._server = server
        self._engine = ""
        self._against: dict[str, str] = {"load": "no engine is loaded"}

    @property
    def serving(self) -> bool:
        """Whether nothing speaks against serving."""
        return not self._against

    async def name_engine(self, engine_id: str) -> None:
        """Gives the engine its health name."""
        self._engine = f"engine/{engine_id}"
        await self._publish()

    async def set(self, condition: str, against: str | None) -> None:
        """Says what a condition has against serving; None where it has nothing any more."""
        was = self.serving
        changed = against is not None and condition not in self._against
        if against is None:
            changed = self._against.pop(condition, None) is not None
        else:
            self._against[condition] = against
        if changed:
            log = _log.info if self.serving else _log.warning
            log("health.changed", serving=self.serving, condition=condition, against=against)
        if was != self.serving:
            await self._publish()

    async def _publish(self) -> None:
        await (self._server.ready() if self.serving else self._server.not_ready())
        if self._engine:
            await self._server.set_health(self._engine, self.serving)
