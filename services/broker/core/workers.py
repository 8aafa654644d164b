# SPDX-License-Identifier: Apache-2.0
"""What the core knows of one worker: limits from its contract, its credit, and what its KV pool is believed to hold.

Nothing here asks what kind of engine it is: limits and capabilities only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from services.broker.core.heads import Claim

if TYPE_CHECKING:
    from ifabric.engine.v1 import contract_pb2
    from services.broker.core.attempts import Attempt
    from services.broker.core.entry import Entry
    from services.broker.core.loss import Apart


_numbers = itertools.count(1)
_MANY_SLOTS = 8


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What scheduling needs of an engine's contract."""

    digest: str
    engine_id: str
    """The name that people know it by; several digests may have one."""
    vocab_size: int
    block_tokens: int
    """Tokens of one KV block; 0 without a cache, and then nothing is shared."""
    slots: int
    step_token_budget: int
    longest_step_s: float

    @classmethod
    def of(cls, digest: str, contract: contract_pb2.EngineContract) -> EngineFacts:
        """Reads them from a complete contract."""
        limits = contract.limits
        return cls(
            digest=digest,
            engine_id=contract.engine_id,
            vocab_size=contract.model.vocab_size,
            block_tokens=limits.kv_block_tokens.value,
            slots=limits.slots,
            step_token_budget=limits.step_token_budget,
            longest_step_s=limits.longest_step_ms / 1000,
        )


class Amount(NamedTuple):
    """Work, in the three measures of credit."""

    tokens: int
    """Prompt tokens and the most that may be generated, over all samples."""
    sequences: int
    payload_bytes: int


def cost_of(entry: Entry) -> Amount:
    """What an entry takes of a worker's credit."""
    work = entry.work
    return Amount(entry.prompt_tokens + work.samples * work.max_tokens, work.samples, work.payload_bytes)


class EngineCounters(NamedTuple):
    """Counters of an engine that only grow while its process lives."""

    steps: int
    tokens: int
    """Prompt tokens computed and tokens generated."""
    busy_us: int
    """Time in steps."""
    uptime_us: int

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Ledger:
    """Credit: what may be outstanding at a worker, as it said last, and what is."""

    __slots__ = ("limit", "payload_bytes", "sequences", "tokens")

    def __init__(self, limit: Amount) -> None:
        self.tokens = self.sequences = self.payload_bytes = 0
        self.limit = limit
        """The newest grant. It may fall below what is outstanding: then nothing goes until enough has ended."""

    def fits(self, cost: Amount, kept_back: float = 0.0) -> bool:
        """Whether the cost may be taken, with a share of tokens and sequences left over for others."""
        limit, share = self.limit, 1.0 - kept_back
        return (
            self.tokens + cost.tokens <= limit.tokens * share
            and self.sequences + cost.sequences <= limit.sequences * share
            and self.payload_bytes + cost.payload_bytes <= limit.payload_bytes
        )

    def could_fit(self, cost: Amount) -> bool:
        """Whether the cost could be taken if nothing were outstanding."""
        limit = self.limit
        return (
            cost.tokens <= limit.tokens
            and cost.sequences <= limit.sequences
            and cost.payload_bytes <= limit.payload_bytes
        )

    def take(self, cost: Amount) -> None:
        """Counts as outstanding."""
        self.tokens += cost.tokens
        self.sequences += cost.sequences
        self.payload_bytes += cost.payload_bytes

    def give_back(self, cost: Amount) -> None:
        """Counts as ended."""
        self.tokens -= cost.tokens
        self.sequences -= cost.sequences
        self.payload_bytes -= cost.payload_bytes

    def fill(self) -> float:
        """Share of the credit that is outstanding: the larger of tokens and sequences; 1 where nothing is granted."""
        if not self.limit.tokens or not self.limit.sequences:
            return 1.0
        return max(self.tokens / self.limit.tokens, self.sequences / self.limit.sequences)


class PoolPlan:
    """What the work at a worker takes of its KV pool, shared heads counted once.

    Credit counts prompts whole; the pool does not. Bulk work is sent only while the pool has room for it, so that the
    engine admits what it is sent soon and in the order in which it is sent. And a new head is led only while the pool
    has room for all heads whose groups are under way beside it, in use or not: or else the leaders of groups whose turn
    has not come would evict the heads of those whose turn it is. When an engine computes what it was believed to hold,
    that plan was too bold: it shrinks at once and recovers slowly.
    """

    __slots__ = ("_ahead_tokens", "_boldness", "_pool_tokens", "heads", "heads_in_use", "own")

    _LEAST = 0.5

    def __init__(self, pool_tokens: int, ahead_tokens: int) -> None:
        """Makes an empty plan.

        Args:
            pool_tokens: Size of the pool; 0 where there is none, and then everything fits.
            ahead_tokens: What may wait at the engine for room, so that it never runs dry.
        """
        self._pool_tokens = pool_tokens
        self._ahead_tokens = ahead_tokens
        self._boldness = 1.0
        self.own = 0
        """Tokens that requests at the worker take for themselves."""
        self.heads = 0
        """Tokens of the heads whose groups are under way."""
        self.heads_in_use = 0
        """Of these, tokens of heads below which something runs."""

    def fits(self, tokens: int) -> bool:
        """Whether the engine will have room for so much more."""
        if not self._pool_tokens:
            return True
        return self.own + self.heads_in_use + tokens <= self._pool_tokens + self._ahead_tokens

    def fits_head(self, tokens: int) -> bool:
        """Whether a new head with its leader, so much in all, leaves room for the heads under way."""
        if not self._pool_tokens:
            return True
        return self.own + self.heads + tokens <= self._pool_tokens * self._boldness

    def missed(self) -> None:
        """A head that was counted on had been evicted."""
        self._boldness = max(self._LEAST, self._boldness * 0.98)

    def hit(self) -> None:
        """A head that was counted on was there."""
        self._boldness = min(1.0, self._boldness * 1.0005)


class Worker:
    """One worker, from the moment its stream is up until it ends."""

    __slots__ = (
        "apart",
        "claims",
        "clock",
        "cordoned",
        "counters",
        "counters_first",
        "doubtful",
        "facts",
        "full",
        "full_for_bulk",
        "heard",
        "id",
        "leading",
        "ledger",
        "node_id",
        "nudged",
        "outstanding",
        "plan",
        "pool_tokens",
        "progress_tick",
        "progressed",
        "quiet",
        "serving",
        "since",
        "standing",
    )

    def __init__(self, node_id: str, facts: EngineFacts, *, pool_tokens: int, credit: Amount, now: float) -> None:
        self.id = f"{node_id}#{next(_numbers)}"
        """Names this stream: a node that comes back is another worker."""
        self.node_id = node_id
        self.facts = facts
        self.ledger = Ledger(credit)
        self.plan = PoolPlan(pool_tokens, facts.step_token_budget)
        self.pool_tokens = pool_tokens
        """Tokens that its KV pool holds; 0 without a cache."""
        self.outstanding: dict[int, Attempt] = {}
        """Attempts that have not ended, by handle."""
        self.leading = 0
        """Prompt tokens that leaders at it have yet to compute."""
        self.serving = True
        """Whether it takes new work."""
        self.cordoned = False
        """Whether an operator has it take no new work: then it does not serve, and may again."""
        self.quiet = False
        """Whether it has been silent for a while: it gets nothing new until it speaks."""
        self.standing = False
        """Whether its process was given up because its engine stood still, and has not moved since."""
        self.doubtful = False
        """Whether its process was given up for that, and has finished nothing since."""
        self.apart: Apart | None = None
        """Suspects that run here, apart from innocent work; None while there are none."""
        self.full = self.full_for_bulk = False
        """Whether the last thing offered did not fit; until something ends or credit changes."""
        self.nudged = False
        """Whether something was handed to it while work was given out."""
        self.claims = 0
        """Claims made so far."""
        self.clock = 0
        """Tokens that its pool took in so far, as far as told: the measure of age for what it holds."""
        self.counters: EngineCounters | None = None
        """What its engine told last; None before the first time."""
        self.counters_first: EngineCounters | None = None
        """And what it told first on this stream."""
        self.since = now
        """When its stream came up."""
        self.heard = now
        """When its last message came."""
        self.progress_tick = -1
        self.progressed = now
        """When its engine last told of progress, or had nothing to do."""

    @property
    def able(self) -> bool:
        """Whether it may get work now."""
        return self.serving and not self.quiet and not self.standing

    def takes(self, *, interactive: bool) -> bool:
        """Whether it would take work of a lane now, as far as is known."""
        full = self.full if interactive else self.full_for_bulk
        return self.able and self.apart is None and not full and self.ledger.fill() < 1

    def may_lead(self, tokens: int) -> bool:
        """Whether a leader with so many tokens to compute may go.

        Prompts that others wait for are paced to what the engine computes in two steps, so that siblings follow while
        their head is warm.
        """
        return not self.leading or self.leading + tokens <= 2 * self.facts.step_token_budget

    def has_room(self) -> None:
        """Something ended, or credit changed: it may be offered work again."""
        self.full = self.full_for_bulk = False

    def has_room_for(self, sequences: int, own_tokens: int) -> bool:
        """Whether so many sequences, of so many tokens of their own in all, could be sent at once."""
        return self.ledger.sequences + sequences <= self.ledger.limit.sequences and self.plan.fits(own_tokens)

    def leaves_slots(self, sequences: int, share: float) -> bool:
        """Whether so many sequences more would leave a share of the engine's slots free.

        That is at least one, but none of an engine that has few: one would be too much of it.
        """
        slots = self.facts.slots
        return self.ledger.sequences + sequences <= slots - max(round(slots * share), slots >= _MANY_SLOTS)

    def next_claim(self, now: float) -> Claim:
        """Makes a claim."""
        self.claims += 1
        return Claim(self.claims, now)

    def private_tokens(self, tokens: int) -> int:
        """What so many tokens of one request's own take of the pool: whole blocks."""
        block = self.facts.block_tokens
        return -(-tokens // block) * block if block else 0
