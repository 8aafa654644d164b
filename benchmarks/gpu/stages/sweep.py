# SPDX-License-Identifier: Apache-2.0
"""Token budget by slots, three by three."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu.driving import random_prompts, run, suite
from benchmarks.gpu.llama_engine import CardEngine

if TYPE_CHECKING:
    from benchmarks.gpu.stages.context import Context


def measure(context: Context) -> dict[str, Any]:
    """Returns the rate of each pair, two runs each."""
    table = []
    for slots in (64, 128, 256):
        for budget in (512, 2048, 8192):
            directory = context.prepare(CardEngine(slots, 0, 128, 128, budget))
            with suite(directory, context.logs) as served:
                run(served, random_prompts(64, 128, 99), 16)
                runs = [run(served, random_prompts(384, 128, turn), 128).tokens_per_s for turn in range(2)]
            table.append({"slots": slots, "budget": budget, "tokens_per_s": runs})
            print(table[-1], flush=True)
    return {"layout": "streams", "rows": table}
