# SPDX-License-Identifier: Apache-2.0
"""What a job was worth and what it cost.

The bound is what a cache without limit would have to compute: distinct whole blocks once, what is left of each prompt
behind its last whole block, and at least one token for each request. The last clause matters only for prompts that are
whole blocks and end where another passes or ends: one of those that end there may be the one that computes its last
block, each further one computes one token. So, with D distinct blocks of B tokens, T the sum of tails, E prompts
without a tail and F distinct ends of those:

    bound = B * D + T + (E - F)

which does not depend on the order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ifabric.broker.v1 import broker_service_pb2
from services.broker.costs import EngineUse, JobCosts, tell_use

if TYPE_CHECKING:
    from ifabric.engine.v1 import generation_pb2
    from services.broker.core.attempts import Attempt
    from services.broker.core.entry import Entry
    from services.broker.core.tree import Placed
    from services.broker.core.workers import EngineCounters, Worker

Chains = npt.NDArray[np.uint64]

_SETTLE_AT = 1 << 13


class DistinctCounter:
    """Counts distinct 64-bit chains: exactly up to a bound, by a growing sample of them beyond.

    Two different chains are taken for one with probability n**2 / 2**65: below 10**-5 for 12 million. Beyond the bound
    only chains below a threshold are kept, each standing for 2**k of them: with 4 million kept the error is about
    0.1 %. Chains lie in sorted runs, each at least twice as long as the next, so that no single addition is slow.

    Args:
        kept_max: How many chains are kept at most, 8 bytes each.
    """

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._runs: list[Chains] = []
        self._new: list[int] = []
        self._shift = 0

    def add(self, chains: list[int]) -> None:
        """Counts chains in."""
        self._new += chains
        if len(self._new) >= _SETTLE_AT:
            self._settle()

    def count(self) -> int:
        """How many distinct chains there were."""
        self._settle()
        return sum(map(len, self._runs)) << self._shift

    def _settle(self) -> None:
        new = self._sampled(np.unique(np.array(self._new, np.uint64)))
        self._new = []
        for run in self._runs:
            new = new[run[np.minimum(np.searchsorted(run, new), len(run) - 1)] != new]
        if len(new):
            self._runs.append(new)
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort(kind="stable")  # two sorted halves: one pass
            self._runs.append(merged)
        while sum(map(len, self._runs)) > self._kept_max:
            self._shift += 1
            self._runs = [run for run in map(self._sampled, self._runs) if len(run)]

    def _sampled(self, chains: Chains) -> Chains:
        return chains[chains < np.uint64(1 << (64 - self._shift))] if self._shift else chains


@dataclass(slots=True)
class Share:
    """What one node did for a job."""

    requests: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0


class Meter:
    """What the engine of one worker did since a job first had something there."""

    __slots__ = ("_since", "_worker")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._since: EngineCounters | None = worker.counters

    def read(self) -> EngineCounters | None:
        """The counters from then to the newest ones; None where the worker has told none."""
        newest, since = self._worker.counters, self._since or self._worker.counters_first
        return None if newest is None or since is None else newest - since

    @property
    def budget(self) -> int:
        """Tokens that a step of the engine may take."""
        return self._worker.facts.step_token_budget

    @property
    def node_id(self) -> str:
        """The worker's node."""
        return self._worker.node_id


@dataclass(slots=True)
class JobAccount:
    """The running account of one job."""

    block_tokens: int
    """Of the tree that its rows are in; 0 where nothing is shared."""
    blocks: DistinctCounter
    ends: DistinctCounter
    logical_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reattempts: int = 0
    cut_tokens: int = 0
    """Tokens of heads that were computed again at a second worker because a group was cut."""
    head_prefills: int = 0
    """Times that a shared head was computed at a worker."""
    heads_held: int = 0
    """Pairs of head and worker in that."""
    waiting_s: float = 0.0
    """Sum over requests of the time from acceptance to the first dispatch, or to the end where there was none."""
    running_s: float = 0.0
    """Sum over requests of the time from the first dispatch to the end."""
    ended: int = 0
    shares: dict[str, Share] = field(default_factory=dict)
    meters: dict[str, Meter] = field(default_factory=dict)
    """By worker: a node that came back is another one."""
    _tails: int = 0
    _without_tail: int = 0

    @classmethod
    def open(cls, block_tokens: int, kept_max: int) -> JobAccount:
        """Makes an empty account; `kept_max` bounds the memory of its bound, see DistinctCounter."""
        return cls(block_tokens, DistinctCounter(kept_max), DistinctCounter(kept_max))

    def accepted(self, prompt_tokens: int, placed: Placed) -> None:
        """A row was taken in; `placed` says what of it was new to the tree."""
        self.logical_tokens += prompt_tokens
        self._tails += prompt_tokens % self.block_tokens if self.block_tokens else prompt_tokens
        if placed.new_chains:
            self.blocks.add(placed.new_chains)
        if placed.end_chain is not None:
            self._without_tail += 1
            self.ends.add([placed.end_chain])

    def bound_tokens(self) -> int:
        """The lower bound on computed prompt tokens; see the module."""
        return self.blocks.count() * self.block_tokens + self._tails + self._without_tail - self.ends.count()

    def dispatched(self, attempt: Attempt, now: float) -> None:
        """A row was sent to a worker."""
        if attempt.number == 1:
            self.waiting_s += now - attempt.entry.arrived
        else:
            self.reattempts += 1
        worker = attempt.worker
        if worker.id not in self.meters:
            self.meters[worker.id] = Meter(worker)

    def left(self, entry: Entry, now: float) -> None:
        """A row has ended, however."""
        self.ended += 1
        if entry.sent is None:
            self.waiting_s += now - entry.arrived
        else:
            self.running_s += now - entry.sent

    def finished(self, node_id: str, usage: generation_pb2.Usage) -> None:
        """A row ended on a node, with what it cost over all its attempts."""
        self.spent(usage)
        if not node_id:
            return  # it was cancelled before any node had it to the end
        share = self.shares.get(node_id)
        if share is None:
            share = self.shares[node_id] = Share()
        share.requests += 1
        share.computed_tokens += usage.computed_tokens
        share.generated_tokens += usage.generated_tokens

    def costs(self) -> JobCosts:
        """What it has cost beyond tokens."""
        engines: dict[str, EngineUse] = {}
        for meter in self.meters.values():
            counters = meter.read()
            if counters is None:
                continue
            use = EngineUse(
                counters.steps,
                meter.budget * counters.steps,
                counters.tokens,
                counters.busy_us,
                counters.uptime_us,
            )
            before = engines.get(meter.node_id)
            engines[meter.node_id] = use if before is None else before.plus(use)
        return JobCosts(
            ended=self.ended,
            cut_tokens=self.cut_tokens,
            head_prefills=self.head_prefills,
            heads_held=self.heads_held,
            waiting_ms=round(1000 * self.waiting_s),
            running_ms=round(1000 * self.running_s),
            engines=engines,
        )

    def report(self) -> broker_service_pb2.JobReport:
        """The account in its wire form, as far as the core knows."""
        costs = self.costs()
        return broker_service_pb2.JobReport(
            requests=self.ended,
            prompt_tokens_logical=self.logical_tokens,
            prompt_tokens_computed=self.computed_tokens,
            prompt_tokens_bound=self.bound_tokens(),
            prompt_tokens_cached=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            reattempts=self.reattempts,
            prompt_tokens_cut=costs.cut_tokens,
            head_prefills=costs.head_prefills,
            heads_held=costs.heads_held,
            waiting_ms=costs.waiting_ms,
            running_ms=costs.running_ms,
            shares=[
                _share(node_id, share, costs.engines.get(node_id)) for node_id, share in sorted(self.shares.items())
            ],
        )

    def spent(self, usage: generation_pb2.Usage) -> None:
        """A row ended, well or not, at this cost."""
        self.computed_tokens += usage.computed_tokens
        self.cached_tokens += usage.cached_tokens
        self.generated_tokens += usage.generated_tokens


def _share(node_id: str, share: Share, use: EngineUse | None) -> broker_service_pb2.NodeShare:
    message = broker_service_pb2.NodeShare(
        node_id=node_id,
        requests=share.requests,
        prompt_tokens_computed=share.computed_tokens,
        generated_tokens=share.generated_tokens,
    )
    if use is not None:
        tell_use(message, use)
    return message
