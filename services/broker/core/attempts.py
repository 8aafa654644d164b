# SPDX-License-Identifier: Apache-2.0
"""One dispatch of one request to one worker."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.core.entry import Entry
    from services.broker.core.heads import Head
    from services.broker.core.workers import Amount, Worker

_handles = itertools.count(1)


class Attempt:
    """(request, attempt) under a handle that no stream of this process ever sees twice."""

    __slots__ = (
        "apart",
        "cancelled",
        "closed",
        "computed_tokens",
        "context_done",
        "cost",
        "entry",
        "had_company",
        "handle",
        "head_tokens",
        "leading",
        "leads",
        "number",
        "planned",
        "reports_context",
        "traceparent",
        "worker",
    )

    def __init__(self, entry: Entry, worker: Worker, cost: Amount) -> None:
        self.handle = next(_handles)
        self.entry = entry
        self.worker = worker
        self.cost = cost
        """What it takes of the worker's credit."""
        self.number = entry.attempts
        self.apart = False
        """Whether it runs apart from innocent work."""
        self.had_company = False
        """Whether its worker ever had anything else of this broker beside it."""
        self.head_tokens = 0
        """How much of its prompt the worker was believed to hold when it was sent."""
        self.reports_context = False
        """Whether the worker tells when the prompt is computed."""
        self.planned = 0
        """What it takes of the pool beside shared heads, in tokens."""
        self.leads: list[Head] = []
        """Heads that its siblings wait for."""
        self.leading = 0
        """Prompt tokens that it has to compute before they can follow; 0 once it has, or where it leads nobody."""
        self.context_done = False
        """Whether its prompt is computed, or has to be taken as such."""
        self.computed_tokens = 0
        """Prompt tokens that the worker said it computed; 0 before it said so."""
        self.traceparent = entry.work.traceparent
        """Trace context that its worker continues; empty is "not traced"."""
        self.closed: Callable[[], None] | None = None
        """Called when it has ended, however; None for nothing."""
        self.cancelled = False
        """Whether the worker was told to end it."""
