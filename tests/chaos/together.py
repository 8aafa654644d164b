# SPDX-License-Identifier: Apache-2.0
"""The figures of a soak's suites, summed up and judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SUMMED = (
    "requests", "lost", "doubled", "wrong", "put_off", "left_by_clients", "unanswered",
    "checked_token_by_token", "worker_deaths",
)  # fmt: skip
COLUMNS = ("growth_mb", "late_growth_mb", "most_mb", "descriptors_more")


@dataclass
class Suite:
    """One of several suites."""

    number: int
    requests: int
    seed: int
    cores: tuple[int, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    """The last line that it wrote; empty before the first."""
    status: int | None = None
    """Of its process; None while it runs."""

    @property
    def faults(self) -> list[str]:
        """What went wrong, in sentences; of a suite that runs on, nothing yet but what can no longer be mended."""
        if not self.figures.get("ended"):
            hopeless = [f"{self.figures[what]} were {what}" for what in ("lost", "doubled") if self.figures.get(what)]
            return hopeless if self.status is None else [*hopeless, f"it did not come to its end: status {self.status}"]
        found = list(self.figures["faults"])
        if self.status and not found:
            found.append(f"its process ended with status {self.status}")
        return found


def together(suites: Sequence[Suite], took_s: float) -> dict[str, Any]:
    """The figures of all suites.

    Args:
        suites: What there is.
        took_s: Since the first was started.

    Returns:
        Sums of counts; for each process the worst of any suite; the figures of each suite; `faults`, in sentences.
    """
    spoke = [suite for suite in suites if suite.figures]
    sums: dict[str, Any] = {key: sum(suite.figures[key] for suite in spoke) for key in SUMMED}
    outcomes: Counter[str] = Counter()
    worst: dict[str, dict[str, float]] = {}
    for suite in spoke:
        outcomes.update(suite.figures["outcomes"])
        for name, process in suite.figures["processes"].items():
            had = worst.setdefault(name, {})
            for column in COLUMNS:
                had[column] = max(had.get(column, process[column]), process[column])
    return {
        "suites": len(suites),
        **sums,
        "outcomes": dict(outcomes),
        "seconds": round(took_s, 1),
        "requests_a_second": round(sum(outcomes.values()) / took_s),
        "worst_of_a_process": worst,
        "of_each": [
            {"suite": suite.number, "seed": suite.seed, "cores": list(suite.cores), **suite.figures} for suite in spoke
        ],
        "faults": [f"suite {suite.number}: {fault}" for suite in suites for fault in suite.faults],
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as lines for people: one a suite, one of all, and the worst of each kind of process."""
    head = ("suite", "requests", "a second", "lost", "doubled", "wrong", "deaths", "broker +MB", "worker +MB", "faults")
    rows = [head, *(_row(each) for each in figures["of_each"])]
    worst = figures["worst_of_a_process"]
    most = (str(worst.get(name, {}).get("growth_mb", "-")) for name in ("broker", "worker"))
    rows.append(("all", *_counts(figures), *most, str(len(figures["faults"]))))
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for name, process in worst.items():
        lines.append(f"{name}, the worst of any suite: " + ", ".join(f"{key} {process[key]:g}" for key in COLUMNS))
    return "\n".join(lines)


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    growth = (str(each["processes"].get(name, {}).get("growth_mb", "-")) for name in ("broker", "worker"))
    return str(each["suite"]), *_counts(each), *growth, str(len(each.get("faults", ())))


def _counts(figures: dict[str, Any]) -> tuple[str, ...]:
    keys = ("requests", "requests_a_second", "lost", "doubled", "wrong", "worker_deaths")
    return tuple(f"{figures[key]:,}" for key in keys)
