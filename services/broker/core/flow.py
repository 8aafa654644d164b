# SPDX-License-Identifier: Apache-2.0
"""A flow: the work of one job (or tenant) at one priority. Its tree, its owners, and what becomes of its entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from services.broker.core import ids
from services.broker.core.entry import Entry, Hint, State
from services.broker.core.heads import Head, HeadState, Run
from services.broker.core.ownership import FlowRules, Ownership
from services.broker.core.tree import Node, Placed, prefix
from services.broker.work import Lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.core.attempts import Attempt
    from services.broker.core.workers import Worker


class FlowKey(NamedTuple):
    """What makes work belong to one flow."""

    lane: Lane
    tenant: str
    job: str
    priority: int
    salt: int
    digests: frozenset[str]


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
        self.interactive = key.lane is Lane.INTERACTIVE
        """Whether somebody waits for it."""
        self.owners = Ownership(
            block_tokens=block_tokens,
            planes=planes,
            salt=key.salt,
            interactive=self.interactive,
            rules=rules,
            find=find,
            led=led,
        )
        self.tree = self.owners.tree
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
        self._held = held

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self.tree.root.waiting

    def add(self, entry: Entry, raw: bytes, *, now: float, chains: bool) -> Placed:
        """Takes a waiting entry in; `raw` is its prompt, int32 bytes."""
        placed = self.tree.insert(entry, raw, now=now, chains=chains)
        self.owners.came(entry, now)
        return placed

    def take(self, run: Run, entry: Entry, attempt: Attempt) -> None:
        """Takes what `Ownership.next` returned: it is dispatched to the run's worker as this attempt."""
        self.owners.took(run, entry)
        entry.state = State.DISPATCHED
        self._waits_no_more(entry)
        head = self.head_over(entry, run.worker)
        if head is not None:
            head.use()
            head.lead(attempt)

    def head_over(self, entry: Entry, worker: Worker) -> Head | None:
        """The worker's head that an entry hangs under; None at the root, or where the worker owns nothing of it."""
        node = entry.node
        return None if node is None or node.parent is None else node.heads.get(worker.id)

    def held_tokens(self, entry: Entry, worker: Worker) -> int:
        """How much of an entry's prompt a worker that owns the way down to it holds."""
        head = self.head_over(entry, worker)
        while head is not None and head.state is not HeadState.HELD:
            head = head.above()
        return 0 if head is None else head.node.depth

    def head_ends(self, entry: Entry) -> list[int]:
        """Returns the lengths of leading parts that other requests share, ascending."""
        ends = []
        node = entry.node
        while node is not None and node.parent is not None:
            ends.append(node.depth)
            node = node.parent
        ends.reverse()
        return ends

    def computed(self, attempt: Attempt) -> None:
        """An attempt's prompt is computed, or has to be taken as such: its worker holds every head on its way down."""
        leads = self._end_lead(attempt)
        head = self.head_over(attempt.entry, attempt.worker)
        while head is not None and head.state is not HeadState.HELD:
            leads.append(head)
            head = head.above()
        for head in leads:
            if head.state is not HeadState.HELD and not head.gone:
                head.settle(HeadState.HELD)

    def unled(self, attempt: Attempt) -> None:
        """An attempt ends without having computed what it leads: somebody else has to."""
        for head in self._end_lead(attempt):
            head.settle(HeadState.BARE)

    def _end_lead(self, attempt: Attempt) -> list[Head]:
        leads, attempt.leads = attempt.leads, []
        attempt.worker.leading -= attempt.leading
        attempt.leading = 0
        if leads:
            self.owners.changed()
        return [head for head in leads if head.leader is attempt and not head.gone]

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
            here = node.heads.get(worker.id)
            if here is not None:
                self.owners.tally.computes(here)
            lost, node = node, node.parent
        for beside in head.run.heads:
            if beside.state is HeadState.HELD and beside.node not in on_path and _is_below(beside.node, lost):
                beside.settle(HeadState.BARE)
        return True

    def remember(self, worker: Worker) -> None:
        """What a worker holds of the tree is told to `held`: it is about to stop taking part."""
        run = self.owners.runs.get(worker.id)
        for head in run.heads if run is not None else ():
            if head.state is HeadState.HELD:
                self._held(worker, prefix(head.node))

    def end(self, entry: Entry) -> None:
        """Takes an entry out whose request has ended, waiting or not."""
        if entry.state is State.WAITING:
            self._waits_no_more(entry)
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

    def _waits_no_more(self, entry: Entry) -> None:
        self.tree.count(entry, -1)
        if not self.waiting:
            self.owners.rest()

    def _remove(self, entry: Entry) -> None:
        for node in self.tree.remove(entry):
            raw = prefix(node) if node.heads else b""
            for head in node.heads.values():
                if head.state is HeadState.HELD:
                    self._held(head.run.worker, raw)
            self.owners.went(node)


def _is_below(node: Node, over: Node) -> bool:
    above: Node | None = node
    while above is not None and above.depth > over.depth:
        above = above.parent
    return above is over
