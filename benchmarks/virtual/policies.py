# SPDX-License-Identifier: Apache-2.0
"""Dispatch policies: ours, and those of the routers that people use.

The others are the published ideas, not the published code: requests leave in order of arrival, each worker has at most
`in_flight` of them, and a policy picks the worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

import xxhash

from benchmarks.virtual.engine import Card, Job
from benchmarks.virtual.workloads import VOCABULARY, Workload
from ifabric.engine.v1 import generation_pb2
from services.broker.core.decision import Decision
from services.broker.core.settings import CoreSettings
from services.broker.core.workers import Amount, EngineFacts, Worker
from services.broker.work import SampleEnd, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.broker.core.attempts import Attempt
    from services.common.errors import FabricError

DIGEST = "0" * 64


def jobs_of(workload: Workload) -> list[Job]:
    """The rows as a card takes them, in order."""
    return [Job(row.blocks, row.prompt_tokens, row.output_tokens) for row in workload.rows]


def _scattered(*blocks: int) -> int:
    """A hash that spreads: block identities are consecutive numbers, and Python's hash of a number is the number."""
    return xxhash.xxh3_64_intdigest(repr(blocks).encode())


class _Picking(ABC):
    """Requests in order of arrival; each is bound to a worker by `pick` when its turn comes."""

    def __init__(self, workload: Workload, cards: Sequence[Card]) -> None:
        self._waiting = deque(jobs_of(workload))
        self._room = [card.slots for card in cards]
        self._bound: list[deque[Job]] = [deque() for _ in cards]

    @abstractmethod
    def pick(self, job: Job) -> int | None:
        """The worker for a request; None for "whichever has most room"."""

    def computed(self, worker: int, job: Job, now_us: float) -> None:  # noqa: B027 -- most of them learn nothing from it
        """See Policy."""

    def ended(self, worker: int, job: Job, now_us: float) -> None:
        """See Policy."""
        self._room[worker] += 1

    def wake_us(self) -> float | None:
        """See Policy."""
        return None

    def give(self, now_us: float) -> list[tuple[int, Job]]:
        """See Policy."""
        given: list[tuple[int, Job]] = []
        for worker, bound in enumerate(self._bound):
            while bound and self._room[worker]:
                self._send(worker, bound.popleft(), given)
        while self._waiting and any(self._room):
            job = self._waiting.popleft()
            picked = self.pick(job)
            worker = max(range(len(self._room)), key=self._room.__getitem__) if picked is None else picked
            if self._room[worker]:
                self._send(worker, job, given)
            else:
                self._bound[worker].append(job)
        return given

    def _send(self, worker: int, job: Job, given: list[tuple[int, Job]]) -> None:
        self._room[worker] -= 1
        given.append((worker, job))


class ArrivalOrder(_Picking):
    """First come, first served, to whoever has most room."""

    def pick(self, job: Job) -> int | None:
        """See _Picking."""
        return None


class HeadHash(_Picking):
    """A hash of the whole head (the first four blocks) picks the worker."""

    _HEAD = 4

    def pick(self, job: Job) -> int | None:
        """See _Picking."""
        return _scattered(*job.blocks[: self._HEAD]) % len(self._room)


class SessionAffinity(_Picking):
    """What belongs to one conversation goes to one worker: the first block that is not common to all tells it."""

    def pick(self, job: Job) -> int | None:
        """See _Picking."""
        return _scattered(job.blocks[min(1, len(job.blocks) - 1)]) % len(self._room)


class CacheAware(_Picking):
    """The worker that saw most of the prompt's blocks lately, where that is half of it or more; else most room."""

    def __init__(self, workload: Workload, cards: Sequence[Card]) -> None:
        super().__init__(workload, cards)
        self._pools = [card.pool_blocks for card in cards]
        self._seen: list[dict[int, None]] = [{} for _ in cards]

    def pick(self, job: Job) -> int | None:
        """See _Picking."""
        best, most = None, len(job.blocks) / 2
        for worker, seen in enumerate(self._seen):
            matched = next((at for at, block in enumerate(job.blocks) if block not in seen), len(job.blocks))
            if matched >= most and self._room[worker]:
                best, most = worker, matched + 1
        return best

    def _send(self, worker: int, job: Job, given: list[tuple[int, Job]]) -> None:
        super()._send(worker, job, given)
        seen = self._seen[worker]
        for block in job.blocks:
            seen.pop(block, None)
            seen[block] = None
        while len(seen) > self._pools[worker]:
            del seen[next(iter(seen))]


class _Sink:
    """Nobody listens; the fleet counts ends."""

    def started(self, work: Work, engine_digest: str) -> None:
        pass

    def tokens(self, work: Work, sample: int, tokens: object, logprobs: object) -> None:
        pass

    def restarted(self, work: Work) -> bool:
        return True

    def finished(self, work: Work, end: object) -> None:
        pass

    def failed(self, work: Work, error: FabricError) -> None:
        raise AssertionError(f"{work.key} failed: {error}")


class Fabric:
    """Ours: the broker's own decisions, over the same cards.

    Args:
        workload: The job.
        cards: What runs it; all alike.
        settings: Of the core.
        plans_pool: Whether the core knows how much the cards' pools hold; else only credit bounds what is sent.
    """

    def __init__(
        self,
        workload: Workload,
        cards: Sequence[Card],
        settings: CoreSettings | None = None,
        *,
        plans_pool: bool = True,
    ) -> None:
        self.decision = Decision(settings or CoreSettings())
        self._attempts: dict[int, tuple[Worker, Attempt]] = {}
        card = cards[0]
        facts = EngineFacts(
            DIGEST, "virtual", VOCABULARY, card.block_tokens, card.slots, card.step_token_budget, longest_step_s=10.0
        )
        self.decision.learn_engine(facts)
        self._workers: list[Worker] = []
        longest = max(row.prompt_tokens + row.output_tokens for row in workload.rows)
        for at, card in enumerate(cards):
            # What a worker's own formula grants, see services/worker/credit.py, without its measured reuse.
            credit = Amount(card.slots * longest, card.slots, 0)
            pool_tokens = card.pool_blocks * card.block_tokens if plans_pool else 0
            worker = Worker(f"w{at}", facts, pool_tokens=pool_tokens, credit=credit, now=0.0)
            self._workers.append(worker)
            self.decision.worker_up(worker)
        self._index = {worker.id: at for at, worker in enumerate(self._workers)}
        works = []
        self._jobs = jobs_of(workload)
        for at, row in enumerate(workload.rows):
            works.append(
                Work(
                    key=("", str(at)),
                    tokens=workload.tokens(row),
                    max_tokens=row.output_tokens,
                    engine_digests=frozenset({DIGEST}),
                    sink=_Sink(),
                    job="job",
                )
            )
            if len(works) == 64:
                self._submit(works)
                works = []
        self._submit(works)

    def _submit(self, works: list[Work]) -> None:
        for refusal in self.decision.submit(works, 0.0):
            if refusal is not None:
                raise refusal

    def computed(self, worker: int, job: Job, now_us: float) -> None:
        """See Policy."""
        holder, attempt = self._attempts[id(job)]
        self.decision.context_done(holder, attempt.handle, job.cached_tokens, job.computed_tokens)

    def ended(self, worker: int, job: Job, now_us: float) -> None:
        """See Policy."""
        holder, attempt = self._attempts.pop(id(job))
        usage = generation_pb2.Usage(
            prompt_tokens=job.prompt_tokens,
            cached_tokens=job.cached_tokens,
            computed_tokens=job.computed_tokens,
            generated_tokens=job.output_tokens,
        )
        self.decision.finished(holder, attempt.handle, _NO_SAMPLES, usage, None, None, now_us / 1e6)

    def wake_us(self) -> float | None:
        """See Policy."""
        at = self.decision.timers.next_at
        return None if at is None or not len(self.decision.requests) else at * 1e6 + 1

    def give(self, now_us: float) -> list[tuple[int, Job]]:
        """See Policy."""
        given = []
        for attempt in self.decision.give_out(now_us / 1e6):
            job = self._jobs[int(attempt.entry.work.key[1])]
            self._attempts[id(job)] = attempt.worker, attempt
            given.append((self._index[attempt.worker.id], job))
        self.decision.deliver()
        return given


_NO_SAMPLES: list[SampleEnd] = []

POLICIES = {
    "fabric": Fabric,
    "arrival_lru": ArrivalOrder,
    "head_hash": HeadHash,
    "session_affinity": SessionAffinity,
    "cache_aware_fifo": CacheAware,
}
