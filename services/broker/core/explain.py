# SPDX-License-Identifier: Apache-2.0
"""Why a request is where it is, read from the core's state: nothing is changed, and nothing is kept for it.

The reasons are tried in the order in which the scheduler would meet them, so that the first sentence is the one that
has to change before the request moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.core.entry import State
from services.broker.core.heads import HeadState
from services.broker.core.ownership import is_left
from services.broker.operating import Place, Whereabouts
from services.broker.work import Lane

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.broker.core.attempts import Attempt
    from services.broker.core.entry import Entry
    from services.broker.core.scheduler import Scheduler
    from services.broker.core.tree import Node
    from services.broker.core.workers import Worker

_NAMED = 3
"""Nodes that a sentence names at most."""


def whereabouts(entry: Entry, scheduler: Scheduler, now: float, *, nobody_limit_s: float) -> Whereabouts:
    """Says where a request in flight is.

    Args:
        entry: The request; it has not ended.
        scheduler: What it waits in.
        now: Seconds of the core's clock.
        nobody_limit_s: How long work waits that no node serves.
    """
    attempt = entry.attempt
    if attempt is not None:
        place, sentences = Place.RUNNING, _running(entry, attempt, now)
    elif entry.state is State.APART:
        place, sentences = Place.APART, _apart(entry, scheduler, now)
    else:
        place, sentences = Place.WAITING, _waiting(entry, scheduler, now, nobody_limit_s)
    return Whereabouts(
        place,
        tuple(sentences),
        node_id=attempt.worker.node_id if attempt is not None else "",
        attempt=entry.attempts,
        age_s=now - entry.arrived,
        prompt_tokens=entry.prompt_tokens,
        held_tokens=attempt.head_tokens if attempt is not None else None,
        waiting_beside=entry.flow.waiting,
    )


def _running(entry: Entry, attempt: Attempt, now: float) -> list[str]:
    worker = attempt.worker
    since = f" for {_seconds(now - entry.sent)}" if entry.sent is not None else ""
    said = [f"It runs on {worker.node_id}{since}, attempt {attempt.number}."]
    if attempt.cancelled:
        said.append("The node was told to end it, and has not answered yet.")
    elif attempt.leads and not attempt.context_done:
        waiting = max(head.node.waiting for head in attempt.leads)
        said.append(f"It computes a head that {_count(waiting, 'other request')} below it will share.")
    elif attempt.reports_context and not attempt.context_done:
        said.append("Its prompt is being computed, or waits at the node for room in the batcher.")
    if attempt.head_tokens:
        said.append(
            f"The node held {attempt.head_tokens:,} of its {entry.prompt_tokens:,} prompt tokens when it was sent."
        )
    if attempt.apart:
        said.append("It runs apart from other work, because it was on a node that was lost.")
    if worker.quiet:
        said.append(f"The node has said nothing for {_seconds(now - worker.heard)}.")
    said.append(f"{_count(len(worker.outstanding) - 1, 'other request')} of this broker are there, too.")
    return said


def _apart(entry: Entry, scheduler: Scheduler, now: float) -> list[str]:
    said = [
        f"It was on a node that was lost, {_count(entry.losses, 'time')} in a way that it may have caused; "
        "it runs again apart from other work."
        if entry.losses
        else "Its node gave it back; it waits a moment before it goes elsewhere."
    ]
    able, why_not = _able(entry, scheduler)
    if not able:
        said.insert(0, why_not)
    elif all(worker.apart is not None for worker in able):
        said.append("Every node that may take it runs other such requests first.")
    elif scheduler.suspects.next_at is not None and scheduler.suspects.next_at > now:
        said.append(f"The next such attempt is due in {_seconds(scheduler.suspects.next_at - now)}.")
    return said


def _waiting(entry: Entry, scheduler: Scheduler, now: float, nobody_limit_s: float) -> list[str]:
    flow = entry.flow
    said = [f"It has waited for {_seconds(now - entry.arrived)}{_beside(entry)}."]
    if flow.paused:
        return ["Its job gives nothing out at present: it is paused, or its results are not being read.", *said]
    able, why_not = _able(entry, scheduler)
    if not able:
        if flow.nobody_since is not None:
            left = nobody_limit_s - (now - flow.nobody_since)
            said.append(f"It fails UNAVAILABLE in {_seconds(max(left, 0.0))} unless a node comes.")
        return [why_not, *said]
    if flow.ready_at > now:
        return [f"It waits {_seconds(flow.ready_at - now)} for others that share its head.", *said]
    for worker in able:
        lead = _leader_over(entry, worker)
        if lead is None:
            continue
        leader, tokens = lead
        return [
            f"It shares its first {tokens:,} tokens with {leader.entry.work.key[1]!r}, which computes them on "
            f"{worker.node_id} now; it follows once they are there.",
            *said,
        ]
    holder = _left_to(entry)
    if holder is not None:
        said.insert(
            0,
            f"It is left to {holder.node_id}, which holds the start of its prompt; another node takes it once that one "
            "is full and the other has nothing else to do.",
        )
    if all(worker.apart is not None for worker in able):
        return ["Every node that may take it runs requests of a lost node, and nothing else meanwhile.", *said]
    full = [worker for worker in able if (worker.full if flow.interactive else worker.full_for_bulk)]
    if len(full) == len(able):
        return [f"Every node that may take it has as much as it takes: {_fills(full)}.", *said]
    return [f"Its turn has not come{_before(entry, scheduler)}.", *said]


def _able(entry: Entry, scheduler: Scheduler) -> tuple[list[Worker], str]:
    """Workers that may take an entry and get work at all, and what stands against it where there is none."""
    serving = [worker for worker in scheduler.workers.values() if worker.facts.digest in entry.flow.key.digests]
    able = [worker for worker in serving if worker.able]
    if able:
        return able, ""
    if not serving:
        return [], "No node that serves an engine of this request is connected."
    cordoned = [worker.node_id for worker in serving if worker.cordoned]
    quiet = [worker.node_id for worker in serving if worker.serving and worker.quiet]
    standing = [worker.node_id for worker in serving if worker.serving and worker.standing and not worker.quiet]
    leaving = [worker.node_id for worker in serving if not worker.serving and not worker.cordoned]
    found = ((cordoned, "cordoned"), (quiet, "silent"), (standing, "standing still"), (leaving, "going away"))
    reasons = [f"{_names(names)} {what}" for names, what in found if names]
    return [], f"Of the nodes that serve an engine of this request, {' and '.join(reasons)}."


def _leader_over(entry: Entry, worker: Worker) -> tuple[Attempt, int] | None:
    """Who computes a head that an entry waits for at a worker, and how long the head is."""
    node = entry.node
    while node is not None and node.parent is not None:
        head = node.heads.get(worker.id)
        if head is not None and head.state is HeadState.LEADING and head.leader is not None:
            return head.leader, node.depth
        node = node.parent
    return None


def _left_to(entry: Entry) -> Worker | None:
    """The worker that an entry, or what it lies under, was left to; None where it was left to nobody."""
    above: set[Node | Entry] = {entry}
    node = entry.node
    while node is not None:
        above.add(node)
        node = node.parent
    for run in entry.flow.owners.runs.values():
        if any(item in above and is_left(item) for _, item in run.handed):
            return run.worker
    return None


def _fills(workers: Sequence[Worker]) -> str:
    said = [
        f"{worker.node_id} has {worker.ledger.sequences:,} of {worker.ledger.limit.sequences:,} sequences and "
        f"{worker.ledger.tokens:,} of {worker.ledger.limit.tokens:,} tokens of its credit"
        for worker in workers[:_NAMED]
    ]
    return "; ".join(said) + (f"; and {len(workers) - _NAMED} more" if len(workers) > _NAMED else "")


def _before(entry: Entry, scheduler: Scheduler) -> str:
    """What else is given out beside its flow."""
    key = entry.flow.key
    others = [flow for flow in scheduler.flows.values() if flow is not entry.flow and flow.waiting and not flow.paused]
    live = sum(flow.waiting for flow in others if flow.interactive)
    higher = sum(flow.waiting for flow in others if flow.key.lane is key.lane and flow.key.priority > key.priority)
    equal = sum(flow.waiting for flow in others if flow.key.lane is key.lane and flow.key.priority == key.priority)
    parts = [
        f"{_count(number, 'request')} {what}"
        for number, what in (
            (live if key.lane is Lane.BULK else 0, "that somebody waits for go first"),
            (higher, "of higher priority wait"),
            (equal, "of other jobs or tenants share the nodes with it"),
        )
        if number
    ]
    return f": {', '.join(parts)}" if parts else ""


def _beside(entry: Entry) -> str:
    others = entry.flow.waiting - 1
    return f", with {_count(others, 'other request')} of its own job or tenant" if others > 0 else ""


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(listed[:_NAMED]) + (f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else "")
    return f"{shown} {'is' if len(listed) == 1 else 'are'}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
