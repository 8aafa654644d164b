# SPDX-License-Identifier: Apache-2.0
"""What a ladder measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.common.errors import InvalidArgumentError, Violation

CLOSED: Final = "closed"
OPEN: Final = "open"
CLIENTS_MAX: Final = 10_000
RUNGS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2000)
"""Where nothing else is asked for."""
_RUNGS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """The rungs and their limits."""

    rungs: tuple[float, ...] = RUNGS
    """Closed loop: clients, each of which sends its next request when the last one has ended. Open loop: requests a
    second, sent at random times whatever became of those before."""
    mode: str = CLOSED
    rung_s: float = 10.0
    """Time that a rung is measured."""
    warmup_s: float = 2.0
    """Time before it, under the same load."""
    max_tokens: int = 32
    in_flight_max: int = 2000
    """Open loop: requests beyond this are not sent and counted as shed."""
    drain_s: float = 30.0
    """Time that requests in flight get to end after a rung; then they are cancelled."""
    error_share_max: float = 0.05
    """The climb ends above a rung on which a larger share of requests failed."""
    first_token_max_s: float = 60.0
    """The climb ends above a rung on which one request in a hundred waited longer for its first token."""
    seed: int = 1
    """Of the times of an open loop."""

    def check(self) -> None:
        """Looks at all values.

        Raises:
            InvalidArgumentError: With every value that cannot be.
        """
        wrong = []
        if self.mode not in (CLOSED, OPEN):
            wrong.append(Violation("mode", f"is {self.mode!r}; expected {CLOSED} or {OPEN}"))
        if not 1 <= len(self.rungs) <= _RUNGS_MAX or list(self.rungs) != sorted(set(self.rungs)):
            wrong.append(Violation("rungs", f"are {list(self.rungs)}; expected 1 to {_RUNGS_MAX} rising numbers"))
        elif not 0 < self.rungs[0] <= self.rungs[-1] <= CLIENTS_MAX:
            wrong.append(
                Violation(
                    "rungs",
                    f"go from {self.rungs[0]:g} to {self.rungs[-1]:g}; expected above 0 and at most {CLIENTS_MAX}",
                )
            )
        if self.mode == CLOSED and any(rung != int(rung) for rung in self.rungs):
            wrong.append(Violation("rungs", "are not whole numbers of clients"))
        if not 1 <= self.in_flight_max <= CLIENTS_MAX:
            wrong.append(Violation("in_flight_max", f"is {self.in_flight_max}; expected 1 to {CLIENTS_MAX}"))
        if self.max_tokens < 1:
            wrong.append(Violation("max_tokens", f"is {self.max_tokens}; expected at least 1"))
        for name, least, most in (
            ("rung_s", 0.05, 3600.0),
            ("warmup_s", 0.0, 3600.0),
            ("drain_s", 0.0, 3600.0),
            ("error_share_max", 0.0, 1.0),
            ("first_token_max_s", 0.0, 3600.0),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                wrong.append(Violation(name, f"is {value:g}; expected {least:g} to {most:g}"))
        if wrong:
            raise InvalidArgumentError.of(wrong)

    @property
    def connections(self) -> int:
        """Most requests that may be in flight."""
        return int(self.rungs[-1]) if self.mode == CLOSED else self.in_flight_max
