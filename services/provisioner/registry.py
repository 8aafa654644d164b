# SPDX-License-Identifier: Apache-2.0
"""Nodes with a live lease.

    (new) ── refused ──▶ REFUSED ◀── probe disagrees ── LOADED ── probe agrees ──▶ ACCEPTED
      │                     │  ▲                          ▲                            │
      └─── description ─────┴──┴──▶ MAY_LOAD ── loaded ───┘        heartbeat says so   ▼
           holds                                            MAY_LOAD, LOADED ────▶ DRAINING

A registration replaces the one before it, so every arrow back to REFUSED or MAY_LOAD is a registration, too. DRAINING
is one way: only another process of the node leaves it. Every state ends with the lease or a withdrawal.

Nothing here waits, talks or judges; time comes from the clock that the registry was made with. The state is soft: what
is lost with the process comes back with the workers' next heartbeats, which are told NOT_FOUND and register again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ifabric.provisioner.v1.provisioner_service_pb2 import NodeState
from services.common import reasons
from services.common.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ifabric.engine.v1 import node_pb2
    from services.common.clock import Clock
    from services.common.contract import Finding

REFUSED = NodeState.NODE_STATE_REFUSED
MAY_LOAD = NodeState.NODE_STATE_MAY_LOAD
LOADED = NodeState.NODE_STATE_LOADED
ACCEPTED = NodeState.NODE_STATE_ACCEPTED
DRAINING = NodeState.NODE_STATE_DRAINING

_SUPERSEDED_MAX = 16
"""Earlier processes of one node that are remembered; more than one alive at a time is a mistake already."""


class End(enum.Enum):
    """Why a lease ended."""

    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the provisioner knows it; a change makes a new value."""

    description: node_pb2.NodeDescription
    state: NodeState.ValueType
    violations: tuple[Finding, ...]
    """Why it is refused; empty otherwise."""
    report: node_pb2.EngineReport | None
    """What the loaded engine said of itself; None before."""
    stats: node_pb2.EngineStats | None
    """Newest counters; None before the first heartbeat that brought some."""
    registered_at: float
    """When this process registered first; wall clock, seconds."""
    expires_at: float
    """When the lease ends; monotonic clock, seconds."""
    version: int
    """Number of the registration that made it: a verdict that comes late finds another number and is dropped."""
    superseded: tuple[str, ...] = field(default=())
    """Incarnations that came before this one, newest last."""

    @property
    def node_id(self) -> str:
        """Name of the node."""
        return self.description.node_id


class Registry:
    """Holds the nodes and tells a listener about each change that others should know."""

    def __init__(
        self,
        clock: Clock,
        *,
        lease_s: float,
        nodes_max: int,
        on_change: Callable[[str, Node | None], None] = lambda _node_id, _node: None,
        on_end: Callable[[Node, End], None] = lambda _node, _end: None,
    ) -> None:
        """Starts empty.

        Args:
            clock: Tells the time.
            lease_s: Length of a lease, in seconds.
            nodes_max: Most nodes with a live lease.
            on_change: Called with the node_id and the node, None where it is gone, for each change of description,
                state, violations or report. Renewed leases and newer counters are no change.
            on_end: Called for each lease that ends.
        """
        self._clock = clock
        self._lease_s = lease_s
        self._nodes_max = nodes_max
        self._on_change = on_change
        self._on_end = on_end
        self._nodes: dict[str, Node] = {}
        self._versions = 0
        self._swept_at = clock.monotonic()

    def nodes(self, states: Collection[NodeState.ValueType] = ()) -> list[Node]:
        """Returns the nodes in one of `states` (all if empty), in order of node_id."""
        chosen = (node for node in self._nodes.values() if not states or node.state in states)
        return sorted(chosen, key=lambda node: node.node_id)

    def find(self, node_id: str) -> Node | None:
        """Returns a node, None where it has no live lease."""
        return self._nodes.get(node_id)

    def register(
        self,
        description: node_pb2.NodeDescription,
        report: node_pb2.EngineReport | None,
        violations: tuple[Finding, ...],
    ) -> Node:
        """Takes a registration whose description, and report if there is one, have been judged.

        The node becomes REFUSED, MAY_LOAD or LOADED. A registration that says nothing new renews the lease and changes
        nothing, so that a node in service stays in service.

        Raises:
            FailedPreconditionError: A later process of the node has registered; this one is over.
            ResourceExhaustedError: There are `nodes_max` nodes already.
        """
        now = self._clock.monotonic()
        known = self._nodes.get(description.node_id)
        same_process = known is not None and known.description.incarnation == description.incarnation
        if known is None and len(self._nodes) >= self._nodes_max:
            raise ResourceExhaustedError(
                f"{self._nodes_max} nodes are registered, which is the most that nodes_max allows",
                reason=reasons.NODES_FULL,
                retry_after_s=self._lease_s,
            )
        if known is not None and not same_process:
            _refuse_superseded(known, description.incarnation)
        if known is not None and same_process and _says_the_same(known, description, report, violations):
            renewed = replace(known, expires_at=now + self._lease_s)
            self._nodes[renewed.node_id] = renewed
            return renewed
        if violations:
            state = REFUSED
        elif known is not None and same_process and known.state == DRAINING:
            state = DRAINING
        else:
            state = LOADED if report is not None else MAY_LOAD
        self._versions += 1
        superseded = known.superseded if known is not None else ()
        if known is not None and not same_process:
            superseded = (*superseded, known.description.incarnation)[-_SUPERSEDED_MAX:]
            self._on_end(known, End.SUPERSEDED)
        node = Node(
            description,
            state,
            violations,
            report,
            known.stats if known is not None and same_process else None,
            known.registered_at if known is not None and same_process else self._clock.wall(),
            now + self._lease_s,
            self._versions,
            superseded,
        )
        self._put(node)
        return node

    def conclude(self, judged: Node, violations: tuple[Finding, ...]) -> Node | None:
        """Takes the verdict on the probe of a LOADED node: ACCEPTED, or REFUSED with violations.

        Returns the node as it is now; None where it is gone or has registered anew since `judged`.
        """
        node = self._nodes.get(judged.node_id)
        if node is None or node.version != judged.version:
            return None
        if node.state == LOADED:
            node = replace(
                node,
                state=REFUSED if violations else ACCEPTED,
                violations=violations,
                expires_at=self._clock.monotonic() + self._lease_s,
            )
            self._put(node)
        return node

    def heartbeat(
        self,
        node_id: str,
        incarnation: str,
        stats: node_pb2.EngineStats | None,
        *,
        draining: bool,
    ) -> Node:
        """Renews a lease and takes newer counters.

        Raises:
            NotFoundError: This process is not known: it has to register again.
            FailedPreconditionError: A later process of the node has registered; this one is over.
        """
        node = self._nodes.get(node_id)
        if node is not None and node.description.incarnation != incarnation:
            _refuse_superseded(node, incarnation)
            node = None
        if node is None:
            raise NotFoundError(
                f"node {node_id} with this incarnation is not registered; register again",
                reason=reasons.NODE_UNKNOWN,
                metadata={"node_id": node_id, "incarnation": incarnation},
            )
        newest = node.stats if stats is None else stats
        renewed = replace(node, expires_at=self._clock.monotonic() + self._lease_s, stats=newest)
        self._nodes[node_id] = renewed
        if draining and node.state in (MAY_LOAD, LOADED, ACCEPTED):
            renewed = replace(renewed, state=DRAINING)
            self._put(renewed)
        return renewed

    def withdraw(self, node_id: str, incarnation: str) -> bool:
        """Takes a node out; another process of it is not touched. Returns whether there was something to take out."""
        node = self._nodes.get(node_id)
        if node is None or node.description.incarnation != incarnation:
            return False
        self._end(node, End.WITHDRAWN)
        return True

    def sweep(self) -> list[Node]:
        """Ends the leases that are over and returns their nodes. Called several times a lease.

        A node in LOADED waits for the provisioner's own probe, which has a limit: its lease does not end meanwhile.
        A provisioner that did not run for a while (a suspended machine, a stopped process) has heartbeats waiting that
        it has not read: the time of its own silence counts against nobody.
        """
        now = self._clock.monotonic()
        silence = now - self._swept_at
        self._swept_at = now
        if silence > self._lease_s / 2:
            for node in list(self._nodes.values()):
                self._nodes[node.node_id] = replace(node, expires_at=node.expires_at + silence)
        over = [node for node in self._nodes.values() if node.expires_at <= now]
        for node in over:
            if node.state == LOADED:
                self._nodes[node.node_id] = replace(node, expires_at=now + self._lease_s)
            else:
                self._end(node, End.EXPIRED)
        return [node for node in over if node.state != LOADED]

    def _put(self, node: Node) -> None:
        self._nodes[node.node_id] = node
        self._on_change(node.node_id, node)

    def _end(self, node: Node, end: End) -> None:
        del self._nodes[node.node_id]
        self._on_end(node, end)
        self._on_change(node.node_id, None)


def _refuse_superseded(node: Node, incarnation: str) -> None:
    """Two processes under one name would take turns for ever: the one that registered later stays."""
    if incarnation in node.superseded:
        raise FailedPreconditionError(
            f"another process of node {node.node_id} has registered since, at {node.description.address}; this one "
            f"is over",
            reason=reasons.NODE_SUPERSEDED,
            metadata={"node_id": node.node_id},
        )


def _says_the_same(
    node: Node,
    description: node_pb2.NodeDescription,
    report: node_pb2.EngineReport | None,
    violations: tuple[Finding, ...],
) -> bool:
    """Whether a registration leaves the node as it is: nothing is new, and no probe has to be tried again."""
    if node.description != description or node.report != report:
        return False
    if node.state == REFUSED:
        return bool(violations) and node.violations == violations
    return not violations
