# SPDX-License-Identifier: Apache-2.0
"""Rates of engines under the library itself, by the engine's own clock: simulated steps only say their time."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from engines.sweep.variants import write_variant
from services.worker.native import Engine as NativeEngine
from services.worker.native import EventKind, Options, PollBuffers, Request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engines.sweep.settings import Engine, Setting

_POLLS_MAX = 20_000


def rate(directory: Path, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Generated tokens a second that the engine was busy."""
    with NativeEngine.create(directory) as engine:
        least = engine.describe().poll
        buffers = PollBuffers(
            events=max(least.events, 256),
            tokens=max(least.tokens, 4096),
            payload_bytes=least.payload_bytes,
            text_bytes=least.text_bytes,
        )
        options = Options(max_tokens=tokens, ignore_end=True)
        requests = [
            Request(number, np.array(ids, dtype="<i4").tobytes(), options, ())
            for number, ids in enumerate(prompts, start=1)
        ]
        refused = [error for error in engine.submit(requests) if error is not None]
        assert not refused, refused[0]
        left = len(requests)
        for _ in range(_POLLS_MAX):
            events = engine.poll(buffers, 1000)
            assert not (events["kind"] == EventKind.FAILED).any()
            left -= int((events["kind"] == EventKind.FINISHED).sum())
            if left == 0:
                break
        assert left == 0
        stats = engine.stats()
    return float(stats.generated_tokens / (stats.busy_us / 1e6))


class NativeRuns:
    """Measures settings of an engine, and counts them."""

    def __init__(self, engine: Engine, folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._engine = engine
        self._folder = folder
        self._prompts = prompts
        self._tokens = tokens
        self._numbers = itertools.count()
        self.measured: list[Setting] = []

    async def __call__(self, setting: Setting) -> Sequence[float]:
        directory = write_variant(self._engine, self._folder / str(next(self._numbers)), setting)
        self.measured.append(setting)
        return [rate(directory, self._prompts, self._tokens)]
