# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests whose attempt was lost: they run again, apart or among the others, or end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ifabric.engine.v1 import generation_pb2
from services.broker.core.entry import Entry, State
from services.broker.core.loss import QUARANTINE_AT, Loss
from services.common import reasons
from services.common.errors import (
    FabricError,
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from services.broker.core.attempts import Attempt
    from services.broker.core.requests import Requests
    from services.broker.core.scheduler import Scheduler
    from services.broker.core.settings import CoreSettings
    from services.broker.core.timers import Timers
    from services.broker.core.workers import Worker


class Recovery:
    """Decides about lost attempts."""

    def __init__(self, settings: CoreSettings, scheduler: Scheduler, requests: Requests, timers: Timers) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._requests = requests
        self._timers = timers
        self._failed: list[Entry] = []
        """Suspects of engine faults since `settle`, set apart already."""

    def worker_lost(self, worker: Worker, now: float, loss: Loss) -> None:
        """All attempts at a worker are lost; see Decision.worker_lost."""
        attempts = list(worker.outstanding.values())
        self._scheduler.remove_worker(worker, now)
        self._requests.counters.lost_attempts += len(attempts)
        lost: list[Entry] = []
        for attempt in attempts:
            self._scheduler.close(attempt)
            if attempt.computed_tokens:
                self._requests.add_usage(attempt.entry, generation_pb2.Usage(computed_tokens=attempt.computed_tokens))
            self._lose(attempt, lost, guilty=loss is Loss.DIED, innocent=loss is Loss.LEFT)
        self._again(lost, now)

    def attempt_failed(self, attempt: Attempt, error: FabricError, now: float) -> None:
        """A worker gave an attempt up with an error; it is closed already.

        What a worker would not take goes elsewhere. What an engine's fault took along is found out about as after a
        death: apart, in the end alone. Anything else is the answer.
        """
        lost: list[Entry] = []
        if isinstance(error, InternalError) or error.reason == reasons.ENGINE_FAILED:
            self._lose(attempt, lost, guilty=True, innocent=False, verdict=error)
            for entry in lost:
                entry.flow.set_apart(entry)
            self._failed += lost
        elif isinstance(error, UnavailableError | ResourceExhaustedError):
            self._lose(attempt, lost, guilty=False, innocent=True)
            self._again(lost, now)
        else:
            self._requests.end(attempt.entry, error)

    def attempt_returned(self, attempt: Attempt, now: float) -> None:
        """A worker ended an attempt by itself, to go away: nobody here asked. It is closed already."""
        lost: list[Entry] = []
        self._lose(attempt, lost, guilty=False, innocent=True)
        self._again(lost, now)

    def settle(self, now: float) -> None:
        """What failed since the last call runs again: one fault takes many along, and they come one by one."""
        failed, self._failed = self._failed, []
        self._scheduler.set_apart([entry for entry in failed if entry.state is State.APART], now)

    def _lose(
        self,
        attempt: Attempt,
        lost: list[Entry],
        *,
        guilty: bool,
        innocent: bool,
        verdict: FabricError | None = None,
    ) -> None:
        """Decides what becomes of an entry whose attempt was lost; those that run again are added to `lost`.

        Args:
            attempt: What was lost.
            lost: Added to.
            guilty: Whether the loss speaks against whoever had the worker to itself.
            innocent: Whether it speaks against nobody.
            verdict: What the engine said.
        """
        entry = attempt.entry
        if attempt.cancelled:
            self._requests.ended_cancelled(entry)
            return
        if entry.delivered and not entry.work.sink.restarted(entry.work):
            self._requests.end(
                entry,
                UnavailableError("the worker was lost after the first tokens were sent", reason=reasons.WORKER_LOST),
            )
            return
        entry.delivered = False
        if not innocent:
            entry.losses += 1
            entry.losses_alone += guilty and not attempt.had_company
        if entry.losses_alone >= QUARANTINE_AT:
            # An engine that says no is an answer, not a death.
            self._requests.counters.quarantined += verdict is None
            self._requests.end(
                entry,
                verdict
                or FailedPreconditionError(
                    f"the request ended its worker {entry.losses_alone} times while it ran alone there",
                    reason=reasons.QUARANTINED,
                ),
            )
            return
        if entry.attempts >= self._settings.attempts_max:
            self._requests.end(
                entry,
                verdict
                or UnavailableError(
                    f"the request lost its worker {entry.attempts} times", reason=reasons.WORKER_LOST, retry_after_s=1.0
                ),
            )
            return
        lost.append(entry)

    def _again(self, lost: list[Entry], now: float) -> None:
        """Lets lost entries run again: apart where they are suspect, among the others after a delay where not.

        Who was suspect once stays it, however its next worker is lost.
        """
        self._scheduler.set_apart([entry for entry in lost if entry.losses], now)
        for entry in lost:
            if not entry.losses:
                entry.flow.set_apart(entry)
                at = now + self._scheduler.suspects.delay(entry.attempts)
                self._timers.at(at, functools.partial(self._readmit, entry, at))

    def _readmit(self, entry: Entry, now: float) -> None:
        if entry.state is State.APART:
            self._scheduler.readmit(entry, now)
