# SPDX-License-Identifier: Apache-2.0
"""The cards that are ours, as the driver sees them: which they are, and what they do while something runs."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Seen = TypeVar("Seen")


@contextlib.contextmanager
def driver() -> Iterator[Any]:
    """The driver's own table of cards, opened."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def cards() -> list[int]:
    """The machine's numbers of the cards that are ours: CUDA_VISIBLE_DEVICES, or all of them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [int(number) for number in visible.split(",")]
    with driver() as nvml:
        return list(range(nvml.nvmlDeviceGetCount()))


def card_mb() -> int:
    """Memory in use on the first card, in MB, as the driver counts it: everything that any process holds there."""
    with driver() as nvml:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(cards()[0])).used / 1e6)


class Watch(Generic[Seen]):
    """Looks at cards from a thread of its own for as long as its block runs.

    Attributes:
        seen: What each look at each card gave, in order.
    """

    def __init__(self, watched: Sequence[int], look: Callable[[Any, Any], Seen], every_s: float) -> None:
        """Does nothing yet.

        Args:
            watched: The machine's numbers of the cards.
            look: Given the driver's table and a card's handle, reads what is to be kept.
            every_s: Seconds between looks; the first comes after as many.
        """
        self.seen: list[Seen] = []
        self._watched, self._look, self._every_s = watched, look, every_s
        self._over = threading.Event()

    def __enter__(self) -> Watch[Seen]:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with driver() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(card) for card in self._watched]
            while not self._over.wait(self._every_s):
                self.seen += [self._look(nvml, handle) for handle in handles]
