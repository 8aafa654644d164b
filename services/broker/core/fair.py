# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: priorities, then weighted fair shares of tenants, then equal shares of a tenant's flows.

Shares are virtual time: whoever was given least, by weight, goes next. A flow that comes back after a pause starts at
the smallest virtual time of those that wait, so that idle time is not saved up. A flow that waits rises by one
priority for each `ageing_s` without service, so that none starves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.broker.core.flow import Flow


class FairOrder:
    """The flows of one lane that have work waiting.

    Args:
        weights: Share of each tenant; one that is not named has 1.
        ageing_s: Waiting time that makes up for one priority.
    """

    def __init__(self, weights: Mapping[str, float], ageing_s: float) -> None:
        self._weights = weights
        self._ageing_s = ageing_s
        self._flows: dict[Flow, None] = {}
        self._tenants: dict[str, float] = {}
        """Virtual time of each tenant that has flows here."""

    def __len__(self) -> int:
        return len(self._flows)

    def flows(self) -> list[Flow]:
        """All flows that have work waiting, in no particular order."""
        return list(self._flows)

    def wake(self, flow: Flow, now: float) -> None:
        """Takes a flow in that has work waiting; no effect where it is in already."""
        if flow in self._flows:
            return
        tenant = flow.key.tenant
        active = {other.key.tenant for other in self._flows}
        if tenant not in active:
            least = min((self._tenants[name] for name in active), default=0.0)
            self._tenants[tenant] = max(self._tenants.get(tenant, 0.0), least)
        siblings = [other.service for other in self._flows if other.key.tenant == tenant]
        flow.service = max(flow.service, min(siblings, default=0.0))
        flow.served_at = now
        self._flows[flow] = None

    def sleep(self, flow: Flow) -> None:
        """Takes a flow out that has nothing waiting."""
        self._flows.pop(flow, None)
        if not self._flows:
            self._tenants.clear()

    def charge(self, flow: Flow, tokens: int, now: float) -> None:
        """Counts what a flow was given."""
        flow.service += tokens
        flow.served_at = now
        tenant = flow.key.tenant
        self._tenants[tenant] = self._tenants.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def order(self, now: float) -> list[Flow]:
        """Returns the flows that may go now, first turn first."""
        ready = [flow for flow in self._flows if not flow.paused and flow.ready_at <= now]
        if len(ready) > 1:
            ready.sort(key=lambda flow: self._turn(flow, now))
        return ready

    def _turn(self, flow: Flow, now: float) -> tuple[int, float, float]:
        raised = flow.key.priority + int((now - flow.served_at) / self._ageing_s)
        return (-raised, self._tenants[flow.key.tenant], flow.service)
