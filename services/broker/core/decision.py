# SPDX-License-Identifier: Apache-2.0
"""The core without its wires: what was accepted, what became of it, and what is to be sent.

Everything here is a plain call with the time as an argument: no task, no socket, no clock. `broker.py` puts it on the
event loop, tests and benchmarks drive it directly. Sinks hear of ends in `deliver`, and of tokens at once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ifabric.engine.v1 import generation_pb2
from services.broker.core.recovery import Recovery
from services.broker.core.requests import Requests
from services.broker.core.scheduler import Scheduler
from services.broker.core.speeds import SpeedBook
from services.broker.core.timers import Timers
from services.broker.core.workers import EngineCounters
from services.common import reasons
from services.common.errors import FabricError, FailedPreconditionError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from ifabric.engine.v1 import node_pb2
    from services.broker.core.accounting import JobAccount
    from services.broker.core.attempts import Attempt
    from services.broker.core.entry import Entry
    from services.broker.core.loss import Loss
    from services.broker.core.settings import CoreSettings
    from services.broker.core.workers import Amount, EngineFacts, Worker
    from services.broker.work import SampleEnd, TokenArray, Work

_FLOW_KEPT_S = 60.0
"""How long what was learnt of a flow outlives its work."""
_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


class Decision:
    """The core's decisions."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._engines: dict[str, EngineFacts] = {}
        self._cancels: dict[Worker, list[int]] = defaultdict(list)
        self.timers = Timers()
        self.scheduler = Scheduler(settings, self.timers, self._engines, self._too_large)
        self.requests = Requests(settings, self.scheduler, self._engines, self.timers)
        self._recovery = Recovery(settings, self.scheduler, self.requests, self.timers)
        self.speeds = SpeedBook()
        self.draining = False
        """Whether new work is refused."""

    @property
    def engines(self) -> Mapping[str, EngineFacts]:
        """Facts of every engine heard of, by digest."""
        return self._engines

    # -- from the front door ---------------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work], now: float) -> list[FabricError | None]:
        """Takes work in; see work.Core.submit."""
        if self.draining:
            return [UnavailableError("the broker is going away", reason=reasons.DRAINING) for _ in works]
        return self.requests.accept(works, now)

    def cancel(self, keys: Sequence[tuple[str, str]]) -> int:
        """Ends work; returns how many were in flight."""
        found = 0
        for key in keys:
            entry = self.requests.get(key)
            if entry is not None:
                found += 1
                self._cancel(entry)
        return found

    def finish_early(self, work: Work) -> None:
        """Ends one piece of work whose front door has all it wants."""
        entry = self.requests.get(work.key)
        if entry is not None and entry.work is work:
            self._cancel(entry)

    def pause_job(self, job: str, paused: bool, now: float) -> None:
        """Gives out nothing more of a job, or again."""
        self.requests.pause_job(job, paused, now)

    def job_account(self, job: str) -> JobAccount | None:
        """The account of a job up to now; None where none of its work was accepted."""
        return self.requests.job_account(job)

    def end_job(self, job: str) -> JobAccount | None:
        """Ends the account of a job and returns it; None where none of its work was accepted."""
        return self.requests.end_job(job)

    def fail_all(self, error: FabricError) -> None:
        """Ends everything in flight with an error."""
        for entry in self.requests.all():
            if entry.attempt is not None:
                self.scheduler.close(entry.attempt)
            self.requests.end(entry, error)

    def deliver(self) -> int:
        """Tells the sinks of everything that has ended; returns how much that was."""
        return self.requests.deliver()

    def take_cancels(self) -> list[tuple[Worker, list[int]]]:
        """Returns what workers are to be told to end, by handle, and forgets it."""
        cancels = list(self._cancels.items())
        self._cancels.clear()
        return cancels

    # -- from the workers ------------------------------------------------------------------------------------------

    def learn_engine(self, facts: EngineFacts) -> None:
        """Takes in an engine; work that names its digest can be accepted from now on."""
        self._engines[facts.digest] = facts

    def worker_up(self, worker: Worker) -> None:
        """A worker's stream is up."""
        self.scheduler.add_worker(worker)

    def worker_retired(self, worker: Worker, now: float) -> None:
        """A worker takes nothing new; what it has goes on."""
        self.scheduler.retire_worker(worker, now)

    def worker_cordoned(self, worker: Worker, cordoned: bool, now: float) -> None:
        """An operator has a worker take nothing new, or again; what it has goes on."""
        if cordoned and not worker.cordoned:
            self.scheduler.cordon_worker(worker, now)
        elif worker.cordoned and not cordoned:
            self.scheduler.uncordon_worker(worker)

    def worker_lost(self, worker: Worker, now: float, loss: Loss) -> None:
        """A worker's stream has ended, or counts as ended: its attempts are lost and run elsewhere."""
        self.timers.read(now)
        self.speeds.forget(worker.id)
        self._cancels.pop(worker, None)
        self._recovery.worker_lost(worker, now, loss)

    def could_go_elsewhere(self, worker: Worker) -> bool:
        """Whether another worker that answers may take anything of what this one has."""
        others = {other.facts.digest for other in self.scheduler.workers.values() if other is not worker and other.able}
        return any(attempt.entry.flow.key.digests & others for attempt in worker.outstanding.values())

    def credit(self, worker: Worker, credit: Amount) -> None:
        """A worker grants a new credit."""
        worker.ledger.limit = credit
        worker.has_room()

    def stats(self, worker: Worker, stats: node_pb2.EngineStats, now: float) -> None:
        """A worker tells the counters of its engine."""
        if stats.progress_tick != worker.progress_tick or not (stats.queued or stats.active):
            worker.progress_tick, worker.progressed, worker.standing = stats.progress_tick, now, False
        worker.counters = EngineCounters(
            stats.steps, stats.prompt_tokens_computed + stats.generated_tokens, stats.busy_us, stats.uptime_us
        )
        if worker.counters_first is None:
            worker.counters_first = worker.counters
        self.speeds.learn(worker.id, worker.facts.digest, stats)
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
            self.requests.counters.late_results += 1
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
            self.requests.counters.late_results += 1
            return
        self.timers.read(now)
        worker.clock += usage.generated_tokens + (0 if attempt.context_done else usage.computed_tokens)
        cut_short = bool(samples) and any(sample.finish_reason == _CANCELLED for sample in samples)
        if not cut_short:
            self.scheduler.computed(attempt, usage.cached_tokens)
            self.scheduler.keep(attempt)
        self.scheduler.close(attempt)
        if cut_short and not attempt.cancelled:
            self.requests.add_usage(attempt.entry, usage)
            self._recovery.attempt_returned(attempt, now)
        else:
            if not cut_short:
                work = attempt.entry.work
                self.speeds.ended(worker.facts.digest, work.samples * work.max_tokens, usage.generated_tokens)
            self.requests.ended_well(attempt, samples, usage, payload, prompt_logprobs)

    def failed(self, worker: Worker, handle: int, error: FabricError, usage: generation_pb2.Usage, now: float) -> None:
        """An attempt ended with an error."""
        attempt = worker.outstanding.get(handle)
        if attempt is None:
            self.requests.counters.late_results += 1
            return
        self.timers.read(now)
        self.scheduler.close(attempt)
        self.requests.add_usage(attempt.entry, usage)
        self._recovery.attempt_failed(attempt, error, now)

    # -- time ------------------------------------------------------------------------------------------------------

    def give_out(self, now: float) -> list[Attempt]:
        """Gives out what can go now; the attempts are to be sent in this order."""
        self.timers.run(now)
        self._recovery.settle(now)
        given = self.scheduler.give_out(now)
        for attempt in given:
            self.requests.dispatched(attempt, now)
        return given

    def check_waiting(self, now: float) -> None:
        """Fails work that no worker could run for too long, and forgets idle flows; called about every second."""
        limit = self._settings.nobody_limit_s
        workers = self.scheduler.workers.values()
        served = {worker.facts.digest for worker in workers if worker.serving and not worker.standing}
        cordoned = {worker.facts.digest for worker in workers if worker.cordoned}
        for flow in list(self.scheduler.flows.values()):
            if not flow.entries:
                if now - flow.served_at > _FLOW_KEPT_S:
                    self.requests.forget(flow)
            elif flow.key.digests & served or (flow.key.digests & cordoned and not flow.interactive):
                flow.nobody_since = None  # bulk work waits out what an operator does to its nodes
            elif flow.nobody_since is None:
                flow.nobody_since = now
            elif now - flow.nobody_since > limit:
                error = UnavailableError(f"no worker has served any engine of this request for {limit:g} s")
                suspects = [entry for entry in self.scheduler.suspects.waiting() if entry.flow is flow]
                for entry in [*flow.tree.waiting(), *suspects]:
                    self.requests.end(entry, error)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _cancel(self, entry: Entry) -> None:
        attempt = entry.attempt
        if attempt is None:
            self.requests.ended_cancelled(entry)
        elif not attempt.cancelled:
            attempt.cancelled = True
            self._cancels[attempt.worker].append(attempt.handle)

    def _too_large(self, entry: Entry, cost: Amount) -> None:
        self.requests.end(
            entry,
            FailedPreconditionError(
                f"the request needs a credit of {cost.tokens} tokens, {cost.sequences} sequences and "
                f"{cost.payload_bytes} payload bytes; no worker that may serve it grants that much"
            ),
        )
