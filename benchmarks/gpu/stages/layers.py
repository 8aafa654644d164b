# SPDX-License-Identifier: Apache-2.0
"""One layer at a time on real cards, over one pool of a fixed size and one job of shared heads.

    stock      a client in a loop, arrival order; as many slots as the pool holds of the longest requests, which is what
               an engine without admission has to be set to; the runtime's usual token budget of 512
    budget     the token budget of 4,096
    grouping   the whole job is known to the broker, which sends it head by head
    admission  four times the slots: each request enters when what it adds to the pool is free, shared blocks counted
               once
    second     a second card, where there is one

The last is run again for `--minutes`, for a mean of the cards' idle time over so long.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.cards import cards
from benchmarks.gpu.driving import moved, random_prompts, run, shared_prompts, suite
from benchmarks.gpu.llama_engine import CardEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.stages.context import Context

GROUPS, MEMBERS, HEAD, TAIL, OUT = 48, 16, 512, 64, 64
POOL_TOKENS = 8_192
RESIDENT_HEADS = 4
STOCK_SLOTS = POOL_TOKENS // (HEAD + TAIL + OUT)
STOCK_BUDGET = 512


@dataclass(frozen=True, slots=True)
class Layer:
    """One set-up."""

    name: str
    slots: int
    budget: int
    grouped: bool
    cards: int = 1


def measure(context: Context) -> dict[str, Any]:
    """Returns a row for each layer, with its gain over the one before, and the long run's."""
    prompts = shared_prompts(GROUPS, MEMBERS, HEAD, TAIL, 7)
    random.Random(3).shuffle(prompts)
    ladder = [
        Layer("stock", STOCK_SLOTS, STOCK_BUDGET, grouped=False),
        Layer("budget", STOCK_SLOTS, context.budget, grouped=False),
        Layer("grouping", STOCK_SLOTS, context.budget, grouped=True),
        Layer("admission", 4 * STOCK_SLOTS, context.budget, grouped=True),
    ]
    if len(cards()) > 1:
        ladder.append(Layer("second", 4 * STOCK_SLOTS, context.budget, grouped=True, cards=2))
    rows: list[dict[str, Any]] = []
    for layer in [layer for layer in ladder if not context.only or layer.name in context.only]:
        row = _row(context, layer, prompts)
        row["gain"] = row["prompts_per_s"] / rows[-1]["prompts_per_s"] if rows else 1.0
        rows.append(row)
        print(row, flush=True)
    return {"layout": "unified", "pool_tokens": POOL_TOKENS, "rows": rows}


def _row(context: Context, layer: Layer, prompts: Sequence[Any]) -> dict[str, Any]:
    engine = CardEngine(
        layer.slots, RESIDENT_HEADS, HEAD + TAIL, OUT, layer.budget, layout="unified", pool_tokens=POOL_TOKENS
    )
    directory = context.prepare(engine, f"engine-{layer.name}")
    window = 0 if layer.grouped else 2 * layer.slots
    with suite(directory, context.logs, layer.cards) as served:
        run(served, random_prompts(64 * layer.cards, 128, 99), 16)
        ran = run(served, prompts, OUT, window=window)
        row = {
            "layer": layer.name,
            "cards": layer.cards,
            "slots": layer.slots,
            "budget": layer.budget,
            "seconds": ran.seconds,
            "prompts_per_s": len(prompts) / ran.seconds,
            "computed_over_bound": ran.computed / ran.bound,
            "idle_fraction": ran.idle_fraction,
        }
        if layer.name == "second" and context.minutes:
            times = max(1, round(context.minutes * 60 / ran.seconds))
            long = [prompt for turn in range(1, times + 1) for prompt in moved(prompts, turn)]
            ran = run(served, long, OUT)
            row["long_seconds"], row["long_prompts_per_s"] = ran.seconds, len(long) / ran.seconds
            row["long_idle_fraction"] = ran.idle_fraction
            row["long_computed_over_bound"] = ran.computed / ran.bound
    return row
