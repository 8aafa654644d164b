# SPDX-License-Identifier: Apache-2.0
"""64 groups of 16 prompts with heads of 2,048 tokens: with sharing, without, and the bound from measured rates.

The bound takes llama-batched-bench's rates at these lengths with a stream for each sequence, whatever the layout here.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.driving import moved, random_prompts, run, shared_prompts, suite, worker_mib
from benchmarks.gpu.llama_engine import CardEngine
from benchmarks.gpu.stages.context import batched_bench

if TYPE_CHECKING:
    from benchmarks.gpu.stages.context import Context

GROUPS, MEMBERS, HEAD, TAIL, OUT, SLOTS = 64, 16, 2048, 64, 64, 64
BUDGET = 4096
STREAM_HEADS = 24
POOL_HEADS = 8
"""A pool needs a head in cells once: those of the groups that are inside, and these."""
POOL_TOKENS = 32_768
ALONE_PART = 4
"""Without sharing a fourth of the rows is run: every one costs the same."""


def measure(context: Context) -> dict[str, Any]:
    """Returns seconds of all runs, the bound, and both ratios."""
    unified = context.layout == "unified"
    engine = CardEngine(
        SLOTS,
        POOL_HEADS if unified else STREAM_HEADS,
        HEAD + TAIL,
        OUT,
        BUDGET,
        layout=context.layout,
        pool_tokens=POOL_TOKENS if unified else 0,
    )
    directory = context.prepare(engine)
    rates = batched_bench(context, HEAD + TAIL, OUT, SLOTS, 2048)
    print("bench:", rates, flush=True)
    prompts = shared_prompts(GROUPS, MEMBERS, HEAD, TAIL, 7)
    with suite(directory, context.logs) as served:
        run(served, random_prompts(64, 128, 99), 16)
        loaded = worker_mib(served)
        shared = []
        for turn in range(context.repeats):
            shared.append(run(served, moved(prompts, turn), OUT))
            print("shared:", shared[-1], flush=True)
        alone = run(served, prompts[: len(prompts) // ALONE_PART], OUT, salted=True)
        print("alone:", alone, flush=True)
    bounds = [ran.bound / rates.prefill + ran.generated / rates.decode for ran in shared]
    seconds = statistics.median(ran.seconds for ran in shared)
    return {
        "layout": context.layout,
        "bench": rates,
        "worker_mib": loaded,
        "shared": shared,
        "alone_part": alone,
        "bound_s": statistics.median(bounds),
        "shared_over_alone": ALONE_PART * alone.seconds / seconds,
        "bound_over_shared": statistics.median(bounds) / seconds,
    }
