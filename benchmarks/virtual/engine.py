# SPDX-License-Identifier: Apache-2.0
"""A deterministic model of one card: continuous batching over a paged KV pool that evicts what was used longest ago.

Steps follow one another without pause while there is work. A step computes the next token of every sequence that
generates and fills the rest of its token budget with prompts, oldest first. A request enters the batcher in order of
arrival when a slot is free and its blocks (prompt and the most it may generate, less what is resident) fit into the
pool; prompt blocks stay behind when it ends. As the vendor's scheduler does, a request whose next block is being
being computed by another waits for it, and those behind it pass; that can be switched off.

So can admission: then a request enters as soon as its prompt's blocks fit, takes a block more whenever it has filled
one, and when the pool is full the request that entered last is thrown out and starts anew behind the others, with what
it had generated as part of its prompt.

Runs of steps that only generate are taken together, so that time costs events and not steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Card:
    """Figures of a card and engine; the defaults are about an 8-billion model in FP8 on a current card."""

    pool_blocks: int = 1000
    block_tokens: int = 512
    slots: int = 256
    step_token_budget: int = 8192
    step_us: float = 6000.0
    """A step with no work in it: weights are read."""
    prompt_token_us: float = 28.0
    decode_token_us: float = 20.0
    context_token_us: float = 0.027
    """Reading one cached token for one generated one."""
    holds_followers: bool = True
    """Whether a request waits while another computes its next block."""
    admits: bool = True
    """Whether a request enters only when all that it may come to need is free."""


@dataclass(slots=True, eq=False)
class Job:
    """One request as the card sees it."""

    blocks: Sequence[int]
    """Identity of each block of the prompt; an equal one is the same block and the same prefix."""
    prompt_tokens: int
    output_tokens: int
    tag: object = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    _left: int = 0
    _generated: int = 0
    """Tokens that it had generated when it was thrown out."""
    _first_tick: int = 0
    """Step that made its first token since it entered."""
    _told: bool = False
    """Whether its prompt was told to be computed."""
    _private: int = 0
    _owned: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Events:
    """What a run of steps brought."""

    computed: list[Job] = field(default_factory=list)
    """Prompts that are computed."""
    ended: list[Job] = field(default_factory=list)


class VirtualEngine:
    """One card. The caller owns time: it asks when the next thing happens and says that it has come."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.queue: deque[Job] = deque()
        self.computed_tokens = 0
        self.busy_us = 0.0
        self.steps = 0
        self.thrown_out = 0
        """Times that a request lost what it had for want of room."""
        self._active = 0
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []
        self._tick = 0
        self._tickets = itertools.count()
        self._context = 0
        self._resident: dict[int, int] = {}
        """References to each block in the pool; being computed ones among them."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Resident blocks without references, longest unused first."""
        self._computing: set[int] = set()
        self._private = 0
        self._since = 0.0
        self._run = 0
        self._run_us = 0.0
        self._chunks: list[tuple[Job, int]] = []

    @property
    def begun_us(self) -> float:
        """When the steps under way began."""
        return self._since

    @property
    def in_flight(self) -> int:
        """Requests here."""
        return self._active + len(self.queue)

    def add(self, job: Job, now_us: float) -> float | None:
        """Takes a request in; returns when the steps under way end now, None where the engine was idle."""
        self.queue.append(job)
        return self._cut(now_us)

    def start(self, now_us: float) -> float | None:
        """Starts the next steps; returns when they end, None where there is nothing to do."""
        self._admit()
        card = self.card
        decoding = len(self._decoding)
        if not decoding and not self._prefilling:
            self._run = 0
            return None
        budget = card.step_token_budget - decoding
        self._chunks, filled = [], 0
        for job in self._prefilling:
            if filled >= budget:
                break
            chunk = min(job._left, budget - filled)
            self._chunks.append((job, chunk))
            filled += chunk
        self._run = 1 if filled or not card.admits else self._decoding[0][0] - self._tick
        self._run_us = (
            card.step_us
            + filled * card.prompt_token_us
            + decoding * card.decode_token_us
            + self._context * card.context_token_us
        )
        self._since = now_us
        return now_us + self._duration(self._run)

    def finish(self, now_us: float) -> Events:
        """The steps that `start` began have ended."""
        events = Events()
        if not self.card.admits:
            self._grow()
        decoding, steps = len(self._decoding), self._run
        self.busy_us += self._duration(steps)
        self.steps += steps
        self._run = 0
        self._tick += steps
        self._context += decoding * steps
        for job, chunk in self._chunks:
            job._left -= chunk
            job.computed_tokens += chunk
            self.computed_tokens += chunk
            if not job._left:
                self._prefilled(job, events)
        self._chunks = []
        while self._prefilling and not self._prefilling[0]._left:
            self._prefilling.popleft()
        while self._decoding and self._decoding[0][0] <= self._tick:
            _, _, job = heapq.heappop(self._decoding)
            self._context -= job.prompt_tokens + job.output_tokens
            self._end(job)
            events.ended.append(job)
        return events

    def _duration(self, steps: int) -> float:
        """Time of so many steps in a row: each reads what the ones before have generated."""
        growth = len(self._decoding) * self.card.context_token_us
        return steps * self._run_us + growth * steps * (steps - 1) / 2

    def _cut(self, now_us: float) -> float | None:
        """Ends a run of generating steps with the one under way, so that what arrived can enter behind it."""
        if not self._run:
            return None
        done = 1
        if self._run > 1:
            low, high = 1, self._run
            while low < high:
                middle = (low + high) // 2
                if self._since + self._duration(middle) >= now_us:
                    high = middle
                else:
                    low = middle + 1
            done = low
        self._run = done
        return self._since + self._duration(done)

    def _admit(self) -> None:
        passed: list[Job] = []
        while self.queue and self._active < self.card.slots:
            job = self.queue[0]
            cached = 0
            whole = (job.prompt_tokens - 1) // self.card.block_tokens
            for block in job.blocks[:whole]:
                if block not in self._resident or block in self._computing:
                    break
                cached += 1
            waits = cached < whole and job.blocks[cached] in self._computing
            if waits and self.card.holds_followers:
                passed.append(self.queue.popleft())
                continue
            if not self._enter(job, cached):
                break
            self.queue.popleft()
        self.queue.extendleft(reversed(passed))

    def _enter(self, job: Job, cached: int) -> bool:
        card = self.card
        whole = job.prompt_tokens // card.block_tokens
        at_once = job.output_tokens if card.admits else job._generated
        total = -(-(job.prompt_tokens + at_once) // card.block_tokens)
        reused = job.blocks[:cached]
        # Blocks that another request computes right now are computed twice, and the second copy is private.
        own = [block for block in job.blocks[cached:whole] if block not in self._resident]
        need = total - cached
        woken = sum(block in self._idle for block in reused)
        free = card.pool_blocks - len(self._resident) - self._private
        if need > free + len(self._idle) - woken:
            return False
        for block in reused:
            self._resident[block] += 1
            self._idle.pop(block, None)
        for _ in range(need - free):
            victim, _ = self._idle.popitem(last=False)
            del self._resident[victim]
        for block in own:
            self._resident[block] = 1
            self._computing.add(block)
        job._owned = [*reused, *own]
        job._private = need - len(own)
        self._private += job._private
        job.cached_tokens = cached * card.block_tokens
        job._left = job.prompt_tokens + job._generated - job.cached_tokens
        self._active += 1
        self._prefilling.append(job)
        return True

    def _prefilled(self, job: Job, events: Events) -> None:
        self._computing.difference_update(job._owned)
        if not job._told:
            job._told = True
            events.computed.append(job)
        left = job.output_tokens - job._generated
        if left <= 1:
            self._end(job)
            events.ended.append(job)
            return
        # The step that ends a prompt makes the first token.
        job._first_tick = self._tick
        heapq.heappush(self._decoding, (self._tick + left - 1, next(self._tickets), job))
        self._context += job.prompt_tokens + job._generated + 1

    def _grow(self) -> None:
        """Gives every request that fills its last block in this step another one, or throws out who entered last."""
        block = self.card.block_tokens
        for _, _, job in sorted(self._decoding, key=lambda item: item[1]):
            if job._first_tick < 0:
                continue  # thrown out for one before it
            length = job.prompt_tokens + job._generated + self._tick - job._first_tick + 1
            if (length - 1) % block:
                continue
            while len(self._resident) + self._private >= self.card.pool_blocks and job._first_tick >= 0:
                if self._idle:
                    victim, _ = self._idle.popitem(last=False)
                    del self._resident[victim]
                else:
                    self._throw_out()
            if job._first_tick >= 0:
                job._private += 1
                self._private += 1
        if any(job._first_tick < 0 for _, _, job in self._decoding):
            self._decoding = [item for item in self._decoding if item[2]._first_tick >= 0]
            heapq.heapify(self._decoding)

    def _throw_out(self) -> None:
        """Whoever began to generate last has to start anew."""
        _, _, job = max((item for item in self._decoding if item[2]._first_tick >= 0), key=lambda item: item[1])
        made = self._tick - job._first_tick + 1
        self._context -= job.prompt_tokens + job._generated + made
        job._generated += made
        job._first_tick = -1
        self._end(job)
        self.queue.appendleft(job)
        self.thrown_out += 1

    def _end(self, job: Job) -> None:
        self._active -= 1
        self._private -= job._private
        # Deepest first, so that a prefix outlives what hangs below it.
        for block in reversed(job._owned):
            self._resident[block] -= 1
            if not self._resident[block]:
                self._idle[block] = None
