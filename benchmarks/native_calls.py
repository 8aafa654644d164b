# SPDX-License-Identifier: Apache-2.0
"""What a call into the native library costs from Python: `poll_us` and `submit_us`.

    poll_us      one poll that returns 64 events, in microseconds
    submit_us    one submit of 64 requests of 1,024 tokens each, from values to results, in microseconds
    cancel_us    one cancel of 64 requests, in microseconds
    stats_us     one reading of the counters, in microseconds

The engine is the simulated one, so that no model takes part. A poll is timed while more events wait than it takes, so
that it never waits. Submits and cancels are timed while the engine is in a long step: its thread sleeps then and does
not compete for the processor. Each run is the median of its calls; the figure is the median over the runs.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.frame import Report
from engines.simulated import write_simulated_engine
from services.worker.native import Engine, EventKind, Options, PollBuffers, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COUNT = 64
PROMPT_TOKENS = 1024
RUNS = 9
CALLS = 24
VOCABULARY = 32_000


def main() -> None:
    """Measures and prints."""
    report = Report("native_calls")
    report.fact("events_a_poll", COUNT)
    report.fact("requests_a_submit", COUNT)
    report.fact("tokens_a_request", PROMPT_TOKENS)
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        report.figure("poll_us", poll_us(Path(folder) / "poll"), unit="us", goal="<= 2")
        submits, cancels = submit_and_cancel_us(Path(folder) / "submit")
        report.figure("submit_us", submits, unit="us", goal="<= 100")
        report.figure("cancel_us", cancels, unit="us")
        report.figure("stats_us", stats_us(Path(folder) / "stats"), unit="us")
    report.print()


def poll_us(directory: Path) -> list[float]:
    """Times polls of 64 waiting events."""
    runs = []
    with engine(directory, time_mode="virtual", slots=COUNT) as loaded:
        small = PollBuffers(events=COUNT, tokens=max(PROMPT_TOKENS, 4096), payload_bytes=0, text_bytes=4096)
        for run in range(RUNS):
            requests = [Request(run * COUNT + i, prompt(i)[:64], Options(max_tokens=1000)) for i in range(COUNT)]
            accept(loaded.submit(requests))
            wait_until(lambda: loaded.stats().events_pending > (CALLS + 1) * COUNT)
            loaded.poll(small, 0)
            times = []
            for _ in range(CALLS):
                began = time.perf_counter()
                rows = loaded.poll(small, 0)
                times.append(time.perf_counter() - began)
                assert len(rows) == COUNT
            runs.append(statistics.median(times) * 1e6)
            finish(loaded, requests)
    return runs


def submit_and_cancel_us(directory: Path) -> tuple[list[float], list[float]]:
    """Times submits of 64 requests, one after the other while the engine is in a long step, and their cancellation."""
    submits, cancels = [], []
    prompts = [prompt(i) for i in range(COUNT)]
    options = Options(max_tokens=4)
    with engine(directory, time_mode="real", step_us=300_000, slots=1) as loaded:
        for run in range(RUNS):
            names = range(run * CALLS * COUNT, (run + 1) * CALLS * COUNT, COUNT)
            batches = [[Request(name + i, prompts[i], options) for i in range(COUNT)] for name in names]
            submitting, cancelling = [], []
            for batch in batches:
                began = time.perf_counter()
                outcomes = loaded.submit(batch)
                submitting.append(time.perf_counter() - began)
                accept(outcomes)
            for batch in batches:
                ids = [request.id for request in batch]
                began = time.perf_counter()
                loaded.cancel(ids)
                cancelling.append(time.perf_counter() - began)
            submits.append(statistics.median(submitting) * 1e6)
            cancels.append(statistics.median(cancelling) * 1e6)
            finish(loaded, [request for batch in batches for request in batch])
    return submits, cancels


def stats_us(directory: Path) -> list[float]:
    """Times readings of the counters."""
    runs = []
    with engine(directory, time_mode="virtual", slots=1) as loaded:
        for _ in range(RUNS):
            times = []
            for _ in range(CALLS):
                began = time.perf_counter()
                loaded.stats()
                times.append(time.perf_counter() - began)
            runs.append(statistics.median(times) * 1e6)
    return runs


def engine(directory: Path, *, time_mode: str, slots: int, step_us: int = 0) -> Engine:
    """Loads a simulated engine that takes prompts of 1,024 tokens."""
    write_simulated_engine(
        directory,
        vocab_size=VOCABULARY,
        max_input_tokens=PROMPT_TOKENS,
        max_sequence_tokens=2 * PROMPT_TOKENS,
        max_output_tokens=PROMPT_TOKENS,
        slots=slots,
        step_token_budget=4096,
        kv_pool_blocks=16_384,
        time_mode=time_mode,
        step_us=step_us,
    )
    return Engine.create(directory)


def prompt(index: int) -> bytes:
    """A prompt of 1,024 tokens of its own."""
    return np.random.default_rng(index).integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32).tobytes()


def accept(outcomes: Sequence[Exception | None]) -> None:
    """Sees to it that what was timed is what was meant."""
    assert outcomes == [None] * len(outcomes), outcomes


def finish(loaded: Engine, requests: list[Request]) -> None:
    """Ends requests and takes all their events."""
    loaded.cancel([request.id for request in requests])
    buffers = PollBuffers(events=4096, tokens=65_536, payload_bytes=0, text_bytes=65_536)
    ended = 0
    while ended < len(requests):
        kinds = loaded.poll(buffers, 1000)["kind"]
        ended += int(((kinds == EventKind.FINISHED) | (kinds == EventKind.FAILED)).sum())


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for the engine to be as far as the measurement needs it."""
    while not condition():
        time.sleep(0.001)


if __name__ == "__main__":
    main()
