# SPDX-License-Identifier: Apache-2.0
"""A flow: the work of one job (or tenant) at one priority, and who of the workers owns which part of it.

The group, a subtree, is the unit of ownership. A worker that has room takes, in this order: what lies below heads that
it owns, oldest claim first and deepest head first; what others left to it because it holds the start; a whole new
subtree from the root, decode-heavy ones first. Only where nothing is left to claim does it join another worker's
node, and then from the top, where the shared head that it has to compute a second time is short against the subtrees
that it takes over: that is the cut, and its cost is counted. Ownership is settled when work is dispatched, never
before, so slow and fast workers each end up with their share.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from services.broker.core import ids
from services.broker.core.entry import Entry, Hint, State
from services.broker.core.heads import Claim, Head, HeadState, Run
from services.broker.core.tree import Node, Placed, WaitingTree, prefix
from services.broker.work import Lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.core.attempts import Attempt
    from services.broker.core.workers import Worker

_SAMPLED = 64
"""Items that are looked at to judge what lies below a node."""


class FlowKey(NamedTuple):
    """What makes work belong to one flow."""

    lane: Lane
    tenant: str
    job: str
    priority: int
    salt: int
    digests: frozenset[str]


class FlowRules(NamedTuple):
    """Figures that shape the order."""

    ageing_s: float
    """Time in which waiting makes up for half the decode density."""
    overdue_s: float
    """Time after which a claim goes behind the others, and what nobody claimed takes turns with what somebody did."""
    decode_weight: float
    """Prompt tokens that one generated token counts for when work is divided."""
    join_factor: float
    """How many times its cost a cut has to move."""


class Flow:
    """One flow.

    Args:
        key: What belongs to it.
        block_tokens: Tokens of one block; 0 where nothing is shared.
        planes: Of packed ids, see `ids.pack`.
        rules: Figures that shape the order.
        find: Tells who is believed to hold how much of a prefix (int32 bytes).
        held: Told of a prefix (int32 bytes) that a worker holds when the tree forgets it.
        led: Told of an attempt under way that has become the leader of a sibling.
    """

    def __init__(
        self,
        key: FlowKey,
        *,
        block_tokens: int,
        planes: int,
        rules: FlowRules,
        find: Callable[[bytes], list[Hint]],
        held: Callable[[Worker, bytes], None],
        led: Callable[[Attempt], None],
    ) -> None:
        self.key = key
        self.block_tokens = block_tokens
        self.planes = planes
        self.tree = WaitingTree(self, block_tokens=block_tokens, planes=planes, salt=key.salt)
        self.runs: dict[str, Run] = {}
        """Its workers, by id."""
        self.entries = 0
        """Requests of it that have not ended, wherever they are."""
        self.nobody_since: float | None = None
        """Since when no worker has served it; None while one does."""
        self.paused = False
        self.ready_at = 0.0
        """When its first work may go: a short while after it came, so that siblings can join it."""
        self.service = 0.0
        """Virtual time: what it was given, by weight. See `fair`."""
        self.served_at = 0.0
        """When it was last given something, or began to wait."""
        self.mean_decode: float | None = None
        """Running mean of generated tokens; None before the first result."""
        self.cut_tokens = 0
        """Tokens of heads that a second worker had to compute."""
        self._rules = rules
        self._find = find
        self._held = held
        self._led = led
        self._open: dict[Node, None] = {}
        self._changes = itertools.count(1)
        self._change = 0
        self._now = 0.0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self.tree.root.waiting

    @property
    def interactive(self) -> bool:
        """Whether somebody waits for it."""
        return self.key.lane is Lane.INTERACTIVE

    # -- what comes in ---------------------------------------------------------------------------------------------

    def add(self, entry: Entry, raw: bytes, *, now: float, chains: bool) -> Placed:
        """Takes a waiting entry in; `raw` is its prompt, int32 bytes."""
        self._now = now
        placed = self.tree.insert(entry, raw, now=now, chains=chains)
        node = entry.node
        assert node is not None  # noqa: S101 -- insert has set it
        node.offer(entry, self._rank(entry.decode, entry.tail_tokens, entry.arrived))
        # Every node on the way up to the first owned one is itself up for taking: one that has doubled ranks anew.
        while not node.opened:
            parent = node.parent
            assert parent is not None  # noqa: S101 -- the root is always open
            if node.waiting & (node.waiting - 1) == 0:
                self._offer(node)
            node = parent
        self._wake(node)
        self._change = next(self._changes)
        return placed

    def add_worker(self, worker: Worker) -> None:
        """Lets a worker take part."""
        self.runs[worker.id] = Run(self, worker)
        self._change = next(self._changes)

    def remove_worker(self, worker_id: str) -> None:
        """Takes a worker's ownership away; what it has not been sent is up for taking again."""
        run = self.runs.pop(worker_id, None)
        if run is None:
            return
        for head in list(run.heads):
            node = head.node
            run.close(head)
            del node.heads[worker_id]
            if not node.heads:
                node.opened = False
                self._open.pop(node, None)
                self._offer(node)
        for node, item in run.handed:
            self._offer_again(node, item)
        self._change = next(self._changes)

    # -- what goes out ---------------------------------------------------------------------------------------------

    def next(self, run: Run, now: float, *, may_lead: bool) -> Entry | None:
        """Returns what the worker should be sent now, and leaves it in place; None where there is nothing for it.

        Args:
            may_lead: Whether it may be sent a leader.
        """
        root = self.tree.root
        if not root.waiting:
            return None
        self._now = now
        while True:
            head = run.top(may_lead, now, self._rules.overdue_s)
            if head is not None and not self._root_first(run, head, now, may_lead):
                node, claim = head.node, head.claim
                best = node.best(subtrees=may_lead)
                if best is None:
                    run.drop(head)
                    continue
            elif run.handed:
                entry = self._next_handed(run, may_lead)
                if entry is not None or run.top(may_lead, now, self._rules.overdue_s) is None:
                    return entry
                continue
            else:
                node, claim, best = root, None, root.best(subtrees=may_lead)
                if best is None:
                    if may_lead and self._join(run):
                        continue
                    return None
            item = best[1]
            if isinstance(item, Entry):
                other = self._holder(run, node, [item.hint]) if item.hint is not None else None
                if other is None:
                    run.at = node
                    return item
                node.pop(item)
                self._hand(other, node, item)
            else:
                node.pop(item)
                self._claim(run, node, item, claim)

    def take(self, run: Run, entry: Entry, attempt: Attempt) -> None:
        """Takes what `next` returned: it is dispatched to the run's worker as this attempt."""
        if run.at is None:
            run.handed.pop(0)
        else:
            run.at.pop(entry)
        entry.state = State.DISPATCHED
        self.tree.count(entry, -1)
        head = self.head_over(entry, run.worker)
        if head is not None:
            head.use()
            head.lead(attempt)

    def held_tokens(self, entry: Entry, worker: Worker) -> int:
        """How much of an entry's prompt a worker that owns the way down to it holds."""
        head = self.head_over(entry, worker)
        while head is not None and head.state is not HeadState.HELD:
            head = head.above()
        return 0 if head is None else head.node.depth

    def hand_on(self, run: Run, entry: Entry, other: Run) -> None:
        """Leaves what `next` returned to another worker, since this one can never take it."""
        node = self.tree.root if run.at is None else run.at
        if run.at is None:
            run.handed.pop(0)
        else:
            run.at.pop(entry)
        self._hand(other, node, entry)

    def head_ends(self, entry: Entry) -> list[int]:
        """Returns the lengths of leading parts that other requests share, ascending."""
        ends = []
        node = entry.node
        while node is not None and node.parent is not None:
            ends.append(node.depth)
            node = node.parent
        ends.reverse()
        return ends

    # -- what comes back -------------------------------------------------------------------------------------------

    def settle(self, attempt: Attempt, state: HeadState) -> None:
        """Ends the lead of an attempt: its prompt is computed (HELD), or never will be (BARE)."""
        leads, attempt.leads = attempt.leads, []
        attempt.worker.leading -= attempt.leading
        attempt.leading = 0
        for head in leads:
            if head.leader is attempt and not head.gone:
                head.settle(state)
        if leads:
            self._change = next(self._changes)

    def missed(self, entry: Entry, worker: Worker, cached_tokens: int) -> bool:
        """Corrects the belief of what a worker holds by what it found in its cache; returns whether that was less.

        The entry has computed its own way down by now; subtrees beside it below the part that was gone are led anew.
        """
        head = self.head_over(entry, worker)
        if head is None or cached_tokens >= head.node.depth:
            return False
        on_path: set[Node] = set()
        node: Node | None = head.node
        while node is not None and node.depth > cached_tokens:
            on_path.add(node)
            lost, node = node, node.parent
        for beside in head.run.heads:
            if beside.state is HeadState.HELD and beside.node not in on_path and _is_below(beside.node, lost):
                beside.settle(HeadState.BARE)
        return True

    def end(self, entry: Entry) -> None:
        """Takes an entry out whose request has ended, waiting or not."""
        if entry.state is State.WAITING:
            self.tree.count(entry, -1)
        entry.state = State.ENDED
        if entry.node is not None:
            self._remove(entry)

    def set_apart(self, entry: Entry) -> None:
        """Takes an entry out that is to run apart; it carries its whole prompt from now on."""
        entry.state = State.APART
        if entry.node is None:
            return
        raw = self.tree.prompt(entry)
        self._remove(entry)
        entry.key = None
        entry.tail, entry.tail_tokens = ids.pack(raw, self.planes), entry.prompt_tokens

    def prompt(self, entry: Entry) -> bytes:
        """Returns the prompt of an entry, int32 bytes."""
        return self.tree.prompt(entry)

    def expected_decode(self, max_tokens: int) -> int:
        """Tokens that a sample is expected to generate: the running mean, as long as that is less than it may."""
        mean = self.mean_decode
        return max_tokens if mean is None or mean >= max_tokens else int(mean)

    def learn(self, generated_tokens: int) -> None:
        """Takes in how much a request generated, to expect it of those that come."""
        mean = self.mean_decode
        self.mean_decode = generated_tokens if mean is None else mean + (generated_tokens - mean) / 64

    # -- Reshaper --------------------------------------------------------------------------------------------------

    def node_cut(self, upper: Node, lower: Node) -> None:
        """A prompt left a shared head halfway: what workers have of it, they have of both halves."""
        if not lower.opened:
            upper.offer(lower, self._rank_of(lower))
            self._offer(upper)
            return
        self._open[upper] = None
        upper.opened = True
        for head in lower.heads.values():
            head.run.worker.plan.heads -= upper.edge_tokens
            twin = head.run.add(Head(upper, head.run, head.claim, head.state))
            twin.users = 1 if head.users else 0
            if head.leader is not None:
                twin.leader = head.leader
                head.leader.leads.append(twin)

    def entry_branched(self, node: Node, entry: Entry) -> None:
        """A second prompt shares what was one request's own: it is a head now."""
        attempt = entry.attempt
        if entry.state is State.WAITING or attempt is None:
            node.offer(entry, self._rank(entry.decode, entry.tail_tokens, entry.arrived))
            self._offer(node)
            return
        run = self.runs.get(attempt.worker.id)
        if run is None:
            return  # its worker takes nothing more: others may claim the node
        self._open[node] = None
        plan = attempt.worker.plan
        plan.own -= node.edge_tokens
        plan.heads_in_use += node.edge_tokens
        attempt.planned -= node.edge_tokens
        state = HeadState.HELD if attempt.context_done else HeadState.LEADING
        above = node.parent.heads.get(run.worker.id) if node.parent is not None else None
        head = run.add(Head(node, run, above.claim if above is not None else run.worker.next_claim(self._now), state))
        head.users = 1
        if state is HeadState.LEADING:
            head.leader = attempt
            attempt.leads.append(head)
            self._led(attempt)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _root_first(self, run: Run, head: Head, now: float, may_lead: bool) -> bool:
        """Whether what nobody has claimed goes before what this worker has."""
        best = self.tree.root.best(subtrees=may_lead)
        if best is None:
            return False
        rank, item = best
        if self.interactive:
            below = head.node.best(subtrees=may_lead)
            return below is not None and rank < below[0]
        born = item.arrived if isinstance(item, Entry) else item.born
        run.root_turn = born < now - self._rules.overdue_s and not run.root_turn
        return run.root_turn

    def _claim(self, run: Run, node: Node, child: Node, claim: Claim | None) -> None:
        """Makes the worker, or another that holds more of it, the owner of a whole subtree."""
        hints = self._find(prefix(child))
        other = self._holder(run, node, hints)
        if other is not None:
            self._hand(other, node, child)
            return
        self._own(run, child, claim or run.worker.next_claim(self._now), hints)

    def _own(self, run: Run, child: Node, claim: Claim, hints: list[Hint]) -> None:
        held = max((hint.tokens for hint in hints if hint.worker_id == run.worker.id), default=0)
        self._open[child] = None
        run.open(child, claim, held)

    def _own_path(self, run: Run, node: Node, hints: list[Hint]) -> None:
        """Makes the worker an owner of a node and of all over it."""
        path = []
        above: Node | None = node
        while above is not None and above.parent is not None and run.worker.id not in above.heads:
            path.append(above)
            above = above.parent
        over = above.heads.get(run.worker.id) if above is not None else None
        claim = over.claim if over is not None else run.worker.next_claim(self._now)
        for below in reversed(path):
            if below.heads:
                self.cut_tokens += below.edge_tokens
            self._own(run, below, claim, hints)

    def _holder(self, run: Run, node: Node, hints: list[Hint]) -> Run | None:
        """The run of another worker that holds clearly more of a prefix and can take it; None to keep it."""
        here = node.depth if run.worker.id in node.heads else 0
        best: Run | None = None
        for hint in hints:
            if hint.worker_id == run.worker.id:
                if hint.tokens >= here:
                    here, best = hint.tokens, None
                continue
            other = self.runs.get(hint.worker_id)
            if other is not None and hint.tokens > here and other.worker.takes(interactive=self.interactive):
                here, best = hint.tokens, other
        return best

    def _hand(self, other: Run, node: Node, item: Node | Entry) -> None:
        other.handed.append((node, item))
        other.worker.nudged = True

    def _next_handed(self, run: Run, may_lead: bool) -> Entry | None:
        """Works off what was left to this worker: claims subtrees, returns an entry that can go now."""
        while run.handed:
            node, item = run.handed[0]
            if not isinstance(item, Entry):
                run.handed.pop(0)
                if not item.opened and item.parent is not None and item.waiting:
                    self._own_path(run, item.parent, hints := self._find(prefix(item)))
                    self._own(run, item, run.worker.next_claim(self._now), hints)
                    return None
                continue
            if item.state is not State.WAITING or item.node is None:
                run.handed.pop(0)
                continue
            self._own_path(run, item.node, [item.hint] if item.hint is not None else [])
            head = self.head_over(item, run.worker)
            if head is not None and head.state is not HeadState.HELD:
                if not may_lead or head.state is HeadState.LEADING or head.leading_above() is not None:
                    return None
            run.at = None
            return item
        return None

    def _join(self, run: Run) -> bool:
        """Finds work for a worker that has none left: returns whether there is something for it now."""
        if run.searched == self._change:
            return False
        for other in self.runs.values():
            if other is not run and other.handed and not other.worker.takes(interactive=self.interactive):
                run.handed.append(other.handed.pop())
                return True
        # Room that is kept for siblings of its own leaders is no reason to take somebody else's work.
        best, most = None, 0.0
        for node in self._open if run.can_take_all() else ():
            if run.worker.id in node.heads or node.best(subtrees=True) is None:
                continue
            below = node.tokens + self._rules.decode_weight * node.decode
            worth = self._worth(run, node) if self.interactive or below > most else 0.0
            if worth > most:
                best, most = node, worth
        if best is None:
            # What owners cannot take now, others may have: for interactive work that changes without the tree.
            run.searched = -1 if self.interactive else self._change
            return False
        self._own_path(run, best, self._find(prefix(best)))
        return True

    def _worth(self, run: Run, node: Node) -> float:
        """What joining a node would move to this worker, less what it would cost, in prompt tokens.

        Nothing where its owners have room for all that they own: it is theirs as soon as its head is computed.
        """
        cost = node.depth
        above = node.parent
        while above is not None and above.parent is not None:
            head = above.heads.get(run.worker.id)
            if head is not None:
                if head.state is HeadState.LEADING or head.leading_above() is not None:
                    return 0.0
                if head.state is HeadState.HELD:
                    cost -= above.depth
                    break
            above = above.parent
        if self.interactive and not any(head.run.worker.takes(interactive=True) for head in node.heads.values()):
            return 1.0
        if all(head.run.can_take_all() for head in node.heads.values()):
            return 0.0
        moved = 0.0
        weight = self._rules.decode_weight
        for _, _, entry in node.entries[:_SAMPLED]:
            if entry.state is State.WAITING and entry.node is node:
                moved += entry.tail_tokens + weight * entry.decode
        moved *= max(1.0, len(node.entries) / _SAMPLED)
        subtrees = 0.0
        for _, _, child in node.subtrees[:_SAMPLED]:
            if not child.opened and child.parent is node:
                subtrees += child.tokens + child.edge_tokens + weight * child.decode
        moved += subtrees * max(1.0, len(node.subtrees) / _SAMPLED)
        moved /= len(node.heads) + 1
        return moved - self._rules.join_factor * cost

    def head_over(self, entry: Entry, worker: Worker) -> Head | None:
        node = entry.node
        return None if node is None or node.parent is None else node.heads.get(worker.id)

    def _remove(self, entry: Entry) -> None:
        for node in self.tree.remove(entry):
            self._open.pop(node, None)
            raw = prefix(node) if node.heads else b""
            for head in list(node.heads.values()):
                if head.state is HeadState.HELD:
                    self._held(head.run.worker, raw)
                head.run.close(head)

    def _offer(self, node: Node) -> None:
        """Puts an unowned node up for taking, where it has something to take."""
        parent = node.parent
        if parent is not None and node.waiting:
            parent.offer(node, self._rank_of(node))
            self._wake(parent)

    def _offer_again(self, node: Node, item: Node | Entry) -> None:
        if not isinstance(item, Entry):
            if not item.opened:
                self._offer(item)
        elif item.state is State.WAITING and item.node is not None:
            item.node.offer(item, self._rank(item.decode, item.tail_tokens, item.arrived))
            self._wake(item.node)

    def _wake(self, node: Node) -> None:
        for head in node.heads.values():
            head.wake()

    def _rank_of(self, node: Node) -> float:
        return self._rank(node.decode, node.tokens + node.edge_tokens, node.born)

    def _rank(self, decode: int, tokens: int, born: float) -> float:
        """Lower goes first: dense in decode, or old. Relative order never changes with time, so heaps stay valid."""
        if self.interactive:
            return born
        return born / self._rules.ageing_s - math.log2((decode + 1) / (tokens + 1))


def _is_below(node: Node, over: Node) -> bool:
    above: Node | None = node
    while above is not None and above.depth > over.depth:
        above = above.parent
    return above is over
