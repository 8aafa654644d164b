# SPDX-License-Identifier: Apache-2.0
"""Everything that was accepted and has not ended, the accounts of jobs, and the ends that sinks have yet to hear.

Sinks hear of ends only in `deliver`, so that nothing that they do meets a half-made decision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import generation_pb2
from services.broker.core.accounting import JobAccount
from services.broker.core.entry import Entry
from services.broker.core.flow import FlowKey
from services.broker.work import SampleEnd, WorkEnd
from services.common import logs, reasons
from services.common.errors import AlreadyExistsError, FabricError, ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from services.broker.core.attempts import Attempt
    from services.broker.core.flow import Flow
    from services.broker.core.scheduler import Scheduler
    from services.broker.core.settings import CoreSettings
    from services.broker.core.timers import Timers
    from services.broker.core.workers import EngineFacts
    from services.broker.work import TokenArray, Work

_log = logs.get("broker.core")
_NO_TOKENS: TokenArray = np.empty(0, np.int32)
_ENTRY_BYTES = 1440
"""What a request costs beside its ids, as measured: `make bench-memory`."""


@dataclass(slots=True)
class Counters:
    """What happened so far."""

    logical_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cut_tokens: int = 0
    """Tokens of heads that a second worker computed, in flows that are no more."""
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


class Requests:
    """The requests in flight.

    Args:
        settings: Bounds.
        scheduler: Where they wait.
        engines: Facts of every engine heard of, by digest.
        timers: Say what time it is.
    """

    def __init__(
        self, settings: CoreSettings, scheduler: Scheduler, engines: Mapping[str, EngineFacts], timers: Timers
    ) -> None:
        self._settings = settings
        self._timers = timers
        self._scheduler = scheduler
        self._engines = engines
        self._entries: dict[tuple[str, str], Entry] = {}
        self._tenants: Counter[str] = Counter()
        """Requests in flight of each tenant; counted only where they are limited."""
        self._jobs: dict[str, JobAccount] = {}
        self._paused: set[str] = set()
        self._ends: list[tuple[Work, WorkEnd | FabricError]] = []
        self.on_end: Callable[[Entry, WorkEnd | FabricError, float], None] | None = None
        """Told of each end, with the time, as it happens."""
        self.counters = Counters()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[str, str]) -> Entry | None:
        """Returns the request in flight under a key."""
        return self._entries.get(key)

    def all(self) -> list[Entry]:
        """Returns every request in flight."""
        return list(self._entries.values())

    def held_bytes(self) -> int:
        """Memory that requests in flight take, in bytes, as estimated."""
        return self._scheduler.id_bytes() + len(self._entries) * _ENTRY_BYTES

    def accept(self, works: Sequence[Work], now: float) -> list[FabricError | None]:
        """Takes work in, each piece by itself, as far as the bounds allow."""
        settings = self._settings
        room = _Room(settings.waiting_requests_max - len(self._entries), settings.waiting_bytes_max - self.held_bytes())
        return [room.refuse() or self._accept(work, now, room) for work in works]

    def end(self, entry: Entry, end: WorkEnd | FabricError) -> None:
        """Ends a request: out of every structure, into the account, and its sink hears of it in `deliver`."""
        self._scheduler.withdraw(entry)
        flow, work = entry.flow, entry.work
        del self._entries[work.key]
        if self._settings.tenant_requests_max:
            self._tenant_left(work.key[0])
        flow.entries -= 1
        account = self._jobs.get(work.job)
        if account is not None:
            account.left(entry, self._timers.now)
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
        if self.on_end is not None:
            self.on_end(entry, end, self._timers.now)
        self._ends.append((work, end))

    def add_usage(self, entry: Entry, usage: generation_pb2.Usage) -> None:
        """Remembers what an attempt cost whose request goes on."""
        if entry.usage is None:
            entry.usage = generation_pb2.Usage(prompt_tokens=entry.prompt_tokens)
        entry.usage.computed_tokens += usage.computed_tokens
        entry.usage.generated_tokens += usage.generated_tokens

    def ended_well(
        self,
        attempt: Attempt,
        samples: list[SampleEnd],
        usage: generation_pb2.Usage,
        payload: generation_pb2.Payload | None,
        prompt_logprobs: npt.NDArray[np.float32] | None,
    ) -> None:
        """A request's last attempt ended well, at this cost."""
        entry, worker = attempt.entry, attempt.worker
        if entry.usage is not None:
            before, entry.usage = entry.usage, usage
            usage = generation_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                computed_tokens=usage.computed_tokens + before.computed_tokens,
                generated_tokens=usage.generated_tokens + before.generated_tokens,
            )
        self.end(
            entry,
            WorkEnd(samples, usage, worker.facts.digest, worker.node_id, payload, prompt_logprobs, entry.attempts),
        )

    def ended_cancelled(self, entry: Entry) -> None:
        """A request was cancelled before any worker had it to the end."""
        sample = SampleEnd(_NO_TOKENS, None, generation_pb2.FINISH_REASON_CANCELLED, -1)
        usage = entry.usage or generation_pb2.Usage(prompt_tokens=entry.prompt_tokens)
        self.end(entry, WorkEnd([sample] * entry.work.samples, usage, "", "", None, None, entry.attempts))

    def deliver(self) -> int:
        """Tells the sinks of everything that has ended; returns how much that was."""
        ends, self._ends = self._ends, []
        for work, end in ends:
            try:
                if isinstance(end, WorkEnd):
                    work.sink.finished(work, end)
                else:
                    work.sink.failed(work, end)
            except Exception:
                # A sink that breaks its promise must not cost the others their ends.
                _log.exception("sink.failed", request_id=work.key[1])
        return len(ends)

    def dispatched(self, attempt: Attempt, now: float) -> None:
        """An attempt is about to be sent."""
        entry = attempt.entry
        work = entry.work
        account = self._jobs.get(work.job)
        if entry.sent is None:
            entry.sent = now
        else:
            self.counters.reattempts += 1
        if account is not None:
            account.dispatched(attempt, now)
        if not entry.started:
            entry.started = True
            work.sink.started(work, attempt.worker.facts.digest)

    def pause_job(self, job: str, paused: bool, now: float) -> None:
        """Lets nothing more of a job be given out, or again."""
        (self._paused.add if paused else self._paused.discard)(job)
        for flow in self._scheduler.flows.values():
            if flow.key.job == job:
                flow.paused = paused
                flow.served_at = now

    def job_account(self, job: str) -> JobAccount | None:
        """The account of a job up to now; None where none of its work was accepted."""
        for flow in self._scheduler.flows.values():
            if flow.key.job == job:
                self._settle(flow)
        return self._jobs.get(job)

    def end_job(self, job: str) -> JobAccount | None:
        """Ends the account of a job and returns it; None where none of its work was accepted."""
        self._paused.discard(job)
        for flow in [flow for flow in self._scheduler.flows.values() if flow.key.job == job]:
            self.forget(flow)
        return self._jobs.pop(job, None)

    def forget(self, flow: Flow) -> None:
        """Drops a flow that is not needed any more, into the account of its job."""
        self._settle(flow)
        if not flow.entries:
            self._scheduler.release(flow)

    def _settle(self, flow: Flow) -> None:
        """Moves what a flow has counted into the account of its job."""
        account = self._jobs.get(flow.key.job)
        self.counters.cut_tokens += flow.owners.cut_tokens
        if account is not None:
            account.cut_tokens += flow.owners.cut_tokens
            account.head_prefills += flow.owners.tally.prefills
            account.heads_held += flow.owners.tally.held
        flow.owners.cut_tokens = flow.owners.tally.prefills = flow.owners.tally.held = 0

    def _tenant_left(self, tenant: str) -> None:
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def _accept(self, work: Work, now: float, room: _Room) -> FabricError | None:
        if work.key in self._entries:
            return AlreadyExistsError(f"request {work.key[1]!r} is in flight", metadata={"request_id": work.key[1]})
        if not work.engine_digests <= self._engines.keys():
            unknown = min(work.engine_digests - self._engines.keys())
            return UnavailableError(f"the engine {unknown[:12]} is not known here")
        most = self._settings.tenant_requests_max
        if most:
            tenant = work.key[0]
            if self._tenants[tenant] >= most:
                return ResourceExhaustedError(
                    f"{most} requests of the tenant are in flight, as many as it may have",
                    reason=reasons.QUOTA_EXCEEDED,
                    metadata={"limit": str(most)},
                    retry_after_s=1.0,
                )
            self._tenants[tenant] += 1
        flow = self._scheduler.flow(
            FlowKey(work.lane, work.key[0], work.job, work.priority, work.salt, work.engine_digests)
        )
        flow.paused = work.job in self._paused
        raw = work.tokens.tobytes()
        prompt_tokens = len(work.tokens)
        work.tokens = _NO_TOKENS
        entry = Entry(work, flow, prompt_tokens, flow.expected_decode(work.max_tokens) * work.samples, now)
        self._entries[work.key] = entry
        flow.entries += 1
        self.counters.logical_tokens += prompt_tokens
        before = flow.tree.bytes
        placed = self._scheduler.admit(entry, raw, now=now, chains=bool(work.job))
        room.take(flow.tree.bytes - before + _ENTRY_BYTES)
        if work.job:
            account = self._jobs.get(work.job)
            if account is None:
                account = self._jobs[work.job] = JobAccount.open(flow.block_tokens, self._settings.bound_chains_max)
            account.accepted(prompt_tokens, placed)
        return None
