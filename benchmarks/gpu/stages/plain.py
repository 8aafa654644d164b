# SPDX-License-Identifier: Apache-2.0
"""128 + 128 tokens, 256 slots, nothing shared: the suite beside upstream's own benchmark, turn by turn."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.driving import random_prompts, run, suite, worker_mib
from benchmarks.gpu.llama_engine import CardEngine
from benchmarks.gpu.stages.context import batched_bench

if TYPE_CHECKING:
    from benchmarks.gpu.stages.context import Context


def measure(context: Context) -> dict[str, Any]:
    """Returns the rates of both, and what the suite's is of the faster bench."""
    directory = context.prepare(CardEngine(256, 0, 128, 128, context.budget))
    figures: dict[str, list[float]] = {"bench_512": [], "bench_2048": [], "suite": []}
    loaded = None
    for turn in range(context.repeats):
        for ubatch in (512, 2048):
            rates = batched_bench(context, 128, 128, 256, ubatch)
            figures[f"bench_{ubatch}"].append(rates.both)
            print(f"bench, ubatch {ubatch}: {rates}", flush=True)
        with suite(directory, context.logs) as served:
            run(served, random_prompts(64, 128, 99), 16)
            ran = run(served, random_prompts(context.requests, 128, turn), 128)
            loaded = worker_mib(served)
        figures["suite"].append(ran.tokens_per_s)
        print(f"suite: {ran.tokens_per_s:,.0f} tokens/s, {ran}", flush=True)
    best = max(statistics.median(figures["bench_512"]), statistics.median(figures["bench_2048"]))
    return {
        **figures,
        "layout": "streams",
        "worker_mib": loaded,
        "suite_over_bench": statistics.median(figures["suite"]) / best,
    }
