# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests whose attempt was lost: they run again, apart or among the others, or end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ifabric.engine.v1 import generation_pb2
from services.broker.core.entry import Entry, State
from services.broker.core.loss import QUARANTINE_AT, Loss
from services.broker.work import Lane
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

_INTERACTIVE_ATTEMPTS_MAX = 3


class Recovery:
    """Decides about lost attempts."""

    def __init__(self, settings: CoreSettings, scheduler: Scheduler, requests: Requests, timers: Timers) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._requests = requests
        self._timers = timers

    def worker_lost(self, worker: Worker, now: float, loss: Loss) -> None:
        """All attempts at a worker are lost; see Decision.worker_lost."""
        attempts = list(worker.outstanding.values())
        apart = worker.apart
        self._scheduler.remove_worker(worker)
        self._requests.counters.lost_attempts += len(attempts)
        innocent = loss is Loss.LEFT
        alone = len(attempts) == 1 and loss is Loss.DIED
        lost: list[Entry] = []
        for attempt in attempts:
            self._scheduler.close(attempt)
            if attempt.computed_tokens:
                self._requests.add_usage(attempt.entry, generation_pb2.Usage(computed_tokens=attempt.computed_tokens))
            self._lose(attempt, lost, alone=alone, innocent=innocent)
        self._again(lost, now, innocent=innocent)
        if apart is not None:
            self._scheduler.set_apart([entry for entry in apart.waiting if entry.state is State.APART], now)

    def attempt_failed(self, attempt: Attempt, error: FabricError, now: float, *, alone: bool) -> None:
        """A worker gave an attempt up with an error; it is closed already.

        What a worker would not take goes elsewhere. What an engine's fault took along is found out about as after a
        death: apart, in the end alone. Anything else is the answer.
        """
        suspect = isinstance(error, InternalError) or error.reason == reasons.ENGINE_FAILED
        lost: list[Entry] = []
        if suspect:
            self._lose(attempt, lost, alone=alone, innocent=False, verdict=error)
        elif isinstance(error, UnavailableError | ResourceExhaustedError):
            self._lose(attempt, lost, alone=False, innocent=True)
        else:
            self._requests.end(attempt.entry, error)
        self._again(lost, now, innocent=not suspect)

    def attempt_returned(self, attempt: Attempt, now: float) -> None:
        """A worker ended an attempt by itself, to go away: nobody here asked. It is closed already."""
        lost: list[Entry] = []
        self._lose(attempt, lost, alone=False, innocent=True)
        self._again(lost, now, innocent=True)

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
            entry.losses_alone += alone
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
        interactive = entry.work.lane is Lane.INTERACTIVE
        if entry.attempts >= (_INTERACTIVE_ATTEMPTS_MAX if interactive else self._settings.attempts_max):
            self._requests.end(
                entry,
                verdict
                or UnavailableError(
                    f"the request lost its worker {entry.attempts} times", reason=reasons.WORKER_LOST, retry_after_s=1.0
                ),
            )
            return
        lost.append(entry)

    def _again(self, lost: list[Entry], now: float, *, innocent: bool) -> None:
        """Lets lost entries run again: apart where they are suspect, among the others after a delay where not."""
        if not innocent:
            if lost:
                self._scheduler.set_apart(lost, now)
            return
        for entry in lost:
            entry.flow.set_apart(entry)
            at = now + self._scheduler.suspects.delay(entry.attempts)
            self._timers.at(at, functools.partial(self._readmit, entry, at))

    def _readmit(self, entry: Entry, now: float) -> None:
        if entry.state is State.APART:
            self._scheduler.readmit(entry, now)
