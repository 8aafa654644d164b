# SPDX-License-Identifier: Apache-2.0
"""The seam between operators and the core: what they may ask of it, and in which words it answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Place(enum.IntEnum):
    """Where a request is; numbers of the proto's RequestPlace."""

    JOURNAL = 1
    WAITING = 2
    APART = 3
    RUNNING = 4
    ENDED = 5


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A node as this broker sees it."""

    node_id: str
    cordoned: bool
    connected: bool = False
    running: int = 0
    """Requests that run there."""
    engine_digest: str = ""
    sequences: int = 0
    sequences_granted: int = 0


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a request is, and why it waits."""

    place: Place
    sentences: tuple[str, ...]
    """For people, the most important one first; without prompt text."""
    node_id: str = ""
    attempt: int = 0
    age_s: float | None = None
    """Since the core took it in; None where it does not hold it."""
    prompt_tokens: int | None = None
    held_tokens: int | None = None
    """Leading tokens that its node held when it was sent there; None where it does not run."""
    waiting_beside: int | None = None
    """Requests of its job and priority that wait."""


@dataclass(frozen=True, slots=True)
class EnginePace:
    """What is known of an engine's speed; see `services.broker.core.speeds`."""

    step_us: float
    prompt_token_us: float
    generated_token_us: float

    def busy_us(self, steps: float, prompt_tokens: float, generated_tokens: float) -> float:
        """Time that so much work takes, in microseconds."""
        return self.step_us * steps + self.prompt_token_us * prompt_tokens + self.generated_token_us * generated_tokens


class Operable(Protocol):
    """What operators ask of the core. All methods run on the event loop and return at once."""

    def knows_node(self, node_id: str) -> bool:
        """Whether a node is known here, in whatever state, or cordoned."""

    def cordon(self, node_id: str, cordoned: bool) -> None:
        """Gives a node no new work, or again. What runs there goes on."""

    def node_work(self) -> Sequence[NodeWork]:
        """Every node that is connected or cordoned, by name."""

    def nodes_taking(self, engine_digest: str) -> int:
        """How many nodes that serve an engine are connected and get work now."""

    def explain(self, key: tuple[str, str]) -> Whereabouts | None:
        """Where the request under a key is; None where it is not in flight."""

    def pace(self, engine_digest: str) -> EnginePace | None:
        """How fast an engine is; None where too little is known."""

    def output_share(self, engine_digest: str) -> float | None:
        """Share of what requests allow that they generate, 0 to 1; None where none has ended."""
