# SPDX-License-Identifier: Apache-2.0
"""A fleet of virtual cards under a dispatch policy: one clock, one heap of events."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from benchmarks.virtual.engine import Card, Job, VirtualEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

LATENCY_US = 500.0
"""Time between an engine and whoever dispatches, one way."""


class Policy(Protocol):
    """Decides what goes where. Called in order of time; answers with (worker, job) pairs, in order."""

    def computed(self, worker: int, job: Job, now_us: float) -> None:
        """A prompt is computed."""

    def ended(self, worker: int, job: Job, now_us: float) -> None:
        """A request has ended."""

    def give(self, now_us: float) -> list[tuple[int, Job]]:
        """What shall go now."""

    def wake_us(self) -> float | None:
        """When to ask again though nothing happened; None for never."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went."""

    computed_tokens: int
    makespan_us: float
    busy_us: tuple[float, ...]
    ended: int
    steps: int
    thrown_out: int
    """Times that a request lost what it had for want of room."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that one worker took without a pause."""

    worker: int
    begin_us: float
    end_us: float
    prompt_tokens: int
    """Prompt tokens computed in them."""


def run(policy: Policy, cards: Sequence[Card], *, stretches: list[Stretch] | None = None) -> Outcome:
    """Runs a policy until everything has ended; what each worker did when goes into `stretches`, if wanted."""
    engines = [VirtualEngine(card) for card in cards]
    due: list[float | None] = [None] * len(cards)
    """When the steps under way at each engine end."""
    tickets = itertools.count()
    events: list[tuple[float, int, str, int, object]] = []
    ended, now = 0, 0.0

    def push(when: float, kind: str, worker: int, what: object) -> None:
        heapq.heappush(events, (when, next(tickets), kind, worker, what))

    def send(pairs: list[tuple[int, Job]]) -> None:
        batches: dict[int, list[Job]] = {}
        for worker, job in pairs:
            batches.setdefault(worker, []).append(job)
        for worker, jobs in batches.items():
            push(now + LATENCY_US, "jobs", worker, jobs)

    def begin(worker: int) -> None:
        due[worker] = engines[worker].start(now)
        if due[worker] is not None:
            push(due[worker], "steps", worker, None)  # type: ignore[arg-type]

    push(0.0, "wake", 0, None)
    while events:
        now, _, kind, worker, what = heapq.heappop(events)
        if kind == "jobs":
            was_idle = due[worker] is None
            for job in what:  # type: ignore[attr-defined]
                cut = engines[worker].add(job, now)
                if cut is not None and due[worker] is not None and cut < due[worker]:  # type: ignore[operator]
                    due[worker] = cut
                    push(cut, "steps", worker, None)
            if was_idle:
                begin(worker)
        elif kind == "steps":
            if due[worker] != now:
                continue  # cut short before
            before, begun = engines[worker].computed_tokens, engines[worker].begun_us
            result = engines[worker].finish(now)
            if stretches is not None:
                stretches.append(Stretch(worker, begun, now, engines[worker].computed_tokens - before))
            if result.computed or result.ended:
                push(now + LATENCY_US, "news", worker, result)
            begin(worker)
        elif kind == "news":
            for job in what.computed:  # type: ignore[attr-defined]
                policy.computed(worker, job, now)
            for job in what.ended:  # type: ignore[attr-defined]
                policy.ended(worker, job, now)
                ended += 1
            send(policy.give(now))
        else:
            send(policy.give(now))
        wake = policy.wake_us()
        if wake is not None and (not events or wake < events[0][0]):
            push(max(wake, now), "wake", 0, None)
    return Outcome(
        computed_tokens=sum(engine.computed_tokens for engine in engines),
        makespan_us=now,
        busy_us=tuple(engine.busy_us for engine in engines),
        ended=ended,
        steps=sum(engine.steps for engine in engines),
        thrown_out=sum(engine.thrown_out for engine in engines),
    )
