# SPDX-License-Identifier: Apache-2.0
"""A shared head at one worker: nobody has computed it there, one request is computing it, or the worker holds it.

Leader first: below a BARE head exactly one request may go, and it makes the head LEADING; its siblings wait until the
worker says that the leader's prompt is computed, which makes the head HELD. Heads nest: a leader leads every BARE head
on its way down, and below a head that is HELD each nested one has its own leader, level by level.

If a head is HELD, every head above it is.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from services.broker.core.attempts import Attempt
    from services.broker.core.entry import Entry
    from services.broker.core.tree import Node
    from services.broker.core.workers import Worker

_tickets = itertools.count()


class HeadState(enum.IntEnum):
    """What a worker has of a head."""

    BARE = 1
    LEADING = 2
    HELD = 3


class Claim(NamedTuple):
    """One taking of a subtree by a worker. Older claims are finished first."""

    number: int
    since: float
    """When it was made, or renewed."""


class Head:
    """One node at one worker that owns it."""

    __slots__ = ("claim", "counted", "gone", "leader", "node", "parked", "queued", "run", "state", "users")

    def __init__(self, node: Node, run: Run, claim: Claim, state: HeadState) -> None:
        self.node = node
        self.run = run
        self.claim = claim
        self.state = state
        self.leader: Attempt | None = None
        """Who computes it, while LEADING."""
        self.queued = False
        """Whether it is in the run's ready heap."""
        self.parked: list[Head] = []
        """Heads below that wait for this one to be HELD."""
        self.users = 0
        """Attempts that run directly below, and heads below that have users."""
        self.counted = False
        """Whether somebody was sent to compute it here, so that another time would be the second."""
        self.gone = False
        """Whether the node or the worker went away."""

    def above(self) -> Head | None:
        """The same worker's head over this one; None at the top."""
        parent = self.node.parent
        return None if parent is None or parent.parent is None else parent.heads.get(self.run.worker.id)

    def leading_above(self) -> Head | None:
        """The nearest head over this one that is being computed; None where there is none."""
        head = self.above()
        while head is not None and head.state is not HeadState.HELD:
            if head.state is HeadState.LEADING:
                return head
            head = head.above()
        return None

    def may_be_led(self) -> bool:
        """Whether somebody may lead it now: nobody does, nor any head over it."""
        return self.state is HeadState.BARE and self.leading_above() is None

    def lead(self, leader: Attempt) -> None:
        """Makes the attempt compute this head and every BARE one over it."""
        head: Head | None = self
        while head is not None and head.state is HeadState.BARE:
            head.state, head.leader = HeadState.LEADING, leader
            head.run.tally.computes(head)
            leader.leads.append(head)
            head = head.above()

    def settle(self, state: HeadState) -> None:
        """Ends LEADING: HELD once the leader's prompt is computed, BARE where the leader is lost."""
        self.state, self.leader = state, None
        self.wake()
        parked, self.parked = self.parked, []
        for head in parked:
            head.wake()

    def wake(self) -> None:
        """Puts the head up for taking from, where something below it may be taken."""
        node = self.node
        if self.queued or self.gone or self.state is HeadState.LEADING or not (node.entries or node.subtrees):
            return
        self.queued = True
        queue = self.run.followers if self.has_followers() else self.run.leaders
        heapq.heappush(queue, (self.claim.number, -node.depth, next(_tickets), self))

    def has_followers(self) -> bool:
        """Whether what may be taken below it needs nothing but this head; else somebody has to lead first."""
        return self.state is HeadState.HELD and bool(self.node.entries)

    def use(self) -> None:
        """Something begins to run directly below."""
        head: Head | None = self
        while head is not None:
            head.users += 1
            if head.users > 1:
                return
            head.run.worker.plan.heads_in_use += head.node.edge_tokens
            head = head.above()

    def leave(self) -> None:
        """Something that ran directly below has ended."""
        head: Head | None = self
        while head is not None:
            head.users -= 1
            if head.users:
                return
            head.run.worker.plan.heads_in_use -= head.node.edge_tokens
            head = head.above()

    def idle_tokens(self) -> int:
        """Tokens of this head and those over it that nothing uses: what using them would add to the pool's work."""
        tokens = 0
        head: Head | None = self
        while head is not None and not head.users:
            tokens += head.node.edge_tokens
            head = head.above()
        return tokens


class Tally:
    """How often the heads of a flow were computed."""

    __slots__ = ("held", "prefills")

    def __init__(self) -> None:
        self.prefills = 0
        """Times that a head was computed at a worker."""
        self.held = 0
        """Pairs of head and worker."""

    def computes(self, head: Head) -> None:
        """Somebody computes a head."""
        self.prefills += 1
        self.held += not head.counted
        head.counted = True


Queue = list[tuple[int, int, int, Head]]
"""Heads to take from, a heap: oldest claim first, deepest first."""


class Run:
    """What one worker has of one flow: its heads, and which of them can be taken from."""

    __slots__ = ("at", "followers", "handed", "heads", "leaders", "root_turn", "searched", "tally", "worker")

    def __init__(self, worker: Worker, tally: Tally) -> None:
        self.worker = worker
        self.tally = tally
        """Of the whole flow."""
        self.heads: dict[Head, None] = {}
        """Its heads, in the order in which it came to own them, so that the same events bring the same decisions."""
        self.followers: Queue = []
        """HELD heads with entries directly below: those can follow at once."""
        self.leaders: Queue = []
        """Heads below which nothing can go but a leader: BARE ones, and HELD ones with nothing but subtrees."""
        self.handed: deque[tuple[Node, Entry | Node]] = deque()
        """Things that another worker came across first and left to this one, which holds their start; with the node
        that they lie under. Newest last."""
        self.at: Node | None = None
        """Where `Ownership.next` found its answer."""
        self.root_turn = False
        """Whether the last thing taken was overdue at the root."""
        self.searched = -1
        """State of the flow in which a search for work to share found nothing."""

    def top(self, may_lead: bool, now: float, overdue_s: float) -> Head | None:
        """Returns the head to take from now; None where there is none.

        A claim that has gone on for `overdue_s` is renewed and so goes behind the others. Heads below which nothing
        can go but a leader count only where one `may_lead`.
        """
        late = now - overdue_s
        while True:
            follower = self._first(self.followers, late, now)
            leader = self._first(self.leaders, late, now) if may_lead else None
            # Looking through one queue may have moved a head to the top of the other.
            if follower is (self.followers[0][3] if self.followers else None):
                break
        if follower is None or leader is None:
            return follower or leader
        return follower if self.followers[0] < self.leaders[0] else leader

    def drop(self, head: Head) -> None:
        """Takes a head that `top` returned out of its queue; it comes back where something is left below it."""
        heapq.heappop(self.followers if self.followers and self.followers[0][3] is head else self.leaders)
        head.queued = False
        head.wake()

    def open(self, node: Node, claim: Claim, held_tokens: int) -> Head:
        """Makes this worker an owner of a node, of whose prefix it is believed to hold `held_tokens` already."""
        state = HeadState.HELD if held_tokens >= node.depth else HeadState.BARE
        above = node.parent.heads.get(self.worker.id) if node.parent is not None else None
        if above is not None and above.state is not HeadState.HELD:
            state = HeadState.BARE
        return self.add(Head(node, self, claim, state))

    def add(self, head: Head) -> Head:
        """Takes in a head of a node, in its state."""
        node = head.node
        node.opened = True
        node.heads[self.worker.id] = head
        self.heads[head] = None
        self.worker.plan.heads += node.edge_tokens
        head.wake()
        return head

    def can_take_all(self) -> bool:
        """Whether its worker has room now for everything directly below its heads."""
        worker = self.worker
        count = sum(len(head.node.entries) for head in self.heads)
        if not worker.has_room_for(count, 0):
            return False
        tokens = sum(
            entry.tail_tokens + entry.work.samples * entry.work.max_tokens
            for head in self.heads
            for _, _, entry in head.node.entries
        )
        return worker.has_room_for(count, tokens)

    def close(self, head: Head) -> None:
        """Forgets a head whose node, or whose worker, is gone."""
        head.gone = True
        self.heads.pop(head, None)
        self.worker.plan.heads -= head.node.edge_tokens
        if head.users:
            self.worker.plan.heads_in_use -= head.node.edge_tokens

    def _first(self, queue: Queue, late: float, now: float) -> Head | None:
        while queue:
            head = queue[0][3]
            usable = not head.gone and head.state is not HeadState.LEADING
            if usable and head.claim.since < late:
                head.claim = self.worker.next_claim(now)
            elif usable and head.has_followers() is (queue is self.followers):
                blocker = head.leading_above() if head.state is HeadState.BARE else None
                if blocker is None:
                    return head
                blocker.parked.append(head)
                usable = False
            heapq.heappop(queue)
            head.queued = False
            if usable:
                head.wake()
        return None
