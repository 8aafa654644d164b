# SPDX-License-Identifier: Apache-2.0
"""The engine's counters as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.telemetry import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from services.common.telemetry import Metric, Telemetry
    from services.worker.native import EngineDescription, Stats

    Readings = Iterable[tuple[float, Mapping[str, str]]]

_PLAIN: dict[Metric, Callable[[Stats], float]] = {
    names.ENGINE_STEPS: lambda stats: stats.steps,
    names.ENGINE_PROGRESS_ONLY_STEPS: lambda stats: stats.progress_only_steps,
    names.ENGINE_ADMISSION_RETRIES: lambda stats: stats.admission_retries,
    names.ENGINE_LEADER_WAITS: lambda stats: stats.leader_waits,
    names.ENGINE_BUSY: lambda stats: stats.busy_us / 1e6,
    names.ENGINE_IDLE: lambda stats: stats.idle_us / 1e6,
    names.ENGINE_QUEUED: lambda stats: stats.queued,
    names.ENGINE_ACTIVE: lambda stats: stats.active,
    names.ENGINE_KV_UTILIZATION: lambda stats: stats.kv_blocks_used / max(1, stats.kv_blocks_total),
    names.ENGINE_PAYLOAD: lambda stats: stats.payload_bytes,
    names.ENGINE_PAYLOAD_FAILURES: lambda stats: stats.payload_failures,
    names.ENGINE_HELD_BACK: lambda stats: int(stats.held_back),
}
_SPLIT: dict[Metric, tuple[str, dict[str, Callable[[Stats], float]]]] = {
    names.ENGINE_REQUESTS: (
        "outcome",
        {
            "finished": lambda stats: stats.requests_finished,
            "failed": lambda stats: stats.requests_failed,
            "cancelled": lambda stats: stats.requests_cancelled,
            "refused": lambda stats: stats.requests_refused,
        },
    ),
    names.ENGINE_TOKENS: (
        "kind",
        {
            "computed": lambda stats: stats.prompt_tokens_computed,
            "cached": lambda stats: stats.prompt_tokens_cached,
            "generated": lambda stats: stats.generated_tokens,
        },
    ),
}


class EngineMetrics:
    """Shows the newest reading of the engine's counters; nothing before the first."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._engine = ""
        self._stats: Stats | None = None
        self._load_s = 0.0
        self.streams = telemetry.up_down(names.WORKER_STREAMS)
        """Open Execute streams."""
        self._stalls = 0
        self._stalled = False
        telemetry.observe(names.ENGINE_STALLS, self._plain(lambda _stats: self._stalls))
        telemetry.observe(names.ENGINE_STALLED, self._plain(lambda _stats: int(self._stalled)))
        for metric, read in _PLAIN.items():
            telemetry.observe(metric, self._plain(read))
        for metric, (label, reads) in _SPLIT.items():
            telemetry.observe(metric, self._split(label, reads))
        telemetry.observe(names.ENGINE_LOAD_DURATION, self._plain(lambda _stats: self._load_s))

    def loaded(self, engine_id: str, description: EngineDescription) -> None:
        """Names the engine that the readings to come are of."""
        self._engine, self._load_s = engine_id, description.load_ms / 1000

    def update(self, stats: Stats) -> None:
        """Takes a reading in."""
        self._stats = stats

    def standing(self, stalled: bool) -> None:
        """Takes in whether the engine stands still; its first time counts as one stall, until it moves again."""
        self._stalls += stalled and not self._stalled
        self._stalled = stalled

    def _plain(self, read: Callable[[Stats], float]) -> Callable[[], Readings]:
        def readings() -> Readings:
            stats = self._stats
            return () if stats is None else ((read(stats), {"engine": self._engine}),)

        return readings

    def _split(self, label: str, reads: dict[str, Callable[[Stats], float]]) -> Callable[[], Readings]:
        def readings() -> Readings:
            stats = self._stats
            if stats is None:
                return ()
            return [(read(stats), {"engine": self._engine, label: value}) for value, read in reads.items()]

        return readings
