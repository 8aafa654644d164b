# SPDX-License-Identifier: Apache-2.0
"""What a run would take on the nodes that serve now: prompt tokens computed, tokens generated, time.

Three simple rules, whose errors the job's report tells afterwards:

* Every head is computed once, and once more for each further node that a group is spread over. A group is spread over
  as many nodes as it is times larger than an even share of the work.
* A request generates the share of what it may that requests on its engines have generated so far.
* An engine takes as many steps as its slots and its budget demand, at the speed that its counters have shown, and nodes
  divide the work by their speed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.broker.operating import EnginePace
    from services.broker.operators.analysis import Group, Worth

_EVEN = 1.1
"""How many times an even share a group may be before it is spread."""


class Seat(NamedTuple):
    """A node that would take part."""

    pace: EnginePace | None
    slots: int
    step_token_budget: int


class Prediction(NamedTuple):
    """What a run is expected to take."""

    computed_tokens: int
    cut_tokens: int
    generated_tokens: int
    wall_s: float | None
    """None where no engine's speed is known."""


def predict(worth: Worth, seats: Sequence[Seat], *, output_share: float | None, decode_weight: float) -> Prediction:
    """Predicts a run.

    Args:
        worth: The rows.
        seats: The nodes, at least one.
        output_share: Share of what requests allow that they generate, 0 to 1; None for all of it.
        decode_weight: Prompt tokens that one generated token counts for when work is divided between nodes.
    """
    share = 1.0 if output_share is None else output_share
    cut = _cut_tokens(worth.groups, len(seats), share * decode_weight)
    computed = worth.bound_tokens + cut
    generated = round(worth.generated_tokens_max * share)
    return Prediction(computed, cut, generated, _wall_s(worth.rows, computed, generated, seats))


def _cut_tokens(groups: Iterable[Group], nodes: int, generated_weight: float) -> int:
    sized = [(group.computed_tokens + generated_weight * group.generated_tokens, group) for group in groups]
    even = sum(size for size, _ in sized) / nodes
    if not even:
        return 0
    return sum(
        (min(nodes, math.ceil(size / (_EVEN * even))) - 1) * group.head_tokens for size, group in sized if size > even
    )


def _wall_s(rows: int, prompt_tokens: int, generated_tokens: int, seats: Sequence[Seat]) -> float | None:
    """Time of nodes that divide the work by their speed; unknown ones count as fast as the others on average."""
    if not rows:
        return 0.0
    alone = [
        _alone_us(seat.pace, rows / len(seats), prompt_tokens, generated_tokens, seat)
        for seat in seats
        if seat.pace is not None
    ]
    if not alone or not all(alone):
        return None
    return len(alone) / len(seats) / sum(1 / time for time in alone) / 1e6


def _alone_us(pace: EnginePace, rows: float, prompt_tokens: int, generated_tokens: int, seat: Seat) -> float:
    """Time of one engine for all tokens, when it has as many rows at once as its part of them and its slots allow."""
    together = max(1.0, min(seat.slots, rows))
    steps = max(generated_tokens / together, (prompt_tokens + generated_tokens) / seat.step_token_budget, 1.0)
    return pace.busy_us(steps, prompt_tokens, generated_tokens)
