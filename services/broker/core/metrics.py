# SPDX-License-Identifier: Apache-2.0
"""What the core tells Prometheus. Everything is counted where it happens and read when somebody looks.

Readers run on the endpoint's thread: they copy what they walk over and change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.work import Lane
from services.common.telemetry import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from services.broker.core.decision import Decision
    from services.common.telemetry import Telemetry

    Reading = Iterable[tuple[float, Mapping[str, str]]]

LANES = {Lane.INTERACTIVE: "interactive", Lane.BULK: "bulk"}

_BULK_EVERY = 32


class CoreMetrics:
    """The core's metrics."""

    def __init__(self, telemetry: Telemetry, decision: Decision) -> None:
        self._decision = decision
        self._bulk = 0
        self._wait = telemetry.histogram(names.BROKER_QUEUE_WAIT)
        self._labels = {lane: {"lane": name} for lane, name in LANES.items()}
        telemetry.observe(names.BROKER_QUEUE_DEPTH, self._depth)
        telemetry.observe(names.BROKER_IN_FLIGHT, self._in_flight)
        telemetry.observe(names.BROKER_CREDIT_UTILIZATION, self._credit)
        telemetry.observe(names.BROKER_NODES, lambda: ((len(decision.scheduler.workers), {}),))
        telemetry.observe(names.BROKER_TOKENS, self._tokens)
        telemetry.observe(names.BROKER_REATTEMPTS, lambda: ((decision.requests.counters.reattempts, {}),))
        telemetry.observe(names.BROKER_QUARANTINED, lambda: ((decision.requests.counters.quarantined, {}),))
        telemetry.observe(names.BROKER_LATE_RESULTS, lambda: ((decision.requests.counters.late_results, {}),))
        telemetry.observe(names.BROKER_LOST_ATTEMPTS, lambda: ((decision.requests.counters.lost_attempts, {}),))

    def waited(self, lane: Lane, seconds: float) -> None:
        """A request was dispatched for the first time.

        Of bulk work every 32nd is recorded: a recording takes about a tenth of what the whole request may.
        """
        if lane is Lane.BULK:
            self._bulk = (self._bulk + 1) % _BULK_EVERY
            if self._bulk:
                return
        self._wait.record(seconds, self._labels[lane])

    def _depth(self) -> Reading:
        depth = dict.fromkeys(Lane, 0)
        for flow in list(self._decision.scheduler.flows.values()):
            depth[flow.key.lane] += flow.waiting
        return [(count, self._labels[lane]) for lane, count in depth.items()]

    def _in_flight(self) -> Reading:
        workers = list(self._decision.scheduler.workers.values())
        return [(len(worker.outstanding), {"node": worker.node_id}) for worker in workers]

    def _credit(self) -> Reading:
        workers = list(self._decision.scheduler.workers.values())
        return [(worker.ledger.fill(), {"node": worker.node_id}) for worker in workers]

    def _tokens(self) -> Reading:
        counters = self._decision.requests.counters
        return [
            (counters.logical_tokens, {"kind": "logical"}),
            (counters.computed_tokens, {"kind": "computed"}),
            (counters.cached_tokens, {"kind": "cached"}),
            (counters.generated_tokens, {"kind": "generated"}),
            (counters.cut_tokens + self._cut_now(), {"kind": "cut"}),
        ]

    def _cut_now(self) -> int:
        """Of the flows that are still there."""
        return sum(flow.owners.cut_tokens for flow in list(self._decision.scheduler.flows.values()))
