# SPDX-License-Identifier: Apache-2.0
"""What the core tells Prometheus. Everything is counted where it happens and read when somebody looks.

Readers run on the endpoint's thread: they copy what they walk over and change nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from services.broker.work import LANE_NAMES, Lane
from services.common.telemetry import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from services.broker.core.attempts import Attempt
    from services.broker.core.catalog import EngineCatalog
    from services.broker.core.decision import Decision
    from services.common.telemetry import Telemetry

    Reading = Iterable[tuple[float, Mapping[str, str]]]


_BULK_EVERY = 32


class CoreMetrics:
    """The core's metrics.

    Args:
        telemetry: Where they go.
        decision: What they are read from.
        catalog: The engines that are there, which have a queue even while nothing waits in it.
    """

    def __init__(self, telemetry: Telemetry, decision: Decision, catalog: EngineCatalog) -> None:
        self._decision = decision
        self._catalog = catalog
        self._bulk = 0
        self._wait = telemetry.histogram(names.BROKER_QUEUE_WAIT)
        telemetry.observe(names.BROKER_QUEUE_DEPTH, self._depth)
        telemetry.observe(names.BROKER_IN_FLIGHT, self._in_flight)
        telemetry.observe(names.BROKER_CREDIT_UTILIZATION, self._credit)
        telemetry.observe(names.BROKER_NODES, lambda: ((len(decision.scheduler.workers), {}),))
        telemetry.observe(names.BROKER_TOKENS, self._tokens)
        telemetry.observe(names.BROKER_REATTEMPTS, lambda: ((decision.requests.counters.reattempts, {}),))
        telemetry.observe(names.BROKER_QUARANTINED, lambda: ((decision.requests.counters.quarantined, {}),))
        telemetry.observe(names.BROKER_LATE_RESULTS, lambda: ((decision.requests.counters.late_results, {}),))
        telemetry.observe(names.BROKER_LOST_ATTEMPTS, lambda: ((decision.requests.counters.lost_attempts, {}),))

    def waited(self, attempt: Attempt, now: float) -> None:
        """A request was dispatched for the first time, as this attempt.

        Of bulk work every 32nd is recorded: a recording takes about a tenth of what the whole request may.
        """
        lane = attempt.entry.work.lane
        if lane is Lane.BULK:
            self._bulk = (self._bulk + 1) % _BULK_EVERY
            if self._bulk:
                return
        labels = {"lane": LANE_NAMES[lane], "engine": attempt.worker.facts.engine_id}
        self._wait.record(now - attempt.entry.arrived, labels)

    def _depth(self) -> Reading:
        scheduler, engines = self._decision.scheduler, self._decision.engines
        serving = Counter(worker.facts.digest for worker in list(scheduler.workers.values()) if worker.serving)
        depth = Counter({(lane, listed.contract.engine_id): 0 for listed in self._catalog.engines() for lane in Lane})
        for flow in list(scheduler.flows.values()):
            workers: Counter[str] = Counter()
            for digest in flow.key.digests:
                workers[engines[digest].engine_id] += serving[digest]
            for engine, count in divide(flow.waiting, workers).items():
                depth[flow.key.lane, engine] += count
        return [(count, {"lane": LANE_NAMES[lane], "engine": engine}) for (lane, engine), count in depth.items()]

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


def divide(count: int, workers: Mapping[str, int]) -> dict[str, int]:
    """Divides requests that any of several engines may run among these, as their workers will.

    Args:
        count: How many wait.
        workers: Engine to how many workers serve it; at least one engine, and where no worker serves any of them, each
            counts as much.

    Returns:
        Engine to its part; together they are `count`. What is left by rounding down goes where rounding took most.
    """
    weights = workers if any(workers.values()) else dict.fromkeys(workers, 1)
    total = sum(weights.values())
    parts = {engine: count * weight // total for engine, weight in weights.items()}
    by_rest = sorted(weights, key=lambda engine: (-(count * weights[engine] % total), engine))
    for engine in by_rest[: count - sum(parts.values())]:
        parts[engine] += 1
    return parts
