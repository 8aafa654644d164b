# SPDX-License-Identifier: Apache-2.0
"""A node's state in sentences, for whoever asks why it does not serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.provisioner.registry import ACCEPTED, DRAINING, LOADED, MAY_LOAD, REFUSED

if TYPE_CHECKING:
    from services.provisioner.registry import Node


def sentences(node: Node, *, lease_left_s: float) -> list[str]:
    """Says why a node is in its state: first the state, then a sentence a violation, then what comes next."""
    engine = node.description.contract.engine_id or "an engine without a name"
    said = [_STATES[node.state].format(node=node.node_id, engine=engine, count=len(node.violations))]
    said += [f"{v.path} is {v.found}; expected is {v.expected}." for v in node.violations]
    if node.state == REFUSED:
        said.append("It is judged again when its worker registers again; nothing has to be restarted here.")
    said.append(
        f"The worker at {node.description.address} has {max(lease_left_s, 0.0):.1f} s left to send its next heartbeat."
    )
    return said


_STATES = {
    REFUSED: "Node {node} is refused for {count} reason(s), so it gets no work.",
    MAY_LOAD: "Node {node} may load {engine}: its description holds, and nothing is loaded yet.",
    LOADED: "Node {node} has loaded {engine} and is being probed.",
    ACCEPTED: "Node {node} is accepted: its description, the report of {engine} and the probe agree.",
    DRAINING: "Node {node} is going away: it finishes what it has and gets nothing new.",
}
