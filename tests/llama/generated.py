# SPDX-License-Identifier: Apache-2.0
"""What an engine generates under guides, as text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from services.worker.native import Engine, EventKind, Options, PollBuffers, Request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from services.common.errors import FabricError

_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Guided:
    """One guide and how it is sampled."""

    kind: int
    text: str
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a guided request ended."""

    text: str
    by_stop: bool
    refusal: FabricError | None = None
    failure: str = ""


class Generator:
    """Runs guided requests on an engine, many at once."""

    def __init__(self, directory: Path, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._engine = Engine.create(directory)
        least = self._engine.describe().poll
        self._buffers = PollBuffers(
            events=max(least.events, 256), tokens=max(least.tokens, 4096), payload_bytes=0, text_bytes=65536
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._engine.close()

    def run(self, guides: Sequence[Guided]) -> list[Ended]:
        """Returns how each ended, in order."""
        prompt = np.arange(20, 40, dtype="<i4").tobytes()
        requests = [
            Request(
                number,
                prompt,
                Options(
                    max_tokens=guide.max_tokens,
                    temperature=1.0,
                    seed=guide.seed,
                    guide_kind=guide.kind,
                    guide=guide.text.encode(),
                ),
            )
            for number, guide in enumerate(guides)
        ]
        refusals = self._engine.submit(requests)
        tokens: list[list[int]] = [[] for _ in guides]
        stopped = [False] * len(guides)
        failures = [""] * len(guides)
        left = refusals.count(None)
        deadline = time.monotonic() + _LIMIT_S
        while left:
            assert time.monotonic() < deadline, f"{left} requests have not ended"
            for event in self._engine.poll(self._buffers, 1000):
                number = int(event["request_id"])
                if event["kind"] == EventKind.TOKENS:
                    start = int(event["token_offset"])
                    tokens[number] += self._buffers.tokens[start : start + int(event["token_count"])].tolist()
                elif event["kind"] == EventKind.FINISHED:
                    stopped[number] = int(event["reason"]) == 1
                    left -= 1
                elif event["kind"] == EventKind.FAILED:
                    failures[number] = self._buffers.message(int(event["text_offset"]), int(event["text_size"]))
                    left -= 1
        return [
            Ended(b"".join(self._pieces[token] for token in ids).decode("utf-8", "replace"), stop, refusal, failure)
            for ids, stop, refusal, failure in zip(tokens, stopped, refusals, failures, strict=True)
        ]
