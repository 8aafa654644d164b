# SPDX-License-Identifier: Apache-2.0
"""What each worker is believed to hold of prompts that the waiting tree has forgotten.

A radix tree over token blocks for each engine and salt, with, at each node, the workers that hold it and the reading
of their clock when they last touched it. A worker's clock counts the tokens that went into its KV pool; a pool that
evicts what was used longest ago has lost whatever was touched more than a pool's worth of tokens ago, so belief ages
by the workers' own counts. Beyond that the trees are bounded by bytes: what was touched longest ago goes.

Belief may be wrong at any time; it decides where work goes, never what it computes, and what a worker says it found in
its cache corrects it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.core import ids
from services.broker.core.entry import Hint

if TYPE_CHECKING:
    from services.broker.core.workers import Worker

_NODE_BYTES = 600
"""What a node costs beside its ids."""
_SWEEP_TO = 0.75
"""Share of the bound that a sweep leaves."""
_SWEEP_FROM = 4 * 1024 * 1024
"""Bytes below which nothing is swept. Above, each doubling since the last sweep brings the next one: what has aged out
of the workers' pools does not stay until the bound is reached, at a cost that the nodes noted since then share."""


class _Node:
    __slots__ = ("chain", "children", "depth", "edge", "holders", "key", "parent", "touched")

    def __init__(self, parent: _Node | None, key: int, edge: bytes, chain: int) -> None:
        self.parent = parent
        self.key = key
        self.edge = edge
        self.chain = chain
        self.depth: int = len(edge) // ids.ID_BYTES + (parent.depth if parent else 0)
        self.children: dict[int, _Node] = {}
        self.holders: dict[Worker, int] = {}
        self.touched = 0


class Holdings:
    """The belief about all workers.

    Args:
        bytes_max: Bound on memory, in bytes.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sweep_at = min(bytes_max, _SWEEP_FROM)
        self._roots: dict[tuple[str, int], _Node] = {}
        self._touch = 0
        self.bytes = 0
        """Memory in use, in bytes, as estimated."""

    def note(self, worker: Worker, salt: int, raw: bytes) -> None:
        """A worker holds a prefix (int32 bytes) now; its last partial block does not count."""
        size = worker.facts.block_tokens * ids.ID_BYTES
        end = len(raw) // size * size if size else 0
        if not end or not worker.serving:
            return
        node = self._root(worker.facts.digest, salt)
        self._touch += 1
        at = 0
        while at < end:
            key = ids.chain(raw[at : at + size], node.chain)
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, raw[at:end], size)
            elif raw[at : at + len(child.edge)] != child.edge:
                common = ids.common_blocks(raw[at:end], child.edge, size)
                if not common:
                    return  # a collision of chains: not noted
                child = self._cut(child, common * size, size)
            node, at = child, at + len(child.edge)
            node.holders[worker] = worker.clock
            node.touched = self._touch
        if self.bytes > self._sweep_at:
            self._sweep()
            self._sweep_at = min(self._bytes_max, max(_SWEEP_FROM, 2 * self.bytes))

    def find(self, digests: frozenset[str], salt: int, raw: bytes, blocks: dict[str, int]) -> list[Hint]:
        """Returns the workers believed to hold the start of a prompt, and how much of it.

        Args:
            digests: Engines that may serve it.
            salt: Its salt.
            raw: The prompt, int32 bytes.
            blocks: Block size of each engine, in tokens.
        """
        found: dict[str, Hint] = {}
        for digest in digests:
            node = self._roots.get((digest, salt))
            size = blocks.get(digest, 0) * ids.ID_BYTES
            if node is None or not size:
                continue
            at, end = 0, len(raw) // size * size
            while at < end:
                child = node.children.get(ids.chain(raw[at : at + size], node.chain))
                if child is None:
                    break
                matched = len(child.edge)
                if raw[at : at + matched] != child.edge:
                    matched = ids.common_blocks(raw[at:end], child.edge, size) * size
                if matched:
                    tokens = (at + matched) // ids.ID_BYTES
                    for worker, clock in child.holders.items():
                        if worker.serving and worker.clock - clock <= worker.pool_tokens:
                            found[worker.id] = Hint(worker.id, tokens)
                if matched < len(child.edge):
                    break
                node, at = child, at + matched
        return list(found.values())

    def forget(self, worker: Worker) -> None:
        """A worker is gone, and with it all that it held."""
        for root in self._roots.values():
            for node in _below(root):
                node.holders.pop(worker, None)
        self._prune()

    def lost(self, worker: Worker, salt: int, raw: bytes, held_tokens: int) -> None:
        """A worker turned out to hold no more than the first `held_tokens` of a prompt."""
        node = self._roots.get((worker.facts.digest, salt))
        size = worker.facts.block_tokens * ids.ID_BYTES
        at = 0
        while node is not None and size and at + size <= len(raw):
            child = node.children.get(ids.chain(raw[at : at + size], node.chain))
            if child is None or raw[at : at + len(child.edge)] != child.edge:
                return
            if child.depth > held_tokens:
                child.holders.pop(worker, None)
            node, at = child, at + len(child.edge)

    def _root(self, digest: str, salt: int) -> _Node:
        root = self._roots.get((digest, salt))
        if root is None:
            root = self._roots[digest, salt] = _Node(None, 0, b"", ids.first_chain(salt))
        return root

    def _add(self, parent: _Node, key: int, edge: bytes, size: int) -> _Node:
        node = _Node(parent, key, edge, _chain_over(edge, parent.chain, size))
        parent.children[key] = node
        self.bytes += len(edge) + _NODE_BYTES
        return node

    def _cut(self, lower: _Node, at: int, size: int) -> _Node:
        parent = lower.parent
        assert parent is not None  # noqa: S101 -- roots have no edge to cut
        upper = _Node(parent, lower.key, lower.edge[:at], _chain_over(lower.edge[:at], parent.chain, size))
        parent.children[upper.key] = upper
        upper.holders, upper.touched = dict(lower.holders), lower.touched
        lower.edge, lower.parent = lower.edge[at:], upper
        lower.key = ids.chain(lower.edge[:size], upper.chain)
        upper.children[lower.key] = lower
        self.bytes += _NODE_BYTES
        return upper

    def _prune(self) -> None:
        """Drops nodes that nobody holds. A worker that holds a node holds everything over it."""
        for root in self._roots.values():
            for node in reversed(_below(root)):
                if not node.holders and not node.children:
                    self._drop(node)
        self._roots = {key: root for key, root in self._roots.items() if root.children}

    def _sweep(self) -> None:
        """Makes room: first what has aged out of the workers' pools, then what was touched longest ago."""
        for root in self._roots.values():
            for node in _below(root):
                for worker, clock in list(node.holders.items()):
                    if worker.clock - clock > worker.pool_tokens:
                        del node.holders[worker]
        self._prune()
        if self.bytes <= self._bytes_max * _SWEEP_TO:
            return
        # A node is never touched later than the one over it, so the oldest first takes leaves before their parents.
        nodes = [node for root in self._roots.values() for node in _below(root)]
        nodes.sort(key=lambda node: (node.touched, -node.depth))
        for node in nodes:
            if self.bytes <= self._bytes_max * _SWEEP_TO:
                return
            self._drop(node)

    def _drop(self, node: _Node) -> None:
        """Takes a leaf away."""
        if node.parent is not None:
            del node.parent.children[node.key]
        self.bytes -= len(node.edge) + _NODE_BYTES


def _chain_over(edge: bytes, before: int, size: int) -> int:
    for at in range(0, len(edge), size):
        before = ids.chain(edge[at : at + size], before)
    return before


def _below(root: _Node) -> list[_Node]:
    """All nodes below, parents before children."""
    found: list[_Node] = []
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        found.append(node)
        todo += node.children.values()
    return found
