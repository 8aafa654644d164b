# SPDX-License-Identifier: Apache-2.0
"""The waiting tree: a radix tree over token blocks of everything that waits or runs in one flow.

An edge is one or more whole blocks; what is left of a prompt below its last shared block is the request's own tail,
packed. A tail becomes a node only when a second prompt shares it, so a prompt that shares nothing costs one entry and
no node. Ids lie in memory once: shared ones in the edge, the others in the tail.

Nothing is ever evicted from this tree: an entry leaves it when its request ends or is lost, a node when its last entry
does. Counts at a node cover what *waits* below it, so that an order can be chosen without looking below.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

from services.broker.core import ids
from services.broker.core.entry import Entry, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.core.heads import Head

_tickets = itertools.count()
"""Breaks ties between equal ranks: first offered, first out."""
_SWEEP_FROM = 64
"""Offers of a node below which none are swept."""


class Node:
    """A shared part of prompts: its edge, and everything below."""

    __slots__ = (
        "born",
        "chain",
        "children",
        "decode",
        "depth",
        "edge",
        "entries",
        "heads",
        "key",
        "live",
        "opened",
        "parent",
        "subtrees",
        "sweep_at",
        "tokens",
        "waiting",
    )

    def __init__(self, parent: Node | None, key: int, edge: bytes, chain: int, born: float) -> None:
        self.parent = parent
        self.key = key
        """Key among the parent's children: the chain of the edge's first block."""
        self.edge = edge
        """Ids of the edge, int32 bytes, whole blocks."""
        self.chain = chain
        """Chain of the whole prefix that ends here."""
        self.depth: int = len(edge) // ids.ID_BYTES + (parent.depth if parent else 0)
        """Tokens of the prefix that ends here."""
        self.born = born
        self.children: dict[int, Node | Entry] = {}
        self.live = 0
        """Entries and nodes directly below."""
        self.waiting = 0
        """Entries that wait, in the whole subtree."""
        self.tokens = 0
        """Tokens to compute for them below this node: edges once, tails."""
        self.decode = 0
        """Tokens that they are expected to generate."""
        self.opened = False
        """Whether some worker owns it, alone or with others."""
        self.heads: dict[str, Head] = {}
        """Its state at each worker that owns it, by worker id."""
        self.entries: list[tuple[float, int, Entry]] = []
        """Entries directly below that nobody has taken: a heap by rank. Stale items are skipped when met, and swept
        where they may be more than what can be taken: what ranks low is met late, and never where better work keeps
        coming."""
        self.subtrees: list[tuple[float, int, Node]] = []
        """Nodes directly below that nobody owns, likewise."""
        self.sweep_at = _SWEEP_FROM
        """How many items both heaps may have together before they are swept."""

    @property
    def edge_tokens(self) -> int:
        """Tokens of the edge."""
        return len(self.edge) // ids.ID_BYTES

    def offer(self, item: Node | Entry, rank: float) -> None:
        """Puts something that lies directly below up for taking; lower ranks go first."""
        if isinstance(item, Entry):
            heapq.heappush(self.entries, (rank, next(_tickets), item))
        else:
            heapq.heappush(self.subtrees, (rank, next(_tickets), item))
        if len(self.entries) + len(self.subtrees) > self.sweep_at:
            self._sweep()

    def clear_offers(self) -> None:
        """Lets go of everything that was offered: nothing below waits, so all of it is stale."""
        self.entries.clear()
        self.subtrees.clear()
        self.sweep_at = _SWEEP_FROM

    def _sweep(self) -> None:
        """Drops stale items. At each doubling of what is left, so that its cost is shared by the offers since."""
        self.entries = [offered for offered in self.entries if self.is_up(offered[2])]
        self.subtrees = [offered for offered in self.subtrees if self.is_up(offered[2])]
        heapq.heapify(self.entries)
        heapq.heapify(self.subtrees)
        self.sweep_at = max(_SWEEP_FROM, 2 * (len(self.entries) + len(self.subtrees)))

    def is_up(self, item: Node | Entry) -> bool:
        """Whether an offered item can still be taken here."""
        if isinstance(item, Entry):
            return item.state is State.WAITING and item.node is self
        return not item.opened and item.parent is self and item.waiting > 0

    def best(self, *, subtrees: bool) -> tuple[float, Node | Entry] | None:
        """Returns what goes first, with its rank, and leaves it there.

        Args:
            subtrees: Whether it may be a subtree; else only entries count.
        """
        entries = self.entries
        while entries:
            entry = entries[0][2]
            if entry.state is State.WAITING and entry.node is self:
                break
            heapq.heappop(entries)
        nodes = self.subtrees
        while nodes:
            node = nodes[0][2]
            if not node.opened and node.parent is self and node.waiting:
                break
            heapq.heappop(nodes)
        if subtrees and nodes and (not entries or nodes[0][:2] < entries[0][:2]):
            return nodes[0][0], nodes[0][2]
        return (entries[0][0], entries[0][2]) if entries else None

    def pop(self, item: Node | Entry) -> None:
        """Takes away what `best` returned."""
        if isinstance(item, Entry):
            heapq.heappop(self.entries)
        else:
            heapq.heappop(self.subtrees)


def prefix(node: Node) -> bytes:
    """Returns the ids from the start to the end of a node, int32 bytes."""
    parts = []
    above: Node | None = node
    while above is not None:
        parts.append(above.edge)
        above = above.parent
    parts.reverse()
    return b"".join(parts)


class Reshaper(Protocol):
    """Hears of nodes that come between others."""

    def node_cut(self, upper: Node, lower: Node) -> None:
        """The edge of `lower` was cut: `upper` has its first part and is its parent now."""

    def entry_branched(self, node: Node, entry: Entry) -> None:
        """The entry's tail was cut: `node` has its first part and is above it now."""


class Placed(NamedTuple):
    """Where an entry came to lie, for the accounting."""

    new_chains: list[int]
    """Chains of its whole blocks that no other prompt of the tree has."""
    end_chain: int | None
    """Chain of the whole prompt where it is whole blocks, else None."""


class WaitingTree:
    """The tree.

    Args:
        block_tokens: Tokens of one block; 0 where the engines share nothing.
        planes: Of packed ids, see `ids.pack`.
        salt: Prompts of different salts share nothing.
        chain: Finds where to look, see `ids.chain`; what is found there is compared.
    """

    def __init__(
        self,
        reshaper: Reshaper,
        *,
        block_tokens: int,
        planes: int,
        salt: int,
        chain: Callable[[bytes, int], int] = ids.chain,
    ) -> None:
        self._reshaper = reshaper
        self._block_bytes = block_tokens * ids.ID_BYTES
        self._block_tokens = block_tokens
        self._planes = planes
        self._chain = chain
        self.root = Node(None, 0, b"", ids.first_chain(salt), 0.0)
        self.root.opened = True
        self.bytes = 0
        """Bytes of ids in edges and tails."""

    def insert(self, entry: Entry, raw: bytes, *, now: float, chains: bool) -> Placed:
        """Hangs a waiting entry into the tree.

        Args:
            entry: The entry; `node`, `key`, `tail` and `tail_tokens` are set.
            raw: Its prompt, int32 bytes.
            now: Time, for nodes that come to be.
            chains: Whether the chains of new blocks are wanted.
        """
        size = self._block_bytes
        end = len(raw) // size * size if size else 0
        node, at = self.root, 0
        key: int | None = None
        while at < end:
            key = self._chain(raw[at : at + size], node.chain)
            child = node.children.get(key)
            if child is None:
                break
            if isinstance(child, Node):
                stop = at + len(child.edge)
                if raw[at:stop] == child.edge:
                    node, at, key = child, stop, None
                    continue
                common = ids.common_blocks(raw[at:end], child.edge, size)
                below = self._cut(child, common) if common else None
            else:
                below = self._branch(child, raw[at:end], now)
            if below is None:
                key = None  # a collision of chains: it hangs here without a key, and shares no more
                break
            node, at, key = below, at + len(below.edge), None
        entry.node, entry.key = node, key
        entry.tail_tokens = entry.prompt_tokens - at // ids.ID_BYTES
        entry.tail = ids.pack(raw[at:], self._planes)
        self.bytes += len(entry.tail)
        node.live += 1
        if key is not None:
            node.children[key] = entry
        self.count(entry, 1)
        return self._chains(raw, at, end, node, key) if chains else _NOTHING_NEW

    def count(self, entry: Entry, sign: int) -> None:
        """Counts an entry as waiting (1) or no more (-1) at every node above it."""
        tokens, decode = sign * entry.tail_tokens, sign * entry.decode
        node = entry.node
        while node is not None:
            if sign > 0:
                woke = node.waiting == 0
                node.waiting += 1
            else:
                node.waiting -= 1
                woke = node.waiting == 0
            node.tokens += tokens
            node.decode += decode
            if woke:
                tokens += sign * node.edge_tokens
                if sign < 0:
                    node.clear_offers()
            node = node.parent

    def remove(self, entry: Entry) -> list[Node]:
        """Takes out an entry that does not wait (any more); returns the nodes that went with it, lowest first."""
        node = entry.node
        assert node is not None  # noqa: S101 -- only entries of the tree are removed
        if entry.key is not None:
            del node.children[entry.key]
        self.bytes -= len(entry.tail)
        entry.node = None
        gone: list[Node] = []
        node.live -= 1
        while node.live == 0 and node.parent is not None:
            gone.append(node)
            self.bytes -= len(node.edge)
            parent = node.parent
            del parent.children[node.key]
            parent.live -= 1
            node = parent
        return gone

    def prompt(self, entry: Entry) -> bytes:
        """Returns the whole prompt of an entry of the tree, int32 bytes."""
        tail = ids.unpack(entry.tail, entry.tail_tokens, self._planes)
        node = entry.node
        return tail if node is None or node.parent is None else prefix(node) + tail

    def waiting(self) -> list[Entry]:
        """Returns every entry that waits, in no particular order."""
        found: list[Entry] = []
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            found += [entry for _, _, entry in node.entries if entry.state is State.WAITING and entry.node is node]
            nodes += [child for child in node.children.values() if isinstance(child, Node) and child.waiting]
        return found

    def _cut(self, lower: Node, blocks: int) -> Node:
        """Cuts a node's edge after so many blocks; returns the new node above it."""
        parent = lower.parent
        assert parent is not None  # noqa: S101 -- the root has no edge to cut
        at = blocks * self._block_bytes
        upper = Node(parent, lower.key, lower.edge[:at], self._chain_over(lower.edge[:at], parent.chain), lower.born)
        parent.children[upper.key] = upper
        lower.edge = lower.edge[at:]
        lower.parent = upper
        lower.key = self._chain(lower.edge[: self._block_bytes], upper.chain)
        upper.children[lower.key] = lower
        upper.live = 1
        upper.waiting, upper.decode = lower.waiting, lower.decode
        upper.tokens = lower.tokens + lower.edge_tokens if lower.waiting else lower.tokens
        self._reshaper.node_cut(upper, lower)
        return upper

    def _branch(self, entry: Entry, raw: bytes, now: float) -> Node | None:
        """Puts a node over what a tail shares with `raw`; None where that is nothing."""
        tail = ids.unpack(entry.tail, entry.tail_tokens, self._planes)
        common = ids.common_blocks(raw, tail, self._block_bytes)
        parent, key = entry.node, entry.key
        if not common or parent is None or key is None:
            return None
        edge = tail[: common * self._block_bytes]
        node = Node(parent, key, edge, self._chain_over(edge, parent.chain), now)
        parent.children[key] = node
        self.bytes += len(edge) - len(entry.tail)
        entry.tail_tokens -= node.edge_tokens
        entry.tail = ids.pack(tail[len(edge) :], self._planes)
        self.bytes += len(entry.tail)
        entry.node, entry.key = node, None
        if entry.tail_tokens >= self._block_tokens:
            entry.key = self._chain(tail[len(edge) : len(edge) + self._block_bytes], node.chain)
            node.children[entry.key] = entry
        node.live = 1
        if entry.state is State.WAITING:
            node.waiting, node.tokens, node.decode = 1, entry.tail_tokens, entry.decode
        self._reshaper.entry_branched(node, entry)
        return node

    def _chain_over(self, edge: bytes, before: int) -> int:
        for at in range(0, len(edge), self._block_bytes):
            before = self._chain(edge[at : at + self._block_bytes], before)
        return before

    def _chains(self, raw: bytes, at: int, end: int, node: Node, key: int | None) -> Placed:
        last, size = node.chain, self._block_bytes
        new = []
        if key is not None:
            for start in range(at, end, size):
                last = self._chain(raw[start : start + size], last)
                new.append(last)
        return Placed(new, last if end and end == len(raw) else None)


_NOTHING_NEW = Placed([], None)
