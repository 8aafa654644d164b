# SPDX-License-Identifier: Apache-2.0
"""The core as a state machine: arrivals, cancels, workers that join, die, go away, answer in any order.

Whatever happens: nothing is lost, nothing ends twice, credit is never exceeded, every accepted request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.broker.core.loss import Loss
from services.broker.core.settings import CoreSettings
from services.broker.core.workers import Amount, Worker
from services.broker.work import Lane, WorkEnd
from services.common.errors import FailedPreconditionError, InternalError, InvalidArgumentError, UnavailableError
from tests.broker_core.checks import check
from tests.broker_core.made import BLOCK, DIGEST, OTHER, Bench, RecordingSink, work

if TYPE_CHECKING:
    from services.broker.core.attempts import Attempt
    from services.broker.work import Work

# Few different blocks, so that prompts share heads of every length, and part anywhere.
_blocks = st.lists(st.integers(0, 2), min_size=0, max_size=5)
_tail = st.integers(0, BLOCK)


# Mostly one flow, since only within one do prompts meet.
_kinds = st.sampled_from(
    [
        *[{}] * 6,
        *[{"lane": Lane.INTERACTIVE, "job": "", "stream": True}] * 3,
        {"stream": True},
        {"tenant": "other"},
        {"priority": 1},
        {"salt": 1},
        {"samples": 2},
        {"digests": frozenset({DIGEST, OTHER})},
        {"max_tokens": 40},
    ]
)


def _prompt(blocks: list[int], tail: int) -> list[int]:
    ids = [block * 10 + at for block in blocks for at in range(BLOCK)]
    return [*ids, *range(500, 500 + tail)] or [7]


@dataclass
class Fate:
    """What was asked of a request, and whether it may still run."""

    work: Work
    sink: RecordingSink
    cancelled: bool = False
    tokens_read: bool = False


@dataclass
class World:
    fates: dict[str, Fate] = field(default_factory=dict)
    prompts: dict[str, bytes] = field(default_factory=dict)


class CoreMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(leads=st.sampled_from([1.0, 30.0]))
    def begin(self, leads: float) -> None:
        self.bench = Bench(
            CoreSettings(
                bulk_linger_s=0.0,
                interactive_linger_s=0.0,
                lead_limit_s=leads,
                overdue_s=40.0,
                ageing_s=5.0,
                holdings_bytes_max=20_000,
                retry_burst=10_000,
                quantum=2,
                join_factor=0.1,
            )
        )
        self.world = World()
        self.names = 0

    def _workers(self) -> list[Worker]:
        return list(self.bench.decision.scheduler.workers.values())

    def _attempts(self) -> list[Attempt]:
        return [attempt for worker in self._workers() for attempt in worker.outstanding.values()]

    @rule(blocks=_blocks, tail=_tail, count=st.integers(1, 12), wanted=_kinds, takes_back=st.booleans())
    def arrive(self, blocks: list[int], tail: int, count: int, wanted: dict[str, Any], takes_back: bool) -> None:
        for at in range(count):
            sink = RecordingSink(takes_back=takes_back)
            prompt = _prompt([*blocks[: len(blocks) - at % 2], *range(3 + at, 3 + at + at % 3)], tail)
            made = work(prompt, sink=sink, **{"max_tokens": 3, **wanted})
            name = made.key[1]
            assert self.bench.submit(made) == [None]
            self.world.fates[name] = Fate(made, sink)
            self.world.prompts[name] = np.array(prompt, "<i4").tobytes()

    @rule(
        digest=st.sampled_from([DIGEST, DIGEST, DIGEST, OTHER]),
        sequences=st.integers(2, 12),
        pool=st.sampled_from([0, 40, 400]),
    )
    @precondition(lambda self: len(self._workers()) < 4)
    def join(self, digest: str, sequences: int, pool: int) -> None:
        self.names += 1
        self.bench.worker(
            f"w{self.names}",
            digest=digest,
            sequences=sequences,
            tokens=sequences * 30,
            pool_tokens=pool,
            block_tokens=BLOCK if pool else 0,
        )

    @rule(data=st.data(), loss=st.sampled_from(Loss))
    @precondition(lambda self: len(self._workers()) > 1)
    def lose(self, data: st.DataObject, loss: Loss) -> None:
        self.bench.lose(data.draw(st.sampled_from(self._workers())), loss)

    @rule(data=st.data())
    @precondition(lambda self: self._workers())
    def retire(self, data: st.DataObject) -> None:
        self.bench.decision.worker_retired(data.draw(st.sampled_from(self._workers())), self.bench.now)

    @rule(data=st.data())
    @precondition(lambda self: self._workers())
    def fall_silent(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self._workers()))
        worker.quiet = not worker.quiet

    @rule(data=st.data())
    @precondition(lambda self: self._workers())
    def stand_still(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self._workers()))
        worker.standing = not worker.standing

    @rule(data=st.data(), sequences=st.integers(2, 12))
    @precondition(lambda self: self._workers())
    def grant(self, data: st.DataObject, sequences: int) -> None:
        worker = data.draw(st.sampled_from(self._workers()))
        self.bench.decision.credit(worker, Amount(sequences * 30, sequences, 0))

    @rule()
    def give(self) -> None:
        before = {worker: worker.ledger.limit for worker in self._workers()}
        for attempt in self.bench.give():
            worker, limit = attempt.worker, before[attempt.worker]
            assert worker.able
            assert worker.facts.digest in attempt.entry.work.engine_digests
            assert worker.ledger.tokens <= limit.tokens
            assert worker.ledger.sequences <= limit.sequences
            if attempt.apart:
                assert all(other.apart for other in worker.outstanding.values()), "a suspect runs beside others"

    @rule(data=st.data(), share=st.floats(0, 1))
    @precondition(lambda self: self._attempts())
    def compute(self, data: st.DataObject, share: float) -> None:
        attempt = data.draw(st.sampled_from(self._attempts()))
        cached = int(share * (attempt.entry.prompt_tokens - 1)) // BLOCK * BLOCK
        self.bench.computed(attempt, cached)

    @rule(data=st.data())
    @precondition(lambda self: self._attempts())
    def stream(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self._attempts()))
        if attempt.entry.work.stream_tokens:
            self.bench.decision.tokens(attempt.worker, attempt.handle, 0, np.array([1], np.int32), None)
            self.world.fates[attempt.entry.work.key[1]].tokens_read = True

    @rule(data=st.data(), count=st.integers(1, 5))
    @precondition(lambda self: self._attempts())
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            attempts = self._attempts()
            if attempts:
                attempt = data.draw(st.sampled_from(attempts))
                self.bench.finish(attempt, reason=3 if attempt.cancelled else 1)

    @rule(
        data=st.data(),
        error=st.sampled_from(
            [
                UnavailableError("x"),
                InternalError("x"),
                InvalidArgumentError("x"),
            ]
        ),
    )
    @precondition(lambda self: self._attempts())
    def fail(self, data: st.DataObject, error: Any) -> None:
        self.bench.fail(data.draw(st.sampled_from(self._attempts())), error)

    @rule(data=st.data())
    @precondition(lambda self: self.world.fates)
    def cancel(self, data: st.DataObject) -> None:
        fate = self.world.fates[data.draw(st.sampled_from(sorted(self.world.fates)))]
        fate.cancelled = True
        assert self.bench.decision.cancel([fate.work.key]) == (not fate.sink.ends)
        self.bench.decision.deliver()

    @rule(seconds=st.sampled_from([0.1, 2.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.decision.check_waiting(self.bench.now)
        self.bench.decision.deliver()

    @invariant()
    def structures_hold(self) -> None:
        if hasattr(self, "bench"):
            check(self.bench.decision, self.world.prompts)
            alive = {entry.work.key[1] for entry in self.bench.decision.requests.all()}
            for name, fate in self.world.fates.items():
                assert (name in alive) == (not fate.sink.ends), "ended and in flight, or neither"

    @rule(data=st.data())
    @precondition(lambda self: self.world.fates)
    def answer_late(self, data: st.DataObject) -> None:
        """A worker that was given up, or that repeats itself, is not heard."""
        sent = [attempt for attempt in self.bench.sent if attempt.handle not in attempt.worker.outstanding]
        if sent:
            attempt = data.draw(st.sampled_from(sent))
            late = self.bench.decision.requests.counters.late_results
            self.bench.finish(attempt)
            assert self.bench.decision.requests.counters.late_results == late + 1

    def teardown(self) -> None:
        """With two good workers that answer, everything ends, and everything is given back."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        for worker in self._workers():
            bench.lose(worker, Loss.LEFT)
        for digest in (DIGEST, OTHER):
            bench.worker(f"last-{digest[0]}", digest=digest, sequences=8, tokens=400)
        for _ in range(2000):
            if not len(bench.decision.requests):
                break
            bench.now += 0.5
            for attempt in [*bench.give(), *self._attempts()]:
                if attempt.handle in attempt.worker.outstanding:
                    bench.finish(attempt, reason=3 if attempt.cancelled else 1)
        assert not len(bench.decision.requests), "accepted work never ended"
        check(bench.decision, self.world.prompts)
        for fate in self.world.fates.values():
            end = fate.sink.end
            if not isinstance(end, WorkEnd):
                assert isinstance(
                    end, UnavailableError | InternalError | InvalidArgumentError | FailedPreconditionError
                )


CoreMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCore = CoreMachine.TestCase
