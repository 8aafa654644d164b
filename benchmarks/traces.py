# SPDX-License-Identifier: Apache-2.0
"""What shared prompts are worth, and what of it each way of dispatching them gets: `make bench-traces TRACES=DIR`.

Bulk jobs over 1, 4 and 16 cards in virtual time: two published traces (from `TRACES`; left out where it is not set),
generated prompts in groups with a shared head, few large groups, and one job with nothing shared. `fabric` is the
broker's own decision core; the others are the ideas of the routers that people use, see `benchmarks/virtual`. Each card
has a pool of 1,000 blocks of 512 tokens and at most 256 requests in flight; when its pool is full it evicts what was
used longest ago.

    computed_over_bound   prompt tokens computed, cuts included, over the least possible
    makespan_over_bound   time over a lower bound from the cards' own speeds

`fabric_unled` is `fabric` with siblings sent at once and left to the engine's own scheduler, which holds a follower
back while its head is being computed; on cards of `fabric_plain` and `fabric_unled_plain` it does not. Together they
say what leader-first is worth.

Two plots go into `docs/plots`: computed tokens against the size of the pools, and what four workers do over time; on
the synthetic trace where it is there, else on the generated prompts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame import ROOT, Report, take_no_options
from benchmarks.virtual import bounds, fleet, plots
from benchmarks.virtual.engine import Card
from benchmarks.virtual.policies import POLICIES, Fabric
from benchmarks.virtual.workloads import Workload, mooncake, shared_heads
from services.broker.core.settings import CoreSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.virtual.fleet import Policy

    Maker = Callable[[Workload, Sequence[Card]], Policy]

WORKERS = (1, 4, 16)
PLOTS = ROOT / "docs" / "plots"
POOLS = (500, 1000, 2000, 4000, 8000)
PLOTTED = ("fabric", "cache_aware_fifo", "session_affinity", "arrival_lru")
_UNLED = CoreSettings(lead_limit_s=0.0)


def workloads(folder: Path | None) -> list[Workload]:
    """The jobs, in the order of the table."""
    found = [] if folder is None else [mooncake(path) for path in sorted(folder.glob("*_trace.jsonl"))]
    return [
        *found,
        shared_heads(
            "shared_prefix", groups=1024, prompts=16, head=2048, tail=128, output=256, block_tokens=512, seed=1
        ),
        shared_heads("batchllm", groups=48, prompts=256, head=4096, tail=512, output=128, block_tokens=512, seed=2),
        shared_heads("nothing_shared", groups=1, prompts=8192, head=0, tail=1024, output=128, block_tokens=512, seed=3),
    ]


def makers(workers: int) -> dict[str, tuple[Maker, bool]]:
    """Policies by name, and whether their cards hold followers back."""
    made: dict[str, tuple[Maker, bool]] = {name: (maker, True) for name, maker in POLICIES.items()}
    if workers == 4:

        def unled(workload: Workload, cards: Sequence[Card]) -> Policy:
            return Fabric(workload, cards, _UNLED)

        made |= {"fabric_unled": (unled, True), "fabric_plain": (Fabric, False), "fabric_unled_plain": (unled, False)}
    return made


def row(workload: Workload, workers: int, name: str, maker: Maker, holds: bool) -> dict[str, Any]:
    """Runs one cell of the table."""
    cards = [replace(Card(), holds_followers=holds)] * workers
    began = time.perf_counter()
    outcome = fleet.run(maker(workload, cards), cards)
    assert outcome.ended == len(workload.rows), "a request was lost"
    return {
        "trace": workload.name,
        "workers": workers,
        "policy": name,
        "computed_over_bound": round(outcome.computed_tokens / workload.bound_tokens(), 5),
        "makespan_over_bound": round(outcome.makespan_us / bounds.makespan_us(workload, cards), 4),
        "makespan_s": round(outcome.makespan_us / 1e6, 2),
        "idle_fraction": round(1 - statistics.fmean(outcome.busy_us) / outcome.makespan_us, 4),
        "run_s": round(time.perf_counter() - began, 2),
    }


def draw(workload: Workload) -> list[str]:
    """Draws the two plots of one job; returns where they lie."""
    PLOTS.mkdir(exist_ok=True)
    bound = workload.bound_tokens()
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in PLOTTED}
    for pool in POOLS:
        smaller = [replace(Card(), pool_blocks=pool)] * 4
        for name, points in series.items():
            outcome = fleet.run(POLICIES[name](workload, smaller), smaller)
            assert outcome.ended == len(workload.rows), "a request does not fit into the pool"
            points.append((pool, outcome.computed_tokens / bound))
    most = max(value for points in series.values() for _, value in points)
    marks = [1 + step * 0.5 for step in range(int((most - 1) / 0.5) + 2)]
    by_pool = plots.lines(
        f"Prompt tokens computed, four workers, trace '{workload.name}'",
        series,
        plots.Axis(POOLS[0], POOLS[-1], POOLS, "blocks of 512 tokens in each worker's pool", logarithmic=True),
        plots.Axis(marks[0], marks[-1], marks, "computed over the least possible"),
    )
    cards = [Card()] * 4
    runs: dict[str, list[fleet.Stretch]] = {}
    for name in ("fabric", "arrival_lru"):
        stretches: list[fleet.Stretch] = []
        fleet.run(POLICIES[name](workload, cards), cards, stretches=stretches)
        runs[name] = stretches
    over_time = plots.timeline(f"Four workers over time, trace '{workload.name}'", runs, len(cards))
    written = []
    for name, text in (("computed-by-pool.svg", by_pool), ("workers-over-time.svg", over_time)):
        (PLOTS / name).write_text(text)
        written.append(str((PLOTS / name).relative_to(ROOT)))
    return written


def main() -> None:
    """Runs all cells; prints a line for each, and the report."""
    take_no_options(__doc__)
    folder = Path(os.environ["TRACES"]) if os.environ.get("TRACES") else None
    if folder is not None and not list(folder.glob("*_trace.jsonl")):
        sys.exit(f"TRACES={folder} has no *_trace.jsonl: name the folder of the published traces, or leave it out")
    report = Report("traces")
    rows: list[dict[str, Any]] = []
    print(f"{'trace':<16}{'workers':>8}  {'policy':<20}{'computed/bound':>15}{'makespan/bound':>15}{'idle':>8}")
    made_of = workloads(folder)
    for workload in made_of:
        saving = 1 - workload.bound_tokens() / workload.logical_tokens()
        print(f"{workload.name}: {len(workload.rows):,} requests, {saving:.1%} of the prompt tokens are shared")
        for workers in WORKERS:
            for name, (maker, holds) in makers(workers).items():
                made = row(workload, workers, name, maker, holds)
                rows.append(made)
                print(
                    f"{workload.name:<16}{workers:>8}  {name:<20}{made['computed_over_bound']:>15.4f}"
                    f"{made['makespan_over_bound']:>15.3f}{made['idle_fraction']:>8.1%}",
                    flush=True,
                )
    ours = [made for made in rows if made["policy"] == "fabric"]
    for workers, goal in zip(WORKERS, ("<= 1.005", "<= 1.005", "<= 1.015"), strict=True):
        mine = [made for made in ours if made["workers"] == workers]
        report.figure(
            f"computed_over_bound_{workers}", [made["computed_over_bound"] for made in mine], unit="", goal=goal
        )
        report.figure(
            f"makespan_over_bound_{workers}", [made["makespan_over_bound"] for made in mine], unit="", goal="<= 1.1"
        )
    report.fact("rows", rows)
    plotted = next((made for made in made_of if made.name == "synthetic"), made_of[0])
    report.fact("plots", draw(plotted))
    report.print()


if __name__ == "__main__":
    main()
