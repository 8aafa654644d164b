# SPDX-License-Identifier: Apache-2.0
"""What one rung of a ladder was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.ladder.company import Done


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of some times, in seconds; all 0 where there were none."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quantiles."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        p50, p90, p99 = np.quantile(np.array(values), (0.5, 0.9, 0.99))
        return cls(float(p50), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class Rung:
    """What one rung was, over the time that it was measured."""

    level: float
    """Clients, or requests a second that were meant to be sent."""
    measured_s: float
    finished: int
    """Requests that ended well in that time."""
    tokens: int
    """Tokens that came in that time."""
    errors: dict[str, int]
    """Requests that ended with an error in that time, by its reason."""
    shed: int
    """Requests that were due and not sent, since too many were in flight."""
    cut: int
    """Requests that were cancelled when the time to end after the rung was over."""
    waiting: int
    """Requests that waited for their first token when the time was over. They count among the first-token times with
    what they had waited by then: where there are many, the time was too short, and the quantiles are lower bounds."""
    first_token: Spread
    per_token: Spread
    """Mean time between tokens of a request, over requests."""
    company: Done | None = None
    """What clients of another engine got in that time; None where none had any."""

    @property
    def company_tokens_per_s(self) -> float:
        """Throughput of the other engine in tokens; 0 where it has no clients."""
        return self.company.tokens / self.measured_s if self.company else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Throughput in tokens."""
        return self.tokens / self.measured_s

    @property
    def requests_per_s(self) -> float:
        """Throughput in requests."""
        return self.finished / self.measured_s

    @property
    def failed(self) -> int:
        """Requests that ended with an error."""
        return sum(self.errors.values())

    @property
    def error_share(self) -> float:
        """Share of the ended requests that failed."""
        ended = self.finished + self.failed
        return self.failed / ended if ended else 0.0


@dataclass(slots=True)
class Tally:
    """Counts what happens between two moments."""

    begin: float = np.inf
    """Monotonic time from which things count."""
    end: float = np.inf
    finished: int = 0
    tokens: int = 0
    shed: int = 0
    cut: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    waiting_since: dict[int, float] = field(default_factory=dict)
    """When each request was sent that has no token yet, by a number of its own."""
    still_waiting: int = 0
    company: Done | None = None

    def over(self, now: float) -> None:
        """The time is over: who waits, waited so long at least."""
        self.end = now
        self.still_waiting = len(self.waiting_since)
        self.first_token_s += [now - sent for sent in self.waiting_since.values()]

    def counts(self, now: float) -> bool:
        """Whether something that happens now counts."""
        return self.begin <= now < self.end

    def rung(self, level: float) -> Rung:
        """What was counted."""
        return Rung(
            level,
            self.end - self.begin,
            self.finished,
            self.tokens,
            dict(sorted(self.errors.items())),
            self.shed,
            self.cut,
            self.still_waiting,
            Spread.of(self.first_token_s),
            Spread.of(self.per_token_s),
            self.company,
        )
