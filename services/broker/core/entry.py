# SPDX-License-Identifier: Apache-2.0
"""One accepted request, from acceptance to its end."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ifabric.engine.v1 import generation_pb2
    from services.broker.core.attempts import Attempt
    from services.broker.core.flow import Flow
    from services.broker.core.tree import Node
    from services.broker.work import Work


class State(enum.IntEnum):
    """Where a request is."""

    WAITING = 1
    """In its flow's tree, not dispatched."""
    DISPATCHED = 2
    """A worker has it; it stays in the tree as a leaf that later arrivals can share."""
    APART = 3
    """Lost with a worker: out of the tree, waits to run apart from innocent work."""
    ENDED = 4


class Hint(NamedTuple):
    """A worker that is believed to hold the start of a prompt."""

    worker_id: str
    tokens: int
    """How much of it."""


class Entry:
    """What the core knows of one request."""

    __slots__ = (
        "arrived",
        "attempt",
        "attempts",
        "decode",
        "delivered",
        "flow",
        "hint",
        "key",
        "losses",
        "losses_alone",
        "node",
        "prompt_tokens",
        "sent",
        "started",
        "state",
        "tail",
        "tail_tokens",
        "usage",
        "work",
    )

    def __init__(self, work: Work, flow: Flow, prompt_tokens: int, decode: int, arrived: float) -> None:
        self.work = work
        self.flow = flow
        self.prompt_tokens = prompt_tokens
        self.decode = decode
        """Tokens that it is expected to generate, over all samples."""
        self.arrived = arrived
        """When it was accepted, in seconds of the core's clock."""
        self.sent: float | None = None
        """When it was first dispatched; None before."""
        self.state = State.WAITING
        self.node: Node | None = None
        """Node that it hangs under; None while it is apart."""
        self.key: int | None = None
        """Its key among the node's children; None where less than a block is left of it there."""
        self.tail = b""
        """Ids after the node's depth, packed."""
        self.tail_tokens = 0
        self.hint: Hint | None = None
        self.attempt: Attempt | None = None
        """The attempt that runs."""
        self.attempts = 0
        self.losses = 0
        """Attempts that ended with their worker, or with its engine."""
        self.losses_alone = 0
        """Of these, attempts that had the worker to themselves."""
        self.started = False
        """Whether the sink has heard `started`."""
        self.delivered = False
        """Whether the sink has heard `tokens` of the attempt that runs."""
        self.usage: generation_pb2.Usage | None = None
        """What earlier attempts cost, as far as their workers told; None for nothing."""
