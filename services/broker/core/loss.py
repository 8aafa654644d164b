# SPDX-License-Identifier: Apache-2.0
"""What becomes of work whose worker was lost: suspects, the groups in which they run apart, quarantine, retries.

Whatever was in flight at a worker that died may have killed it. It runs again apart from innocent work: first all of
it together, since most deaths have other causes; what was there for a second death in sixteens; after a third, alone.
Only a request that ends a worker that it has had to itself, twice, is quarantined: an innocent one that had neighbours
is alone with two deaths by chance only where three deaths have singled it out before. A worker that merely stood still
has not been ended by anybody, as far as is known: a starved machine does that to whatever runs there.

Both lanes are treated alike, and apart from each other: what kills in a job is not tried again beside somebody who
waits. Live suspects go first, and innocent work keeps half of the workers, or of the time where there is only one.

Running again is paced: by a delay that doubles with each loss, and by a budget of attempts beyond the first, so that a
dying fleet is not finished off by its own retries.
"""

from __future__ import annotations

import enum
import functools
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.broker.core.entry import Entry, State
from services.broker.work import Lane

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.broker.core.settings import CoreSettings


class Loss(enum.Enum):
    """How a worker was lost, and so what that says of the work that it had."""

    LEFT = enum.auto()
    """It said that it goes away, or it was given up for standing still where nobody else could take its work. Nobody
    is suspect."""
    SILENT = enum.auto()
    """It stands still, or its machine or the network does. Its work is suspect; nobody is found guilty by it."""
    DIED = enum.auto()
    """Its stream ended."""


QUARANTINE_AT = 2
"""Losses while alone."""
_COHORTS = (256, 16, 1)
"""How many run apart together after the first loss, the second, and any later one."""
_TURN_S = 2.0
"""How long suspects may have an engine's only worker before innocent work that waits gets its turn there."""


class RetryBudget:
    """Attempts beyond the first that may be spent: a share of first attempts, a burst, and a trickle with time.

    The trickle keeps accepted work from being stuck when the budget is spent.
    """

    def __init__(self, share: float, burst: int, *, a_second: float = 10.0) -> None:
        self._share = share
        self._burst = float(burst)
        self._a_second = a_second
        self._left = float(burst)
        self._at = 0.0

    def earn(self) -> None:
        """A first attempt was made."""
        self._left = min(self._burst, self._left + self._share)

    def spend(self, now: float) -> bool:
        """Takes one attempt, or says that there is none to take now."""
        self._left = min(self._burst, self._left + (now - self._at) * self._a_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(slots=True)
class Cohort:
    """Suspects that may run together."""

    entries: list[Entry]
    ready_at: float

    @property
    def digests(self) -> frozenset[str]:
        """Engines that may run them."""
        return self.entries[0].flow.key.digests

    @property
    def live(self) -> bool:
        """Whether somebody waits for them."""
        return self.entries[0].work.lane is Lane.INTERACTIVE


class Apart:
    """A cohort at a worker that runs nothing else meanwhile.

    Args:
        entries: The cohort.
        since: When the worker was given to it, in seconds of the core's clock.
        only: Whether the worker was the only one that may run it.
    """

    __slots__ = ("only", "running", "since", "waiting")

    def __init__(self, entries: Iterable[Entry], since: float, *, only: bool) -> None:
        self.waiting = deque(entries)
        self.running = 0
        """Entries that the worker has."""
        self.since = since
        self.only = only


class Turn:
    """Whose turn it is at the only worker of an engine: that of suspects, or that of innocent work which waits.

    Suspects have it for `_TURN_S` at least, and then innocent work for as long as they had it. It is the engine's and
    not the worker's, so that a request which ends one worker after the other takes no more than half of the time.
    """

    __slots__ = ("_ended", "_spent_s", "announced")

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._ended = float("-inf")
        self.announced = float("-inf")
        """The latest end of a turn of innocent work for which an alarm is set."""

    def spent(self, apart: Apart, now: float, *, lost: bool) -> None:
        """A cohort has left its worker, or the worker is lost: then it has had a whole turn at least."""
        if apart.only:
            self._spent_s += max(now - apart.since, _TURN_S if lost else 0.0)
            self._ended = now

    def rests_until(self, now: float, up_since: float) -> float:
        """When suspects may have the worker, which is up since then; `now` or earlier where it is their turn."""
        until = max(self._ended, up_since) + self._spent_s
        if until <= now:
            self._spent_s = 0.0
        return until if self._spent_s >= _TURN_S else now


class Suspects:
    """Lost work that waits to run apart."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._cohorts: list[Cohort] = []

    def __len__(self) -> int:
        return sum(len(cohort.entries) for cohort in self._cohorts)

    @property
    def next_at(self) -> float | None:
        """When the next cohort may run; None where there is none."""
        return min((cohort.ready_at for cohort in self._cohorts), default=None)

    def add(self, entries: Iterable[Entry], now: float) -> None:
        """Takes in what one death left behind, already out of the tree."""
        groups: dict[tuple[frozenset[str], Lane, int], list[Entry]] = {}
        for entry in entries:
            level = min(entry.losses, len(_COHORTS)) - 1
            groups.setdefault((entry.flow.key.digests, entry.work.lane, level), []).append(entry)
        for (_, _, level), group in groups.items():
            size = _COHORTS[level]
            for at in range(0, len(group), size):
                cohort = group[at : at + size]
                self._cohorts.append(Cohort(cohort, now + self.delay(max(entry.attempts for entry in cohort))))

    def delay(self, attempts: int) -> float:
        """Time before another attempt, in seconds: doubles with each one made, cut by a random part."""
        step = min(self._settings.retry_most_s, self._settings.retry_first_s * 2.0 ** (attempts - 1))
        return step * random.uniform(0.5, 1.0)  # noqa: S311 -- spreads retries, protects nothing

    def due(self, now: float) -> list[Cohort]:
        """Returns the cohorts that may run now, in the order in which they should; they stay until `take`.

        Live ones go first, then those with the fewest losses; what was passed over for long goes before all.
        """
        self._drop_ended()
        due = [cohort for cohort in self._cohorts if cohort.ready_at <= now]
        due.sort(key=functools.partial(_rank, now - self._settings.ageing_s))
        return due

    def take(self, cohort: Cohort) -> None:
        """Takes a cohort out: a worker runs it now."""
        self._cohorts.remove(cohort)

    def waiting(self) -> list[Entry]:
        """Returns all suspects that wait."""
        return [entry for cohort in self._cohorts for entry in cohort.entries]

    def _drop_ended(self) -> None:
        for cohort in self._cohorts:
            cohort.entries = [entry for entry in cohort.entries if entry.state is State.APART]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.entries]


def _rank(overdue_at: float, cohort: Cohort) -> tuple[bool, bool, int, float]:
    if cohort.ready_at <= overdue_at:
        return False, False, 0, cohort.ready_at
    return True, not cohort.live, cohort.entries[0].losses, cohort.ready_at
