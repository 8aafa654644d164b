# SPDX-License-Identifier: Apache-2.0
"""What became of a soak's requests, and what must not have become of any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engines.simulated import SimulatedEngine, Simulation
from ifabric.engine.v1 import generation_pb2
from services.common import reasons
from services.common.errors import FabricError
from tests.chaos.client import result_of
from tests.chaos.sizes import grown
from tests.jobs.running import ENGINE

if TYPE_CHECKING:
    from ifabric.broker.v1 import broker_service_pb2
    from tests.chaos.client import Request

CHECK_ONE_IN = 16
"""How many finished requests are compared token by token: the comparison costs more than the request."""
PUT_OFF_SHARE = 0.01
"""Most requests, of all, that may be told to come again: the door may have nobody for a moment where workers die."""
CALM_S = 30.0
"""How long a run may be without the death of a worker: one dies every four to eight seconds."""
KEPT = 20
"""Sentences about wrong answers that are kept."""


@dataclass
class Tally:
    """What became of the requests."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    doubled: int = 0
    lost: int = 0
    left: int = 0
    """Requests whose client went away before their outcome came."""
    put_off: int = 0
    """Good requests that were refused before they were taken, and told to come again."""
    wrong: int = 0
    sentences: list[str] = field(default_factory=list)
    deaths: int = 0
    checked: int = 0
    simulation: Simulation = field(default_factory=lambda: Simulation(SimulatedEngine(**ENGINE)))

    @property
    def ended(self) -> int:
        """Requests with an outcome."""
        return sum(self.outcomes.values())

    def complain(self, sentence: str) -> None:
        """Counts something wrong."""
        self.wrong += 1
        if len(self.sentences) < KEPT:
            self.sentences.append(sentence)

    def take(self, made: Request | None, outcome: broker_service_pb2.RequestOutcome, cancelled: frozenset[str]) -> None:
        """Counts one outcome, and looks whether it may be.

        Args:
            made: The request that has waited for it; None where none has, or its outcome came before.
            outcome: What came.
            cancelled: Ids of what its client cancels.
        """
        if made is None:
            self.doubled += 1
            return
        result = result_of(outcome)
        if isinstance(result, FabricError):
            self.outcomes[result.reason] += 1
            if made.max_tokens > 0 and result.reason == reasons.UNAVAILABLE and result.retry_after_s is not None:
                self.put_off += 1
            elif made.max_tokens > 0 or result.reason != reasons.INVALID_FIELDS:
                self.complain(f"{outcome.request_id}: {result.reason}: {result.message}")
            return
        if made.max_tokens == 0:
            self.complain(f"{outcome.request_id}: a wrong request was served")
            return
        (sample,) = result.samples
        if sample.finish_reason == generation_pb2.FINISH_REASON_CANCELLED:
            self.outcomes["cancelled"] += 1
            if outcome.request_id not in cancelled:
                self.complain(f"{outcome.request_id}: cancelled by nobody")
            return
        self.outcomes["finished"] += 1
        if self.outcomes["finished"] % CHECK_ONE_IN == 0:
            self.checked += 1
            expected = self.simulation.tokens(list(made.prompt.tokens.ids), made.max_tokens)
            if list(sample.token_ids) != expected:
                self.complain(f"{outcome.request_id}: other tokens than its prompt gives")

    def figures(self, took_s: float) -> dict[str, Any]:
        """The counts, after so many seconds."""
        return {
            "requests": self.sent,
            "seconds": round(took_s, 1),
            "requests_a_second": round(self.ended / took_s),
            "outcomes": dict(self.outcomes),
            "lost": self.lost,
            "doubled": self.doubled,
            "wrong": self.wrong,
            "put_off": self.put_off,
            "left_by_clients": self.left,
            "unanswered": self.sent - self.ended - self.lost - self.left,
            "checked_token_by_token": self.checked,
            "worker_deaths": self.deaths,
            "sentences": self.sentences,
        }


def faults(figures: dict[str, Any]) -> list[str]:
    """What the figures of a suite's run that has ended must not say, in sentences; empty where it went well."""
    kinds = ("lost", "doubled", "wrong", "unanswered")
    found = [f"{figures[what]} requests were {what}" for what in kinds if figures[what]]
    if not figures["at_rest"]:
        found.append("the suite did not come to rest: workers missing, or work under way that nobody waits for")
    if figures["seconds"] > CALM_S and not figures["worker_deaths"]:
        found.append(f"no worker died in {figures['seconds']:.0f} s: nothing was shown of what a death does")
    if not figures["processes"]:
        found.append("memory and descriptors were not compared: the run ended in its warm-up")
    if figures["put_off"] > PUT_OFF_SHARE * figures["requests"]:
        found.append(f"{figures['put_off']} good requests were told to come again; at most {PUT_OFF_SHARE:.0%} may be")
    return found + grown(figures["processes"], figures["since_warm_up"])
