# SPDX-License-Identifier: Apache-2.0
"""What must hold of the core's structures at any moment, recomputed from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.core import ids
from services.broker.core.entry import Entry, State
from services.broker.core.heads import HeadState
from services.broker.core.tree import Node, WaitingTree, prefix

if TYPE_CHECKING:
    from services.broker.core.decision import Decision
    from services.broker.core.flow import Flow


def check_tree(tree: WaitingTree, entries: list[Entry], prompts: dict[str, bytes]) -> None:
    """Counts, sizes and prompts of a tree, against the entries that are known to be in it."""
    below: dict[Node, list[Entry]] = {}
    nodes: list[Node] = []
    todo = [tree.root]
    while todo:
        node = todo.pop()
        nodes.append(node)
        below[node] = []
        todo += [child for child in node.children.values() if isinstance(child, Node)]
    for entry in entries:
        assert entry.node in below, "an entry hangs under a node that is not in the tree"
        assert tree.prompt(entry) == prompts[entry.work.key[1]]
        above: Node | None = entry.node
        while above is not None:
            below[above].append(entry)
            above = above.parent
    for node in nodes:
        inside = below[node]
        waiting = [entry for entry in inside if entry.state is State.WAITING]
        assert node.waiting == len(waiting)
        assert node.decode == sum(entry.decode for entry in waiting)
        edges = {other: other.edge_tokens for entry in waiting for other in _between(entry.node, node)}
        assert node.tokens == sum(entry.tail_tokens for entry in waiting) + sum(edges.values())
        direct = sum(entry.node is node for entry in inside)
        direct += sum(isinstance(child, Node) for child in node.children.values())
        assert node.live == direct
        assert node.depth * ids.ID_BYTES == len(prefix(node))
        if node.parent is not None:
            assert node.edge
            assert inside, "a node without entries stayed"
        _check_reachable(node, waiting)
    assert tree.bytes == sum(len(node.edge) for node in nodes) + sum(len(entry.tail) for entry in entries)


def _between(node: Node | None, top: Node) -> list[Node]:
    """The nodes from `node` up to, without, `top`."""
    found = []
    while node is not None and node is not top:
        found.append(node)
        node = node.parent
    return found


def _check_reachable(node: Node, waiting: list[Entry]) -> None:
    """Whatever waits directly below can be taken, unless a worker has been left it."""
    entries = {entry for _, _, entry in node.entries}
    for entry in waiting:
        if entry.node is node and entry not in entries:
            assert any(item is entry for run in entry.flow.owners.runs.values() for _, item in run.handed), (
                "an entry waits where nobody will find it"
            )
    offered = {child for _, _, child in node.subtrees}
    for child in node.children.values():
        if isinstance(child, Node) and child.waiting and not child.opened and child not in offered:
            flow = waiting[0].flow
            assert any(item is child for run in flow.owners.runs.values() for _, item in run.handed), (
                "a subtree waits where nobody will find it"
            )


def check_flow(flow: Flow) -> None:
    """Heads of a flow: who leads, who waits, who can be found."""
    if not flow.waiting:
        assert not any(run.handed for run in flow.owners.runs.values()), "what was left to a worker outlasts the work"
    todo = [flow.tree.root]
    while todo:
        node = todo.pop()
        assert len(node.entries) + len(node.subtrees) <= node.sweep_at
        assert node.waiting or not (node.entries or node.subtrees), "offers outlast what waits"
        todo += [child for child in node.children.values() if isinstance(child, Node)]
        if node.parent is None:
            continue
        assert node.opened == bool(node.heads)
        for worker_id, head in node.heads.items():
            run = flow.owners.runs[worker_id]
            assert head.run is run
            assert head.node is node
            assert head in run.heads
            assert not head.gone
            above = head.above()
            if head.state is HeadState.HELD and above is not None:
                assert above.state is HeadState.HELD, "a head is held whose beginning is not"
            if head.state is HeadState.LEADING:
                assert head.leader is not None
                assert head in head.leader.leads
                assert head.leader.handle in head.run.worker.outstanding
            elif node.waiting and (node.entries or node.subtrees) and not head.queued:
                blocker = head.leading_above()
                assert blocker is not None, "a head with work below is in no queue"
                assert head in blocker.parked


def check_workers(decision: Decision) -> None:
    """Ledgers and plans, summed up anew."""
    for worker in decision.scheduler.workers.values():
        attempts = list(worker.outstanding.values())
        assert worker.ledger.tokens == sum(attempt.cost.tokens for attempt in attempts)
        assert worker.ledger.sequences == sum(attempt.cost.sequences for attempt in attempts)
        assert worker.plan.own == sum(attempt.planned for attempt in attempts)
        assert worker.leading == sum(attempt.leading for attempt in attempts)
        assert len(attempts) < 2 or all(attempt.had_company for attempt in attempts)
        heads = [
            head
            for flow in decision.scheduler.flows.values()
            if worker.id in flow.owners.runs
            for head in flow.owners.runs[worker.id].heads
        ]
        assert worker.plan.heads == sum(head.node.edge_tokens for head in heads)
        assert worker.plan.heads_in_use == sum(head.node.edge_tokens for head in heads if head.users)
        if worker.serving:
            for head in heads:
                users = sum(attempt.entry.node is head.node and not attempt.apart for attempt in attempts) + sum(
                    isinstance(child, Node) and worker.id in child.heads and child.heads[worker.id].users > 0
                    for child in head.node.children.values()
                )
                assert head.users == users
        apart = worker.apart
        if apart is not None:
            assert apart.running == sum(attempt.apart for attempt in attempts)


def check(decision: Decision, prompts: dict[str, bytes]) -> None:
    """All of it."""
    by_flow: dict[Flow, list[Entry]] = {}
    for entry in decision.requests.all():
        assert entry.state is not State.ENDED
        if entry.node is not None:
            by_flow.setdefault(entry.flow, []).append(entry)
    for flow in decision.scheduler.flows.values():
        check_tree(flow.tree, by_flow.get(flow, []), prompts)
        check_flow(flow)
    check_workers(decision)
