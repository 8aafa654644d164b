# SPDX-License-Identifier: Apache-2.0
"""64 groups of 16 prompts with heads of 2,048 tokens: the bound from measured rates, with sharing, without.

The bound takes llama-batched-bench's rates at these lengths with a stream for each sequence, whatever the layout here.
It has every token computed once, in large calls. In the layout of streams sharing has a price that no order of the work
can avoid: whoever begins with another's head gets its stream copied. `bound_copies_s` adds that, with as many copies as
there are followers, by a copy timed on the same card.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks import step_profile
from benchmarks.gpu.driving import moved, random_prompts, run, shared_prompts, suite, worker_mib
from benchmarks.gpu.llama_engine import CardEngine, stream_bytes
from benchmarks.gpu.stages.context import batched_bench

if TYPE_CHECKING:
    from benchmarks.gpu.stages.context import Context

GROUPS, MEMBERS, HEAD, TAIL, OUT, SLOTS = 64, 16, 2048, 64, 64, 64
STREAM_HEADS = 24
POOL_HEADS = 8
"""A pool needs a head in cells once: those of the groups that are inside, and these."""
POOL_TOKENS = 32_768
ALONE_PART = 4
"""Without sharing a fourth of the rows is run: every one costs the same."""


def measure(context: Context) -> dict[str, Any]:
    """Returns seconds of all runs, the bounds, and their ratios, as far as these parts are wanted."""
    unified = context.layout == "unified"
    engine = CardEngine(
        SLOTS,
        POOL_HEADS if unified else STREAM_HEADS,
        HEAD + TAIL,
        OUT,
        context.budget,
        layout=context.layout,
        pool_tokens=POOL_TOKENS if unified else 0,
        kv_type=context.kv_type,
    )
    directory = context.prepare(engine)
    figures: dict[str, Any] = {"layout": context.layout, "kv_type": context.kv_type}
    if _wanted(context, "bound"):
        rates = batched_bench(context, HEAD + TAIL, OUT, SLOTS, 2048)
        figures |= {"bench": rates, "copy_s": _copy_seconds(engine)}
        print("bench:", rates, "copy:", figures["copy_s"], "s", flush=True)
    prompts = shared_prompts(GROUPS, MEMBERS, HEAD, TAIL, 7)
    profile = context.work / "profile.jsonl" if context.profiled else None
    with suite(directory, context.logs, profile=profile) as served:
        run(served, random_prompts(64, 128, 99), 16)
        figures["worker_mib"] = worker_mib(served)
        shared = []
        for turn in range(context.repeats if _wanted(context, "shared") else 0):
            lines = step_profile.lines_in(profile) if profile else 0
            shared.append(run(served, moved(prompts, turn), OUT))
            print("shared:", shared[-1], flush=True)
            if profile:
                print(step_profile.read(profile, lines).table, flush=True)
        if _wanted(context, "alone"):
            figures["alone_part"] = run(served, prompts[: len(prompts) // ALONE_PART], OUT, salted=True)
            print("alone:", figures["alone_part"], flush=True)
    if shared:
        figures |= {"shared": shared, "shared_s": statistics.median(ran.seconds for ran in shared)}
    return figures | _ratios(figures)


def _wanted(context: Context, part: str) -> bool:
    return not context.only or part in context.only


def _ratios(figures: dict[str, Any]) -> dict[str, float]:
    """What can be said of the parts that were run."""
    out: dict[str, float] = {}
    if "shared" in figures and "bench" in figures:
        rates = figures["bench"]
        seconds = [ran.bound / rates.prefill + ran.generated / rates.decode for ran in figures["shared"]]
        out["bound_s"] = statistics.median(seconds)
        out["bound_over_shared"] = out["bound_s"] / figures["shared_s"]
        if figures["layout"] == "streams":
            out["bound_copies_s"] = out["bound_s"] + GROUPS * (MEMBERS - 1) * figures["copy_s"]
            out["bound_copies_over_shared"] = out["bound_copies_s"] / figures["shared_s"]
    if "shared" in figures and "alone_part" in figures:
        out["shared_over_alone"] = ALONE_PART * figures["alone_part"].seconds / figures["shared_s"]
    return out


def _copy_seconds(engine: CardEngine) -> float:
    """Time of one copy of a stream on the card: a key's and a value's part of each layer, one after the other."""
    import torch

    piece = stream_bytes(engine) // (2 * engine.layers)
    there, here = (torch.zeros(2 * engine.layers, piece, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for row in range(len(here)):
            here[row].copy_(there[row])
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    del there, here
    torch.cuda.empty_cache()
    return statistics.median(times)
