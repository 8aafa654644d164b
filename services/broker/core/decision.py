# SPDX-License-Identifier: Apache-2.0
"""The core without its wires: what was accepted, what became of it, and what is to be sent.

Everything here is a plain call with the time as an argument: no task, no socket, no clock. `core.py` puts it on the
event loop, tests and benchmarks drive it directly. Sinks hear of ends only in `deliver`, so that nothing that they do
meets a half-made decision; tokens they hear at once.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import generation_pb2
from services.broker.core.accounting import JobAccount
from services.broker.core.entry import Entry, State
from services.broker.core.flow import FlowKey
from services.broker.core.loss import QUARANTINE_AT
from services.broker.core.scheduler import Scheduler
from services.broker.core.timers import Timers
from services.broker.work import Lane, SampleEnd, WorkEnd
from services.common import reasons
from services.common.errors import (
    AlreadyExistsError,
    FabricError,
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ifabric.engine.v1 import node_pb2
    from services.broker.core.attempts import Attempt
    from services.broker.core.settings import CoreSettings
    from services.broker.core.workers import Amount, EngineFacts, Worker
    from services.broker.work import TokenArray, Work

_NO_TOKENS: TokenArray = np.empty(0, np.int32)
_ENTRY_BYTES = 1200
"""What a request costs beside its ids: measured, see benchmarks/memory.py."""
_FLOW_KEPT_S = 60.0
"""How long what was learnt of a flow outlives its work."""
_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
_INTERACTIVE_ATTEMPTS_MAX = 3


@dataclass(slots=True)
class Counters:
    """What happened so far."""

    logical_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    late_results: int = 0
    lost_attempts: int = 0
    reattempts: int = 0
    quarantined: int = 0


class _Room:
    """What may still be taken in."""

    __slots__ = ("_bytes", "_requests")

    def __init__(self, requests: int, bytes_left: int) -> None:
        self._requests = requests
        self._bytes = bytes_left

    def take(self, size: int) -> None:
        self._requests -= 1
        self._bytes -= size

    def refuse(self) -> FabricError | None:
        if self._requests <= 0:
            what = "as many requests are in flight as the broker may hold"
        elif self._bytes <= 0:
            what = "the requests in flight take as much memory as the broker may use for them"
        else:
            return None
        return ResourceExhaustedError(what, retry_after_s=1.0)


class Decision:
    """The core's decisions.

    Args:
        settings: Figures to work by.
        engines: Facts of every engine heard of, by digest; `learn_engine` adds to it.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._engines: dict[str, EngineFacts] = {}
        self._entries: dict[tuple[str, str], Entry] = {}
        self._jobs: dict[str, JobAccount] = {}
        self._paused: set[str] = set()
        self._ends: list[tuple[Work, WorkEnd | FabricError]] = []
        self.timers = Timers()
        self.scheduler = Scheduler(settings, self.timers, self._engines, self._too_large)
        self._cancels: dict[Worker, list[int]] = defaultdict(list)
        self.counters = Counters()
        self.draining = False
        """Whether new work is refused."""

    # -- from the front door ---------------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work], now: float) -> list[FabricError | None]:
        """Takes work in; see work.Core.submit."""
        if self.draining:
            return [UnavailableError("the broker is going away", reason=reasons.DRAINING) for _ in works]
        room = self._room()
        results: list[FabricError | None] = []
        for work in works:
            taken = room.refuse() or self._submit(work, now, room)
            results.append(taken)
        return results

    def cancel(self, keys: Sequence[tuple[str, str]]) -> int:
        """Ends work; returns how many were in flight."""
        found = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                found += 1
                self._cancel(entry)
        return found

    def finish_early(self, work: Work) -> None:
        """Ends one piece of work whose front door has all it wants."""
        entry = self._entries.get(work.key)
        if entry is not None and entry.work is work:
            self._cancel(entry)

    def pause_job(self, job: str, paused: bool, now: float) -> None:
        """Gives out nothing more of a job, or again."""
        (self._paused.add if paused else self._paused.discard)(job)
        for flow in self.scheduler.flows.values():
            if flow.key.job == job:
                flow.paused = paused
                flow.served_at = now

    def end_job(self, job: str) -> JobAccount | None:
        """Ends the account of a job and returns it; None where none of its work was accepted."""
        self._paused.discard(job)
        account = self._jobs.pop(job, None)
        for flow in [flow for flow in self.scheduler.flows.values() if flow.key.job == job]:
            if account is not None:
                account.cut_tokens += flow.cut_tokens
            if not flow.entries:
                self.scheduler.release(flow)
        return account

    def entries(self) -> list[Entry]:
        """Returns every request in flight."""
        return list(self._entries.values())

    def fail_all(self, error: FabricError) -> None:
        """Ends everything in flight with an error."""
        for entry in list(self._entries.values()):
            if entry.attempt is not None:
                self.scheduler.close(entry.attempt)
            self._end(entry, error)

    def take_cancels(self) -> list[tuple[Worker, list[int]]]:
        """Returns what workers are to be told to end, by handle, and forgets it."""
        cancels = list(self._cancels.items())
        self._cancels.clear()
        return cancels

    @property
    def in_flight(self) -> int:
        """Requests accepted and not ended."""
        return len(self._entries)

    def deliver(self) -> int:
        """Tells the sinks of everything that has ended; returns how much that was."""
        ends, self._ends = self._ends, []
        for work, end in ends:
            if isinstance(end, WorkEnd):
                work.sink.finished(work, end)
            else:
                work.sink.failed(work, end)
        return len(ends)

    # -- from the workers ------------------------------------------------------------------------------------------

    def learn_engine(self, facts: EngineFacts) -> None:
        """Takes in an engine; work that names its digest can be accepted from now on."""
        self._engines[facts.digest] = facts

    def worker_up(self, worker: Worker) -> None:
        """A worker's stream is up."""
        self.scheduler.add_worker(worker)

    def worker_retired(self, worker: Worker) -> None:
        """A worker takes nothing new; what it has goes on."""
        self.scheduler.retire_worker(worker)

    def worker_lost(self, worker: Worker, now: float, *, innocent: bool) -> None:
        """A worker's stream has ended, or counts as ended: its attempts are lost and run elsewhere.

        Args:
            innocent: The worker said why, and it was none of its work: nothing is suspect.
        """
        attempts = list(worker.outstanding.values())
        apart = worker.apart
        self.scheduler.remove_worker(worker)
        self._cancels.pop(worker, None)
        self.counters.lost_attempts += len(attempts)
        alone = len(attempts) == 1
        lost: list[Entry] = []
        for attempt in attempts:
            self.scheduler.close(attempt)
            self._lose(attempt, lost, alone=alone, innocent=innocent)
        self._again(lost, now, innocent=innocent)
        if apart is not None:
            self.scheduler.set_apart([entry for entry in apart.waiting if entry.state is State.APART], now)

    def credit(self, worker: Worker, credit: Amount) -> None:
        """A worker grants a new credit."""
        worker.ledger.limit = credit
        worker.has_room()

    def stats(self, worker: Worker, stats: node_pb2.EngineStats, now: float) -> None:
        """A worker tells the counters of its engine."""
        if stats.progress_tick != worker.progress_tick or not (stats.queued or stats.active):
            worker.progress_tick, worker.progressed = stats.progress_tick, now
        # Other brokers' work ages what the pool holds too.
        worker.clock = max(worker.clock, stats.prompt_tokens_computed + stats.generated_tokens)

    def context_done(self, worker: Worker, handle: int, cached: int, computed: int) -> None:
        """A worker has computed a prompt."""
        attempt = worker.outstanding.get(handle)
        if attempt is None:
            return  # it was given up, or its end overtook this
        attempt.computed_tokens = computed
        worker.clock += computed
        self.scheduler.computed(attempt, cached)

    def tokens(
        self, worker: Worker, handle: int, sample: int, ids: TokenArray, logprobs: npt.NDArray[np.float32] | None
    ) -> None:
        """A worker sends new tokens of a sample."""
        attempt = worker.outstanding.get(handle)
        if attempt is None:
            self.counters.late_results += 1
            return
        entry = attempt.entry
        entry.delivered = True
        entry.work.sink.tokens(entry.work, sample, ids, logprobs)

    def finished(
        self,
        worker: Worker,
        handle: int,
        samples: list[SampleEnd],
        usage: generation_pb2.Usage,
        payload: generation_pb2.Payload | None,
        prompt_logprobs: npt.NDArray[np.float32] | None,
        now: float,
    ) -> None:
        """An attempt ended well."""
        attempt = worker.outstanding.get(handle)
        if attempt is None:
            self.counters.late_results += 1
            return
        worker.clock += usage.generated_tokens + (0 if attempt.context_done else usage.computed_tokens)
        cut_short = bool(samples) and any(sample.finish_reason == _CANCELLED for sample in samples)
        if not cut_short:
            self.scheduler.computed(attempt, usage.cached_tokens)
            self.scheduler.keep(attempt)
        self.scheduler.close(attempt)
        entry = attempt.entry
        if cut_short and not attempt.cancelled:
            # The worker ended it by itself, to go away: nobody here asked.
            self._add_usage(entry, usage)
            self._again([entry], now, innocent=True)
            return
        self._end(entry, self._work_end(worker, entry, samples, usage, payload, prompt_logprobs))

    def failed(
        self, worker: Worker, handle: int, error: FabricError, usage: generation_pb2.Usage, now: float
    ) -> None:
        """An attempt ended with an error."""
        attempt = worker.outstanding.get(handle)
        if attempt is None:
            self.counters.late_results += 1
            return
        alone = len(worker.outstanding) == 1
        self.scheduler.close(attempt)
        entry = attempt.entry
        self._add_usage(entry, usage)
        lost: list[Entry] = []
        suspect = isinstance(error, InternalError) or error.reason == reasons.ENGINE_FAILED
        if isinstance(error, UnavailableError | ResourceExhaustedError) and not suspect:
            self._lose(attempt, lost, alone=False, innocent=True)
            self._again(lost, now, innocent=True)
        elif suspect:
            # What an engine's fault took along is found out about as after a death: apart, in the end alone.
            self._lose(attempt, lost, alone=alone, innocent=False, verdict=error)
            self._again(lost, now, innocent=False)
        else:
            self._end(entry, error)

    # -- time ------------------------------------------------------------------------------------------------------

    def give_out(self, now: float) -> list[Attempt]:
        """Gives out what can go now; the attempts are to be sent in this order."""
        self.timers.run(now)
        given = self.scheduler.give_out(now)
        for attempt in given:
            entry = attempt.entry
            work = entry.work
            account = self._jobs.get(work.job)
            if account is not None:
                account.dispatched(entry, now)
            if not entry.started:
                entry.started = True
                work.sink.started(work, attempt.worker.facts.digest)
            elif attempt.number > 1:
                self.counters.reattempts += 1
        return given

    def check_waiting(self, now: float) -> None:
        """Fails work that no worker could run for too long, and forgets idle flows; called about every second."""
        limit = self._settings.nobody_limit_s
        served = {worker.facts.digest for worker in self.scheduler.workers.values() if worker.serving}
        for flow in list(self.scheduler.flows.values()):
            if not flow.entries:
                if now - flow.served_at > _FLOW_KEPT_S:
                    self.scheduler.release(flow)
                continue
            if flow.key.digests & served or flow.nobody_since is None:
                flow.nobody_since = now if not flow.key.digests & served else None
                continue
            if now - flow.nobody_since > limit:
                error = UnavailableError(
                    f"no worker has served any engine of this request for {limit:g} s", reason=reasons.UNAVAILABLE
                )
                stuck = [entry for entry in self.scheduler.suspects.waiting() if entry.flow is flow]
                for entry in [*flow.tree.waiting(), *stuck]:
                    self._end(entry, error)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _submit(self, work: Work, now: float, room: _Room) -> FabricError | None:
        if work.key in self._entries:
            return AlreadyExistsError(f"request {work.key[1]!r} is in flight", metadata={"request_id": work.key[1]})
        if not work.engine_digests <= self._engines.keys():
            unknown = min(work.engine_digests - self._engines.keys())
            return UnavailableError(f"the engine {unknown[:12]} is not known here")
        flow = self.scheduler.flow(
            FlowKey(work.lane, work.key[0], work.job, work.priority, work.salt, work.engine_digests))
        flow.paused = work.job in self._paused
        raw = work.tokens.tobytes()
        prompt_tokens = len(work.tokens)
        work.tokens = _NO_TOKENS
        entry = Entry(work, flow, prompt_tokens, flow.expected_decode(work.max_tokens) * work.samples, now)
        self._entries[work.key] = entry
        flow.entries += 1
        self.counters.logical_tokens += prompt_tokens
        before = flow.tree.bytes
        placed = self.scheduler.admit(entry, raw, now=now, chains=bool(work.job))
        room.take(flow.tree.bytes - before + _ENTRY_BYTES)
        if work.job:
            account = self._jobs.get(work.job)
            if account is None:
                account = self._jobs[work.job] = JobAccount.open(
                    flow.block_tokens, self._settings.bound_chains_max)
            account.accepted(prompt_tokens, placed)
        return None

    def _room(self) -> _Room:
        settings = self._settings
        return _Room(
            settings.waiting_requests_max - len(self._entries), settings.waiting_bytes_max - self.held_bytes())

    def held_bytes(self) -> int:
        """Memory that requests in flight take, in bytes, as estimated."""
        return self.scheduler.id_bytes() + len(self._entries) * _ENTRY_BYTES

    def _cancel(self, entry: Entry) -> None:
        attempt = entry.attempt
        if attempt is not None:
            if not attempt.cancelled:
                attempt.cancelled = True
                self._cancels[attempt.worker].append(attempt.handle)
            return
        self._end(entry, self._cancelled_end(entry))

    def _lose(
        self,
        attempt: Attempt,
        lost: list[Entry],
        *,
        alone: bool,
        innocent: bool,
        verdict: FabricError | None = None,
    ) -> None:
        """Decides what becomes of an entry whose attempt was lost; those that run again are added to `lost`."""
        entry = attempt.entry
        if verdict is None and attempt.computed_tokens:
            self._add_usage(entry, generation_pb2.Usage(computed_tokens=attempt.computed_tokens))
        if attempt.cancelled:
            self._end(entry, self._cancelled_end(entry))
            return
        if entry.delivered and not entry.work.sink.restarted(entry.work):
            self._end(entry, UnavailableError(
                "the worker was lost after the first tokens were sent", reason=reasons.WORKER_LOST))
            return
        entry.delivered = False
        if not innocent:
            entry.losses += 1
            entry.losses_alone += alone
        if entry.losses_alone >= QUARANTINE_AT:
            self.counters.quarantined += 1
            self._end(entry, verdict or FailedPreconditionError(
                f"the request ended its worker {entry.losses_alone} times while it ran alone there",
                reason=reasons.QUARANTINED))
            return
        interactive = entry.work.lane is Lane.INTERACTIVE
        if entry.attempts >= (_INTERACTIVE_ATTEMPTS_MAX if interactive else self._settings.attempts_max):
            self._end(entry, verdict or UnavailableError(
                f"the request lost its worker {entry.attempts} times", reason=reasons.WORKER_LOST, retry_after_s=1.0))
            return
        lost.append(entry)

    def _again(self, lost: list[Entry], now: float, *, innocent: bool) -> None:
        """Lets lost entries run again: apart where they are suspect, among the others after a delay where not."""
        if not innocent:
            if lost:
                self.scheduler.set_apart(lost, now)
            return
        for entry in lost:
            entry.flow.set_apart(entry)
            at = now + self.scheduler.suspects.delay(entry.attempts)
            self.timers.at(at, functools.partial(self._readmit, entry, at))

    def _readmit(self, entry: Entry, now: float) -> None:
        if entry.state is State.APART:
            self.scheduler.readmit(entry, now)

    def _too_large(self, entry: Entry, cost: Amount) -> None:
        self._end(entry, FailedPreconditionError(
            f"the request needs a credit of {cost.tokens} tokens, {cost.sequences} sequences and "
            f"{cost.payload_bytes} payload bytes; no worker that may serve it grants that much"))

    def _end(self, entry: Entry, end: WorkEnd | FabricError) -> None:
        """Ends a request: out of every structure, into the account, and its sink hears of it in `deliver`."""
        self.scheduler.withdraw(entry)
        flow, work = entry.flow, entry.work
        del self._entries[work.key]
        flow.entries -= 1
        account = self._jobs.get(work.job)
        usage = end.usage if isinstance(end, WorkEnd) else entry.usage
        if usage is not None:
            counters = self.counters
            counters.computed_tokens += usage.computed_tokens
            counters.cached_tokens += usage.cached_tokens
            counters.generated_tokens += usage.generated_tokens
        if isinstance(end, WorkEnd):
            if account is not None:
                account.finished(end.node_id, end.usage)
            if end.node_id:
                flow.learn(end.usage.generated_tokens // work.samples)
        elif account is not None and usage is not None:
            account.spent(usage)
        self._ends.append((work, end))

    def _add_usage(self, entry: Entry, usage: generation_pb2.Usage) -> None:
        if entry.usage is None:
            entry.usage = generation_pb2.Usage(prompt_tokens=entry.prompt_tokens)
        entry.usage.computed_tokens += usage.computed_tokens
        entry.usage.generated_tokens += usage.generated_tokens

    def _work_end(
        self,
        worker: Worker,
        entry: Entry,
        samples: list[SampleEnd],
        usage: generation_pb2.Usage,
        payload: generation_pb2.Payload | None,
        prompt_logprobs: npt.NDArray[np.float32] | None,
    ) -> WorkEnd:
        if entry.usage is not None:
            before, entry.usage = entry.usage, usage
            usage = generation_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                computed_tokens=usage.computed_tokens + before.computed_tokens,
                generated_tokens=usage.generated_tokens + before.generated_tokens,
            )
        return WorkEnd(
            samples, usage, worker.facts.digest, worker.node_id, payload, prompt_logprobs, entry.attempts
        )

    def _cancelled_end(self, entry: Entry) -> WorkEnd:
        sample = SampleEnd(_NO_TOKENS, None, _CANCELLED, -1)
        usage = entry.usage or generation_pb2.Usage(prompt_tokens=entry.prompt_tokens)
        return WorkEnd([sample] * entry.work.samples, usage, "", "", None, None, entry.attempts)
