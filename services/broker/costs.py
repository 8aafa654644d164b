# SPDX-License-Identifier: Apache-2.0
"""What a job has cost beyond its tokens, as the core counts it: a value that is added up over brokers and restarts.

The core makes it, the journal keeps one for each time that a broker worked on the job, and the job's report is their
sum. It is kept as JSON, so that brokers of different versions may read each other's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ifabric.broker.v1 import broker_service_pb2


class EngineUse(NamedTuple):
    """What the engine of one node did while a job had work there, whoever's work it was."""

    steps: int
    room_tokens: int
    """Token budgets of these steps."""
    tokens: int
    """Prompt tokens computed and tokens generated."""
    busy_us: int
    """Time in steps."""
    uptime_us: int

    def plus(self, other: EngineUse) -> EngineUse:
        """The sum of both, part by part."""
        return EngineUse(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def step_fill(self) -> float | None:
        """Share of the budgets that was used, 0 to 1; None where there were none."""
        # The first token of a sample is made with its prompt, so that this may count a little more than there is.
        return min(1.0, self.tokens / self.room_tokens) if self.room_tokens else None

    @property
    def idle_fraction(self) -> float | None:
        """Share of the time in no step, 0 to 1; None where none has passed."""
        return min(1.0, max(0.0, 1 - self.busy_us / self.uptime_us)) if self.uptime_us else None


@dataclass(frozen=True, slots=True)
class JobCosts:
    """What one stretch of work on a job has cost, or several together."""

    ended: int = 0
    """Requests that ended, those included that ran again elsewhere."""
    cut_tokens: int = 0
    """Tokens of heads that were computed again at a second worker because a group was cut."""
    head_prefills: int = 0
    """Times that a shared head was computed at a worker."""
    heads_held: int = 0
    """Pairs of head and worker in that."""
    waiting_ms: int = 0
    """Sum over requests of the time from acceptance to the first dispatch, or to the end where there was none."""
    running_ms: int = 0
    """Sum over requests of the time from the first dispatch to the end."""
    engines: Mapping[str, EngineUse] = field(default_factory=dict)
    """By node; a node whose engine has told nothing yet is missing."""

    def __add__(self, other: JobCosts) -> JobCosts:
        engines = dict(self.engines)
        for node_id, use in other.engines.items():
            engines[node_id] = engines[node_id].plus(use) if node_id in engines else use
        return JobCosts(
            self.ended + other.ended,
            self.cut_tokens + other.cut_tokens,
            self.head_prefills + other.head_prefills,
            self.heads_held + other.heads_held,
            self.waiting_ms + other.waiting_ms,
            self.running_ms + other.running_ms,
            engines,
        )

    def to_json(self) -> bytes:
        """The form in which it is kept."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        engines = {node_id: use._asdict() for node_id, use in self.engines.items()}
        return json.dumps({**figures, "engines": engines}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, kept: bytes) -> Self:
        """Reads what `to_json` wrote; what a later version may have added is left out."""
        read = json.loads(kept)
        engines = {
            node_id: EngineUse(*(int(use[name]) for name in EngineUse._fields))
            for node_id, use in read["engines"].items()
        }
        return cls(**{name: int(read[name]) for name in _FIGURES}, engines=engines)


_FIGURES = ("ended", "cut_tokens", "head_prefills", "heads_held", "waiting_ms", "running_ms")


def tell_use(message: broker_service_pb2.NodeShare, use: EngineUse) -> None:
    """Puts what an engine did into the share of its node; what is not known stays absent."""
    message.engine_steps = use.steps
    fill, idle = use.step_fill, use.idle_fraction
    if fill is not None:
        message.step_fill = fill
    if idle is not None:
        message.idle_fraction = idle
