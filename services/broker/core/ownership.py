# SPDX-License-Identifier: Apache-2.0
"""Who of the workers owns which part of a flow's tree.

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
from typing import TYPE_CHECKING, NamedTuple

from services.broker.core.entry import Entry, Hint, State
from services.broker.core.heads import Claim, Head, HeadState, Run, Tally
from services.broker.core.tree import Node, WaitingTree, prefix
from services.broker.core.workers import cost_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.broker.core.attempts import Attempt
    from services.broker.core.workers import Worker

_SAMPLED = 64
"""Items that are looked at to judge what lies below a node."""
_TAIL_ITEMS = 64
"""Items for each worker from which on the end of the work is near enough to look for the longest."""
_FIRST = float("-inf")
"""A rank before all others."""


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


class Ownership:
    """The tree of one flow, and its owners.

    Args:
        block_tokens: Tokens of one block; 0 where nothing is shared.
        planes: Of packed ids, see `ids.pack`.
        salt: Prompts of different salts share nothing.
        interactive: Whether somebody waits for it: then what came first goes first.
        rules: Figures that shape the order.
        find: Tells who is believed to hold how much of a prefix (int32 bytes).
        led: Told of an attempt under way that has become the leader of a sibling.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        planes: int,
        salt: int,
        interactive: bool,
        rules: FlowRules,
        find: Callable[[bytes], list[Hint]],
        led: Callable[[Attempt], None],
    ) -> None:
        self.tree = WaitingTree(self, block_tokens=block_tokens, planes=planes, salt=salt)
        self.runs: dict[str, Run] = {}
        """The workers that take part, by id."""
        self.cut_tokens = 0
        """Tokens of heads that a second worker had to compute."""
        self.tally = Tally()
        self._interactive = interactive
        self._rules = rules
        self._find = find
        self._led = led
        self._open: dict[Node, None] = {}
        """Nodes that somebody owns."""
        self._looked: dict[Node, int] = {}
        """How much was up for taking below a node when the longest of it was last looked for."""
        self._change = 0
        self._now = 0.0

    def add_worker(self, worker: Worker) -> None:
        """Lets a worker take part."""
        self.runs[worker.id] = Run(worker, self.tally)
        self.changed()

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
                self.offer(node)
        for _, item in run.handed:
            if isinstance(item, Entry):
                if item.state is State.WAITING:
                    self.offer(item)
            elif not item.opened:
                self.offer(item)
        self.changed()

    def changed(self) -> None:
        """Something came, or became free: who found nothing may look again."""
        self._change += 1

    def offer(self, item: Node | Entry) -> None:
        """Puts what nobody owns up for taking."""
        if isinstance(item, Entry):
            node = item.node
            rank = self._rank(item.decode, item.tail_tokens, item.arrived)
        else:
            node = item.parent if item.waiting else None
            rank = self._rank(item.decode, item.tokens + item.edge_tokens, item.born)
        if node is not None:
            node.offer(item, rank)
            for head in node.heads.values():
                head.wake()

    def came(self, entry: Entry, now: float) -> None:
        """An entry was hung into the tree."""
        self._now = now
        self.offer(entry)
        # Every node on the way up to the first owned one is itself up for taking: one that has doubled ranks anew.
        node = entry.node
        while node is not None and not node.opened:
            if node.waiting & (node.waiting - 1) == 0:
                self.offer(node)
            node = node.parent
        self.changed()

    def went(self, node: Node) -> None:
        """The tree has dropped a node."""
        self._open.pop(node, None)
        self._looked.pop(node, None)
        for head in list(node.heads.values()):
            head.run.close(head)
        # Nothing of a node that is gone may lie in a ring: what waits is too much to be searched for rings.
        node.heads.clear()

    def rest(self) -> None:
        """Nothing waits any more: what was left to workers is stale."""
        for run in self.runs.values():
            run.handed.clear()
            run.at = None

    def next(self, run: Run, now: float, *, may_lead: bool) -> Entry | None:
        """Returns what the worker should be sent now, and leaves it in place; None where there is nothing for it.

        Where it not `may_lead`, what would make it compute a head that others wait for is passed over.
        """
        root = self.tree.root
        if not root.waiting:
            return None
        self._now = now
        while True:
            head = run.top(may_lead, now, self._rules.overdue_s)
            if head is not None and not self._root_first(run, head, now, may_lead):
                node, claim = head.node, head.claim
                if len(node.heads) > 1:
                    self._longest_first(node)
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
                self._longest_first(root)
                node, claim, best = root, None, root.best(subtrees=may_lead)
                if best is None:
                    if may_lead and self._join(run):
                        continue
                    return None
            item = best[1]
            if isinstance(item, Entry):
                other = self._holder(run, node, [item.hint]) if item.hint is not None else None
                if other is None or self._keeps(other, item):
                    run.at = node
                    return item
                node.pop(item)
                self._hand(other, node, item)
            else:
                node.pop(item)
                self._claim(run, node, item, claim)

    def took(self, run: Run, entry: Entry) -> None:
        """The run's worker takes what `next` returned."""
        if run.at is None:
            run.handed.popleft()
        else:
            run.at.pop(entry)

    def hand_on(self, run: Run, entry: Entry, other: Run) -> None:
        """Leaves what `next` returned to another worker, since this one can never take it."""
        node = self.tree.root if run.at is None else run.at
        self.took(run, entry)
        self._hand(other, node, entry)

    def overflows(self, run: Run) -> None:
        """The run's worker is full: who has nothing else to do may have what was left to it."""
        if run.handed:
            for other in self.runs.values():
                other.worker.nudged |= other is not run

    # -- Reshaper --------------------------------------------------------------------------------------------------

    def node_cut(self, upper: Node, lower: Node) -> None:
        """A prompt left a shared head halfway: what workers have of it, they have of both halves."""
        if not lower.opened:
            self.offer(lower)
            self.offer(upper)
            return
        self._open[upper] = None
        upper.opened = True
        for head in lower.heads.values():
            head.run.worker.plan.heads -= upper.edge_tokens
            twin = head.run.add(Head(upper, head.run, head.claim, head.state))
            twin.users = 1 if head.users else 0
            if head.counted:
                self.tally.computes(twin)
            if head.leader is not None:
                twin.leader = head.leader
                head.leader.leads.append(twin)

    def entry_branched(self, node: Node, entry: Entry) -> None:
        """A second prompt shares what was one request's own: it is a head now."""
        attempt = entry.attempt
        if entry.state is State.WAITING or attempt is None:
            self.offer(entry)
            self.offer(node)
            return
        run = self.runs.get(attempt.worker.id)
        if run is None:
            return  # its worker takes nothing more: others may claim the node
        self._open[node] = None
        plan = attempt.worker.plan
        plan.own -= node.edge_tokens
        plan.heads_in_use += node.edge_tokens
        attempt.planned -= node.edge_tokens
        over = node.parent.heads.get(run.worker.id) if node.parent is not None else None
        state = HeadState.HELD if attempt.context_done else HeadState.LEADING
        if over is not None and over.state is not HeadState.HELD and over.leader is not attempt:
            state = HeadState.BARE  # what it had computed before has been evicted from above
        claim = over.claim if over is not None else run.worker.next_claim(self._now)
        head = run.add(Head(node, run, claim, state))
        head.users = 1
        if state is not HeadState.BARE:
            self.tally.computes(head)
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
        if self._interactive:
            below = head.node.best(subtrees=may_lead)
            return below is not None and rank < below[0]
        born = item.arrived if isinstance(item, Entry) else item.born
        run.root_turn = born < now - self._rules.overdue_s and not run.root_turn
        return run.root_turn

    def _longest_first(self, node: Node) -> None:
        """Lets what takes longest go before the rest, where it would else be what everybody waits for in the end.

        Density puts long prompts with short answers last; one that takes half of the time that is left for each worker
        has to begin now.
        """
        workers, count = len(self.runs), len(node.entries) + len(node.subtrees)
        if workers < 2 or self._interactive or count > _TAIL_ITEMS * workers:
            return
        looked = self._looked.get(node, count * 2)
        if looked * 7 // 8 < count <= looked:
            return  # too little has gone since the last look to look again
        self._looked[node] = count
        longest: Node | Entry | None = None
        most = (node.tokens + self._rules.decode_weight * node.decode) / (2 * workers)
        offered: Iterable[tuple[float, int, Node | Entry]] = itertools.chain(node.entries, node.subtrees)
        for rank, _, item in offered:
            if node.is_up(item):
                if rank == _FIRST:
                    return
                effort = self._effort(item)
                if effort > most:
                    longest, most = item, effort
        if longest is not None:
            node.offer(longest, _FIRST)

    def _effort(self, item: Node | Entry) -> float:
        """What something takes, in prompt tokens; of a subtree, everything below."""
        tokens = item.tail_tokens if isinstance(item, Entry) else item.tokens + item.edge_tokens
        return tokens + self._rules.decode_weight * item.decode

    def _claim(self, run: Run, node: Node, child: Node, claim: Claim | None) -> None:
        """Makes the worker, or another that holds more of it, the owner of a whole subtree."""
        hints = self._find(prefix(child))
        other = self._holder(run, node, hints)
        if other is not None and not self._keeps(other, child):
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
            if other is not None and hint.tokens > here and other.worker.takes(interactive=self._interactive):
                here, best = hint.tokens, other
        return best

    def _keeps(self, other: Run, item: Node | Entry) -> bool:
        """Whether a worker takes itself what another holds the start of, and computes that anew.

        Else the holder alone would do a job whose heads it has from an earlier one, while others stand idle.
        """
        cost = _anew(item)
        worth = self._effort(item) - cost
        return bool(other.handed) and not self._interactive and worth >= self._rules.join_factor * cost

    def _hand(self, other: Run, node: Node, item: Node | Entry) -> None:
        other.handed.append((node, item))
        other.worker.nudged = True
        self.changed()

    def _next_handed(self, run: Run, may_lead: bool) -> Entry | None:
        """Works off what was left to this worker: claims subtrees, returns an entry that can go now."""
        while run.handed:
            _node, item = run.handed[0]
            if not isinstance(item, Entry):
                run.handed.popleft()
                if is_left(item) and item.parent is not None:
                    self._own_path(run, item.parent, hints := self._find(prefix(item)))
                    self._own(run, item, run.worker.next_claim(self._now), hints)
                    return None
                continue
            if item.node is None or not is_left(item):
                run.handed.popleft()
                continue
            self._own_path(run, item.node, [item.hint] if item.hint is not None else [])
            head = item.node.heads.get(run.worker.id)
            if head is None or head.state is HeadState.HELD or (may_lead and head.may_be_led()):
                run.at = None
                return item
            return None
        return None

    def _join(self, run: Run) -> bool:
        """Finds work for a worker that has none left: returns whether there is something for it now."""
        for other in self.runs.values() if run.worker.takes(interactive=self._interactive) else ():
            # Whether it is full changes without the tree.
            if other is not run and other.handed and not other.worker.takes(interactive=self._interactive):
                spare = self._take_spare(other, run.worker)
                if spare is not None:
                    run.handed.append(spare)
                    return True
        if run.searched == self._change:
            return False
        # Room that is kept for siblings of its own leaders is no reason to take somebody else's work.
        best, most = None, 0.0
        for node in self._open if run.can_take_all() else ():
            if run.worker.id in node.heads or node.best(subtrees=True) is None:
                continue
            below = node.tokens + self._rules.decode_weight * node.decode
            worth = self._worth(run, node) if self._interactive or below > most else 0.0
            if worth > most:
                best, most = node, worth
        if best is None:
            # What owners cannot take now, others may have: for interactive work that changes without the tree.
            run.searched = -1 if self._interactive else self._change
            return False
        self._own_path(run, best, self._find(prefix(best)))
        return True

    def _take_spare(self, other: Run, worker: Worker) -> tuple[Node, Entry | Node] | None:
        """Takes away the newest thing that was left to another worker and that this one may have; None for nothing.

        Nothing that exceeds its whole credit: it would only be handed back.
        """
        handed = other.handed
        for at in range(len(handed) - 1, max(-1, len(handed) - 1 - _SAMPLED), -1):
            found = handed[at]
            item = found[1]
            fits = not isinstance(item, Entry) or worker.ledger.could_fit(cost_of(item))
            if fits or not is_left(item):
                del handed[at]
                if fits and is_left(item):
                    return found
        return None

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
        if self._interactive and not any(head.run.worker.takes(interactive=True) for head in node.heads.values()):
            return 1.0
        if all(head.run.can_take_all() for head in node.heads.values()):
            return 0.0
        entries = sum(self._effort(entry) for _, _, entry in node.entries[:_SAMPLED] if node.is_up(entry))
        subtrees = sum(self._effort(child) for _, _, child in node.subtrees[:_SAMPLED] if node.is_up(child))
        moved = entries * max(1.0, len(node.entries) / _SAMPLED) + subtrees * max(1.0, len(node.subtrees) / _SAMPLED)
        return moved / (len(node.heads) + 1) - self._rules.join_factor * cost

    def _rank(self, decode: int, tokens: int, born: float) -> float:
        """Lower goes first: dense in decode, or old. Relative order never changes with time, so heaps stay valid."""
        if self._interactive:
            return born
        return born / self._rules.ageing_s - math.log2((decode + 1) / (tokens + 1))


def _anew(item: Node | Entry) -> int:
    """What of something a worker would have to compute, in tokens, that its holder need not."""
    if isinstance(item, Entry):
        return item.hint.tokens if item.hint is not None else 0
    return item.edge_tokens


def is_left(item: Node | Entry) -> bool:
    """Whether something that was left to a worker waits for it still: nobody took it meanwhile."""
    if isinstance(item, Entry):
        return item.state is State.WAITING and item.node is not None
    return not item.opened and item.parent is not None and item.waiting > 0
