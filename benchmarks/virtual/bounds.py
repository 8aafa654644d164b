# SPDX-License-Identifier: Apache-2.0
"""What no scheduler can beat: the least that cards have to compute, and the least time that they need for it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.virtual.engine import Card
    from benchmarks.virtual.workloads import Workload


def makespan_us(workload: Workload, cards: Sequence[Card]) -> float:
    """A lower bound on the time that equal cards need for a job, from their own speeds.

    Tokens cost what they cost, computed once; and steps cost their fixed part. Of steps there are at least as many as
    the token budget asks for, as the slots ask for, and as the pool asks for: a request holds what it shares with
    nobody for as long as it generates. The work may be spread perfectly; no request is faster than alone.
    """
    card = cards[0]
    users = Counter(block for row in workload.rows for block in set(row.blocks))
    decode = sum(row.output_tokens - 1 for row in workload.rows)
    prompt = workload.bound_tokens()
    reading = 0.0
    held = 0
    longest = 0.0
    for row in workload.rows:
        generated = row.output_tokens - 1
        context = generated * row.prompt_tokens + generated * (generated + 1) / 2
        reading += context * card.context_token_us
        whole = row.prompt_tokens // card.block_tokens
        shared = sum(users[block] > 1 for block in row.blocks[:whole])
        total = -(-(row.prompt_tokens + row.output_tokens) // card.block_tokens)
        held += generated * (total - shared)
        own = generated * (card.step_us + card.decode_token_us) + context * card.context_token_us
        longest = max(longest, own)
    steps = max((prompt + decode) / card.step_token_budget, decode / card.slots, held / card.pool_blocks)
    work = prompt * card.prompt_token_us + decode * card.decode_token_us + reading + steps * card.step_us
    return max(work / len(cards), longest)
