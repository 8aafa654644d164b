# SPDX-License-Identifier: Apache-2.0
"""Memory and descriptors of processes that live through a soak, and what they grew by after its warm-up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

GROWTH_MB = 20.0
"""What a process may have grown by, over its size after the warm-up: pools of the allocator, not of ours."""
REQUEST_BYTES, NOISE_MB = 80.0, 8.0
"""What it may have grown by for each request since then, which a short run shows, too, and the growth of any process
that is no sign yet. A broker was seen to grow by 4.4 MB over ten million requests."""
DESCRIPTORS = 24
"""What its count of descriptors may differ by: connections that are being made or closed."""


@dataclass(frozen=True, slots=True)
class Size:
    """One process at one moment."""

    at_s: float
    megabytes: float
    """Resident memory."""
    descriptors: int


class Sizes:
    """What was measured of some processes.

    Args:
        pids: Processes by the names that figures call them by.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._taken: dict[str, list[Size]] = {name: [] for name in pids}
        self._warm = 0

    def take(self) -> None:
        """Measures each process once.

        Raises:
            psutil.NoSuchProcess: One has ended.
        """
        now = time.monotonic()
        for name, process in self._processes.items():
            self._taken[name].append(Size(now, process.memory_info().rss / 1e6, process.num_fds()))

    def warmed_up(self) -> None:
        """Measures, and says that growth counts from here."""
        self.take()
        self._warm = len(next(iter(self._taken.values())))

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self._warm > 0

    def figures(self) -> dict[str, dict[str, Any]]:
        """By process: growth since the warm-up, of that the second half of the time, and the most it ever had.

        A leak grows as much in the second half as in the first; pools that fill do not. Empty before the warm-up.
        """
        return {name: self._of(taken[self._warm - 1 :], taken) for name, taken in self._taken.items() if self._warm}

    @staticmethod
    def _of(since: list[Size], all_: list[Size]) -> dict[str, Any]:
        warm, end = since[0], since[-1]
        middle_s = (warm.at_s + end.at_s) / 2
        middle = next(size for size in since if size.at_s >= middle_s)
        return {
            "mb": round(end.megabytes, 1),
            "growth_mb": round(end.megabytes - warm.megabytes, 1),
            "late_growth_mb": round(end.megabytes - middle.megabytes, 1),
            "most_mb": round(max(size.megabytes for size in all_), 1),
            "descriptors_more": end.descriptors - warm.descriptors,
            "most_descriptors": max(size.descriptors for size in all_),
        }


def grown(processes: Mapping[str, Mapping[str, Any]], requests: int) -> list[str]:
    """What figures of `Sizes` must not say, in sentences.

    Args:
        processes: The figures.
        requests: Answered since the warm-up.
    """
    most = min(GROWTH_MB, max(NOISE_MB, REQUEST_BYTES * requests / 1e6))
    found = []
    for name, figures in processes.items():
        growth, more = figures["growth_mb"], figures["descriptors_more"]
        if growth > most:
            found.append(
                f"the {name} grew by {growth} MB over the {requests:,} requests since the warm-up; at most {most:.1f}"
            )
        if more > DESCRIPTORS:
            found.append(f"the {name} has {more} descriptors more than after the warm-up; at most {DESCRIPTORS}")
    return found
