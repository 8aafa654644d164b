# SPDX-License-Identifier: Apache-2.0
"""What becomes of work whose worker was lost: suspects, the groups in which they run apart, quarantine, retries.

Whatever was in flight at a worker that died may have killed it. It runs again apart from innocent work: first all of
it together, since most deaths have other causes; what was there for a second death in sixteens; after a third, alone.
Only a request that ends a worker while it is alone, twice, is quarantined: an innocent one is alone with two deaths by
chance only where three deaths have singled it out before. A worker that merely stood still has not been ended by
anybody, as far as is known: a starved machine does that to whatever runs there.

Running again is paced: by a delay that doubles with each loss, and by a budget of attempts beyond the first, so that a
dying fleet is not finished off by its own retries.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.broker.core.entry import Entry, State

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


class Apart:
    """A cohort at a worker that runs nothing else meanwhile."""

    __slots__ = ("running", "waiting")

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.waiting = deque(entries)
        self.running = 0
        """Entries that the worker has."""


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
        groups: dict[tuple[frozenset[str], int], list[Entry]] = {}
        for entry in entries:
            level = min(entry.losses, len(_COHORTS)) - 1
            groups.setdefault((entry.flow.key.digests, level), []).append(entry)
        for (_, level), group in groups.items():
            size = _COHORTS[level]
            for at in range(0, len(group), size):
                cohort = group[at : at + size]
                self._cohorts.append(Cohort(cohort, now + self.delay(max(entry.losses for entry in cohort))))

    def delay(self, losses: int) -> float:
        """Time before another attempt, in seconds: doubles with each loss, cut by a random part."""
        step = min(self._settings.retry_most_s, self._settings.retry_first_s * 2.0 ** (losses - 1))
        return step * random.uniform(0.5, 1.0)  # noqa: S311 -- spreads retries, protects nothing

    def due(self, now: float) -> list[Cohort]:
        """Returns the cohorts that may run now, those with the fewest losses first; they stay until `take`."""
        self._drop_ended()
        due = [cohort for cohort in self._cohorts if cohort.ready_at <= now]
        due.sort(key=lambda cohort: (cohort.entries[0].losses, cohort.ready_at))
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
