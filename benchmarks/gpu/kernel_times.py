# SPDX-License-Identifier: Apache-2.0
"""Times of our kernels on a card, beside the bytes that they must move. Needs PyTorch and a card."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CARD_TB_S: Final = 4.8
"""Bandwidth of an H200's memory, as it is sold."""
SETS: Final = 4
"""Sets of buffers that launches take in turn, so that little stays cached."""
_ROUNDS: Final = 8


def bytes_of(*tensors: Any) -> int:
    """Bytes of tensors, None for none."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def show(label: str, launches: Sequence[Callable[[], None]], moved: int, repeats: int) -> None:
    """Prints the time of one launch, the median of `repeats` and the extremes.

    Launches are recorded as one graph of the card, so that what the processor takes to launch is not counted.

    Args:
        label: What is printed before.
        launches: One a set of buffers.
        moved: Bytes that a launch must move.
        repeats: How often the graph runs.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _, launch in itertools.product(range(_ROUNDS), launches):
            launch()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    count = _ROUNDS * len(launches)
    times = [begin.elapsed_time(end) / count * 1e3 for begin, end in itertools.pairwise(marks)]
    median = statistics.median(times)
    rate = moved / median / 1e6
    print(
        f"{label} {median:8.1f} us [{min(times):.1f}-{max(times):.1f}] {moved / 1e6:6.1f} MB {rate:5.2f} TB/s, "
        f"{rate / CARD_TB_S:4.0%} of {CARD_TB_S}",
        flush=True,
    )
