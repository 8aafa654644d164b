# SPDX-License-Identifier: Apache-2.0
"""One layer at a time, from a stock set-up to the whole, over the same simulated cards: `make bench-layers`.

One bulk job whose prompts share heads, in virtual time, on cards whose own scheduler does not hold followers back (see
`make bench-traces` for one that does):

    stock          arrival order; a step takes 1,024 tokens; requests enter as soon as their prompt fits, and are thrown
                   out when the pool is full
    budget         the step's token budget that the card is best with, 8,192
    grouping       the broker's order, siblings sent at once
    leader_first   one request of a new head goes ahead of its siblings
    admission      requests enter when all that they will need is free, and the broker plans the pool
    second_worker  a second card

`gain` is the rate over that of the row before; `loss_without` what the whole set-up (on one card) loses when only this
layer is taken out of it. `idle_fraction` is time in no step; `wasted_fraction` what a card spends beyond the least that
the job could take: prompts computed again, steps that are not full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.frame import Report, take_no_options
from benchmarks.virtual import bounds, fleet
from benchmarks.virtual.engine import Card
from benchmarks.virtual.policies import ArrivalOrder, Fabric
from benchmarks.virtual.workloads import Workload, shared_heads
from services.broker.core.settings import CoreSettings

if TYPE_CHECKING:
    from benchmarks.virtual.fleet import Outcome

STOCK_BUDGET = 1024


@dataclass(frozen=True, slots=True)
class Layers:
    """Which layers are there."""

    budget: bool = False
    grouping: bool = False
    leader_first: bool = False
    admission: bool = False
    second_worker: bool = False


STAGES = ("budget", "grouping", "leader_first", "admission", "second_worker")
WHOLE = Layers(budget=True, grouping=True, leader_first=True, admission=True)


def workload() -> Workload:
    """2,048 requests: 128 heads of 2,048 tokens, 640 of their own each, and 1,536 generated."""
    return shared_heads("layers", groups=128, prompts=16, head=2048, tail=640, output=1536, block_tokens=512, seed=1)


def run(job: Workload, layers: Layers) -> Outcome:
    """Runs the job with these layers."""
    card = replace(Card(), holds_followers=False, admits=layers.admission)
    if not layers.budget:
        card = replace(card, step_token_budget=STOCK_BUDGET)
    cards = [card] * (2 if layers.second_worker else 1)
    if not layers.grouping:
        return fleet.run(ArrivalOrder(job, cards), cards)
    settings = CoreSettings() if layers.leader_first else CoreSettings(lead_limit_s=0.0)
    return fleet.run(Fabric(job, cards, settings, plans_pool=layers.admission), cards)


def row(job: Workload, name: str, layers: Layers) -> dict[str, Any]:
    """Measures one stage."""
    outcome = run(job, layers)
    assert outcome.ended == len(job.rows), "a request was lost"
    seconds = outcome.makespan_us / 1e6
    least = bounds.makespan_us(job, [Card()])
    cards = len(outcome.busy_us)
    return {
        "layer": name,
        "workers": cards,
        "tokens_per_s": round(sum(row.output_tokens for row in job.rows) / seconds, 1),
        "makespan_s": round(seconds, 2),
        "computed_over_bound": round(outcome.computed_tokens / job.bound_tokens(), 4),
        "idle_fraction": round(1 - sum(outcome.busy_us) / cards / outcome.makespan_us, 4),
        "wasted_fraction": round(1 - least / sum(outcome.busy_us), 4),
        "thrown_out": outcome.thrown_out,
        "steps": outcome.steps,
    }


def main() -> None:
    """Runs all stages, then the whole without each layer."""
    take_no_options(__doc__)
    job = workload()
    report = Report("layers")
    layers = Layers()
    rows = [row(job, "stock", layers)]
    for stage in STAGES:
        layers = replace(layers, **{stage: True})
        made = row(job, stage, layers)
        made["gain"] = round(made["tokens_per_s"] / rows[-1]["tokens_per_s"], 4)
        rows.append(made)
    whole = row(job, "whole", WHOLE)
    for made in rows[1:-1]:
        without = row(job, "", replace(WHOLE, **{made["layer"]: False}))
        made["loss_without"] = round(1 - without["tokens_per_s"] / whole["tokens_per_s"], 4)
    print(f"{'layer':<16}{'tokens/s':>10}{'gain':>8}{'without':>9}{'computed':>10}{'idle':>8}{'wasted':>8}{'out':>7}")
    for made in rows:
        loss = f"{-made['loss_without']:>9.1%}" if "loss_without" in made else f"{'':>9}"
        print(
            f"{made['layer']:<16}{made['tokens_per_s']:>10,.0f}{made.get('gain', 1.0):>8.2f}{loss}"
            f"{made['computed_over_bound']:>10.3f}{made['idle_fraction']:>8.1%}{made['wasted_fraction']:>8.1%}"
            f"{made['thrown_out']:>7,}"
        )
    first, last = rows[0]["tokens_per_s"], rows[-1]["tokens_per_s"]
    report.figure("whole_over_stock", [last / first], unit="")
    report.fact("rows", rows)
    report.print()


if __name__ == "__main__":
    main()
