# SPDX-License-Identifier: Apache-2.0
"""Work, sinks and workers for tests of the core. The workers stand behind the core's plain calls: no socket."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import generation_pb2
from services.broker.core.decision import Decision
from services.broker.core.loss import Loss
from services.broker.core.settings import CoreSettings
from services.broker.core.workers import Amount, EngineFacts, Worker
from services.broker.work import Lane, SampleEnd, Work, WorkEnd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.broker.core.attempts import Attempt
    from services.broker.work import TokenArray
    from services.common.errors import FabricError

DIGEST = "a" * 64
OTHER = "b" * 64
BLOCK = 4
_ids = itertools.count()


def facts(digest: str = DIGEST, *, block_tokens: int = BLOCK, slots: int = 8, budget: int = 64) -> EngineFacts:
    return EngineFacts(digest, f"engine-{digest[0]}", 1000, block_tokens, slots, budget, 1.0)


class RecordingSink:
    """Remembers what it hears, and complains where the order of it is wrong."""

    def __init__(self, *, takes_back: bool = False) -> None:
        self.started_with: list[str] = []
        self.heard: list[int] = []
        self.ends: list[WorkEnd | FabricError] = []
        self._takes_back = takes_back

    @property
    def end(self) -> WorkEnd | FabricError:
        (end,) = self.ends
        return end

    def started(self, work: Work, engine_digest: str) -> None:
        assert not self.started_with, "started twice"
        assert not self.ends, "started after the end"
        self.started_with.append(engine_digest)

    def tokens(self, work: Work, sample: int, tokens: TokenArray, logprobs: object) -> None:
        assert not self.ends, "tokens after the end"
        self.heard += tokens.tolist()

    def restarted(self, work: Work) -> bool:
        if self._takes_back:
            self.heard.clear()
        return self._takes_back

    def finished(self, work: Work, end: WorkEnd) -> None:
        assert not self.ends, "ended twice"
        self.ends.append(end)

    def failed(self, work: Work, error: FabricError) -> None:
        assert not self.ends, "ended twice"
        self.ends.append(error)


def work(
    prompt: Sequence[int],
    *,
    sink: RecordingSink | None = None,
    tenant: str = "t",
    request_id: str | None = None,
    max_tokens: int = 4,
    lane: Lane = Lane.BULK,
    priority: int = 0,
    samples: int = 1,
    salt: int = 0,
    stream: bool = False,
    payload_bytes: int = 0,
    job: str = "j",
    digests: frozenset[str] = frozenset({DIGEST}),
) -> Work:
    return Work(
        key=(tenant, request_id or f"r{next(_ids)}"),
        tokens=np.array(prompt, np.int32),
        max_tokens=max_tokens,
        engine_digests=digests,
        sink=sink or RecordingSink(),
        lane=lane,
        priority=priority,
        samples=samples,
        salt=salt,
        stream_tokens=stream,
        payload_bytes=payload_bytes,
        job=job,
    )


@dataclass
class Bench:
    """A decision with workers that do what the test says."""

    settings: CoreSettings = field(default_factory=lambda: CoreSettings(bulk_linger_s=0.0, interactive_linger_s=0.0))
    now: float = 100.0

    def __post_init__(self) -> None:
        self.decision = Decision(self.settings)
        self.sent: list[Attempt] = []
        for digest in (DIGEST, OTHER):
            self.decision.learn_engine(facts(digest))

    def worker(
        self,
        name: str,
        *,
        digest: str = DIGEST,
        tokens: int = 10_000,
        sequences: int = 64,
        payload_bytes: int = 0,
        pool_tokens: int = 10_000,
        block_tokens: int = BLOCK,
    ) -> Worker:
        made = Worker(
            name,
            facts(digest, block_tokens=block_tokens),
            pool_tokens=pool_tokens,
            credit=Amount(tokens, sequences, payload_bytes),
            now=self.now,
        )
        self.decision.worker_up(made)
        return made

    def submit(self, *works: Work) -> list[FabricError | None]:
        return self.decision.submit(works, self.now)

    def give(self) -> list[Attempt]:
        given = self.decision.give_out(self.now)
        self.sent += given
        self.decision.deliver()
        return given

    def computed(self, attempt: Attempt, cached: int = 0) -> None:
        prompt = attempt.entry.prompt_tokens
        self.decision.context_done(attempt.worker, attempt.handle, cached, prompt - cached)

    def finish(self, attempt: Attempt, *, cached: int = 0, generated: int = 1, reason: int = 1) -> None:
        entry = attempt.entry
        usage = generation_pb2.Usage(
            prompt_tokens=entry.prompt_tokens,
            cached_tokens=cached,
            computed_tokens=entry.prompt_tokens - cached,
            generated_tokens=generated,
        )
        ends = [SampleEnd(np.arange(generated, dtype=np.int32), None, reason, -1)] * entry.work.samples
        self.decision.finished(attempt.worker, attempt.handle, ends, usage, None, None, self.now)
        self.decision.deliver()

    def fail(self, attempt: Attempt, error: FabricError) -> None:
        self.decision.failed(attempt.worker, attempt.handle, error, generation_pb2.Usage(), self.now)
        self.decision.deliver()

    def lose(self, worker: Worker, loss: Loss = Loss.DIED) -> None:
        self.decision.worker_lost(worker, self.now, loss)
        self.decision.deliver()


def ids_of(attempts: Sequence[Attempt]) -> list[str]:
    return [attempt.entry.work.key[1] for attempt in attempts]


class Caches:
    """An infinite cache for each worker: what it computes, and in how many prefills of each head.

    A prompt finds what was computed before it was *sent*: siblings that are sent together compute their head each.
    """

    def __init__(self) -> None:
        self._held: dict[str, set[tuple[int, ...]]] = {}
        self.computed_tokens = 0

    def run(self, bench: Bench, prompts: dict[str, list[int]], *, rounds: int = 10_000) -> None:
        """Answers everything that is given until nothing is in flight."""
        while len(bench.decision.requests):
            rounds -= 1
            assert rounds, "it does not come to an end"
            found: dict[int, int] = {}
            given = bench.give()
            for attempt in given:
                prompt = prompts[attempt.entry.work.key[1]]
                held = self._held.setdefault(attempt.worker.id, set())
                blocks = 0
                while tuple(prompt[: (blocks + 1) * BLOCK]) in held and (blocks + 1) * BLOCK <= len(prompt):
                    blocks += 1
                found[attempt.handle] = min(blocks * BLOCK, len(prompt) - 1)
            for attempt in given:
                prompt = prompts[attempt.entry.work.key[1]]
                held = self._held[attempt.worker.id]
                held.update(tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK))
                cached = found[attempt.handle]
                self.computed_tokens += len(prompt) - cached
                bench.computed(attempt, cached)
            for attempt in given:
                bench.finish(attempt, cached=found[attempt.handle])
            bench.now += 0.1
