# SPDX-License-Identifier: Apache-2.0
"""Load on the broker's decision core alone: work goes in, ends come back, no wire and no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import generation_pb2
from services.broker.core.decision import Decision
from services.broker.core.settings import CoreSettings
from services.broker.core.workers import EngineFacts
from services.broker.work import SampleEnd, Work

if TYPE_CHECKING:
    from services.broker.core.attempts import Attempt
    from services.common.errors import FabricError

DIGEST = "0" * 64
_SAMPLING = generation_pb2.SamplingParameters()
_DIGESTS = frozenset({DIGEST})


def engine_facts(vocabulary: int, block_tokens: int) -> EngineFacts:
    """An engine with so large a vocabulary and blocks."""
    return EngineFacts(
        DIGEST, "load", vocabulary, block_tokens, slots=256, step_token_budget=1 << 16, longest_step_s=10.0
    )


class Silence:
    """A sink that nobody listens to."""

    def started(self, work: Work, engine_digest: str) -> None:
        """See Sink."""

    def tokens(self, work: Work, sample: int, tokens: object, logprobs: object) -> None:
        """See Sink."""

    def restarted(self, work: Work) -> bool:
        """See Sink."""
        return True

    def finished(self, work: Work, end: object) -> None:
        """See Sink."""

    def failed(self, work: Work, error: FabricError) -> None:
        """See Sink."""
        raise AssertionError(f"{work.key} failed: {error}")


class Load:
    """Makes work and drives it through a core.

    Args:
        vocabulary: Ids are drawn below it.
        block_tokens: Of the engine.
        heads: Shared heads; 0 for prompts that share nothing.
        head_tokens: Their length.
        prompt_tokens: Length of a prompt, its head included.
        max_tokens: What each may generate.
    """

    def __init__(
        self, *, vocabulary: int, block_tokens: int, heads: int, head_tokens: int, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.decision = Decision(CoreSettings(waiting_requests_max=10_000_000, waiting_bytes_max=1 << 40))
        self.decision.learn_engine(engine_facts(vocabulary, block_tokens))
        self.now = 0.0
        self._rng = np.random.default_rng(1)
        self._vocabulary = vocabulary
        self._heads = [self._ids(head_tokens) for _ in range(heads)] or [self._ids(0)]
        self._tail_tokens = prompt_tokens - head_tokens
        self._max_tokens = max_tokens
        self._usage = generation_pb2.Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=head_tokens,
            computed_tokens=prompt_tokens - head_tokens,
            generated_tokens=max_tokens,
        )
        self._sink = Silence()
        self._made = 0
        self.ended = 0

    def works(self, count: int) -> list[Work]:
        """Makes so much work."""
        return [self._work() for _ in range(count)]

    def submit(self, count: int) -> None:
        """Makes so much work and hands it in."""
        for refusal in self.decision.submit(self.works(count), self.now):
            if refusal is not None:
                raise refusal

    def give(self) -> list[Attempt]:
        """Lets the core give out what can go."""
        self.now += 0.05
        return self.decision.give_out(self.now)

    def finish(self, count: int) -> None:
        """Gives out, and ends so many of what is out, oldest first."""
        self.give()
        for worker in self.decision.scheduler.workers.values():
            for handle, attempt in list(worker.outstanding.items())[:count]:
                self.decision.context_done(worker, handle, attempt.head_tokens, self._usage.computed_tokens)
                self.decision.finished(worker, handle, _NO_SAMPLES, self._usage, None, None, self.now)
                self.ended += 1
        self.decision.deliver()

    def _ids(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._rng.integers(0, self._vocabulary, count, dtype=np.int32)

    def _work(self) -> Work:
        self._made += 1
        head = self._heads[self._made % len(self._heads)]
        return Work(
            ("", f"row-{self._made}"),
            np.concatenate([head, self._ids(self._tail_tokens)]),
            self._max_tokens,
            _DIGESTS,
            self._sink,
            job="job",
            sampling=_SAMPLING,
        )


_NO_SAMPLES: list[SampleEnd] = []
