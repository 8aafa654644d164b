# SPDX-License-Identifier: Apache-2.0
"""Climbs a ladder: one rung after the other, until the last, or until going on would be useless or unsafe."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.ladder.company import PAUSE_S
from engines.ladder.plan import CLOSED, LadderPlan
from engines.ladder.rung import Rung, Tally
from engines.targets.target import allow_connections
from services.common.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engines.ladder.company import Company
    from engines.targets.target import Target


@dataclass(frozen=True, slots=True)
class Ladder:
    """What was measured."""

    target: str
    plan: LadderPlan
    rungs: tuple[Rung, ...]
    ended: str
    """Why it would go no higher; empty where all rungs were climbed and held."""

    @property
    def best(self) -> Rung | None:
        """The rung with the most tokens a second; None where there is none."""
        return max(self.rungs, key=lambda rung: rung.tokens_per_s, default=None)


def ignore(_rung: Rung) -> None:
    """The listener of those who do not watch."""


async def climb(
    target: Target,
    prompts: Sequence[str],
    plan: LadderPlan,
    *,
    on_rung: Callable[[Rung], None] = ignore,
    company: Company | None = None,
) -> Ladder:
    """Measures all rungs.

    Args:
        target: The server.
        prompts: Taken in turn; not empty.
        plan: What is measured.
        on_rung: Told each rung as it ends.
        company: Clients of another engine that work meanwhile, where there are any.

    Raises:
        InvalidArgumentError: The plan cannot be.
        ResourceExhaustedError: The system does not allow so many connections.
        FabricError: Not one request of the first rung ended well: the error is the last one that was met.
    """
    plan.check()
    allow_connections(plan.connections)
    rungs: list[Rung] = []
    ended = ""
    climber = _Climber(target, prompts, plan, company)
    for level in plan.rungs:
        rung = await climber.measure(level)
        rungs.append(rung)
        on_rung(rung)
        if len(rungs) == 1 and rung.finished == 0 and climber.last_error is not None:
            raise climber.last_error
        if ended := _reason_to_end(rung, plan):
            break
    return Ladder(target.name, plan, tuple(rungs), ended)


def _reason_to_end(rung: Rung, plan: LadderPlan) -> str:
    if rung.error_share > plan.error_share_max:
        worst = max(rung.errors, key=lambda reason: rung.errors[reason])
        return (
            f"at {rung.level:g}, {rung.error_share:.1%} of the requests failed, mostly {worst}; "
            f"{plan.error_share_max:.1%} are allowed"
        )
    if rung.first_token.p99 > plan.first_token_max_s:
        return (
            f"at {rung.level:g}, one request in a hundred waited {rung.first_token.p99:.1f} s or longer for its first "
            f"token; {plan.first_token_max_s:g} s are allowed"
        )
    if rung.company is not None and rung.company.finished == 0:
        return f"at {rung.level:g}, no request of the other engine's clients ended within {rung.measured_s:g} s"
    if rung.finished == 0:
        return f"at {rung.level:g}, no request ended within {rung.measured_s:g} s"
    if rung.cut:
        return f"at {rung.level:g}, {rung.cut} requests did not end within {plan.drain_s:g} s after the rung"
    return ""


class _Climber:
    def __init__(self, target: Target, prompts: Sequence[str], plan: LadderPlan, company: Company | None) -> None:
        self._company = company
        self._target = target
        self._prompts = itertools.cycle(prompts)
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 -- times of a load, nothing secret
        self._sent = itertools.count()
        self.last_error: FabricError | None = None

    async def measure(self, level: float) -> Rung:
        """Measures one rung; when it returns, or is cancelled, nothing of it is in flight."""
        tally = Tally()
        stop = asyncio.Event()
        flying: set[asyncio.Task[None]] = set()
        if self._plan.mode == CLOSED:
            drivers = [asyncio.create_task(self._client(tally, stop, flying)) for _ in range(int(level))]
        else:
            drivers = [asyncio.create_task(self._arrivals(level, tally, stop, flying))]
        try:
            await asyncio.sleep(self._plan.warmup_s)
            tally.begin = time.monotonic()
            before = self._company.done() if self._company else None
            await asyncio.sleep(self._plan.rung_s)
            tally.over(time.monotonic())
            if self._company and before:
                tally.company = self._company.done().since(before)
            stop.set()
            await self._drain(flying, tally)
        finally:
            for task in (*drivers, *flying):
                task.cancel()
            await asyncio.gather(*drivers, *flying, return_exceptions=True)
        return tally.rung(level)

    async def _drain(self, flying: set[asyncio.Task[None]], tally: Tally) -> None:
        if flying:
            _, left = await asyncio.wait(tuple(flying), timeout=self._plan.drain_s)
            tally.cut = len(left)

    async def _client(self, tally: Tally, stop: asyncio.Event, flying: set[asyncio.Task[None]]) -> None:
        """One client of a closed loop."""
        while not stop.is_set():
            failed = tally.errors.total()
            task = self._launch(tally, flying)
            await asyncio.wait((task,))
            if tally.errors.total() > failed:
                await asyncio.sleep(PAUSE_S)

    async def _arrivals(self, rate: float, tally: Tally, stop: asyncio.Event, flying: set[asyncio.Task[None]]) -> None:
        """Requests of an open loop, at times that are due whatever became of those before."""
        due = time.monotonic()
        while not stop.is_set():
            due += self._random.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if stop.is_set():
                return
            if len(flying) < self._plan.in_flight_max:
                self._launch(tally, flying)
            elif tally.counts(time.monotonic()):
                tally.shed += 1

    def _launch(self, tally: Tally, flying: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._request(next(self._prompts), tally))
        flying.add(task)
        task.add_done_callback(flying.discard)
        return task

    async def _request(self, prompt: str, tally: Tally) -> None:
        sent, number = time.monotonic(), next(self._sent)
        tally.waiting_since[number] = sent
        first = last = 0.0
        tokens = 0

        def on_tokens(count: int) -> None:
            nonlocal first, last, tokens
            last = time.monotonic()
            if not first:
                first = last
                tally.waiting_since.pop(number, None)
                if tally.counts(first):
                    tally.first_token_s.append(first - sent)
            tokens += count
            if tally.counts(last):
                tally.tokens += count

        try:
            await self._target.ask(prompt, self._plan.max_tokens, on_tokens)
        except FabricError as error:
            self.last_error = error
            if tally.counts(time.monotonic()):
                tally.errors[error.reason] += 1
            return
        finally:
            tally.waiting_since.pop(number, None)
        if tally.counts(time.monotonic()):
            tally.finished += 1
            if tokens > 1:
                tally.per_token_s.append((last - first) / (tokens - 1))
