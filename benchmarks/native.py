# SPDX-License-Identifier: Apache-2.0
"""What the native library costs: its calls from Python, and its loop around a runtime's.

    poll_us      one poll that returns 64 events, in microseconds
    submit_us    one submit of 64 requests of 1,024 tokens each, from values to results, in microseconds
    cancel_us    one cancel of 64 requests, in microseconds
    empty_poll_us  one poll with timeout 0 when nothing waits, in microseconds
    stats_us     one reading of the counters, in microseconds
    overhead     time of a step through the library over that of the bare llama loop, minus 1
    simulated_tokens_per_core_s   tokens that the simulated engine makes in virtual time for each second of a core: its
                 batcher alone; library_tokens_per_core_s through the whole library

The engine is the simulated one, so that no model takes part. A poll is timed while more events wait than it takes, so
that it never waits. Submits and cancels are timed while the engine is in a long step: its thread sleeps then and does
not compete for the processor. Each run is the median of its calls; the figure is the median over the runs. The last
three come from programs of `native`, on the engine of `make engine` and on the simulated one.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.frame import ROOT, Report, take_no_options
from engines.simulated import write_simulated_engine
from services.worker.native import Engine, EventKind, Options, PollBuffers, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COUNT = 64
PROMPT_TOKENS = 1024
RUNS = 9
CALLS = 24
VOCABULARY = 32_000
LONGEST_PROGRAM_S = 600


def main() -> None:
    """Measures and prints."""
    take_no_options(__doc__)
    report = Report("native")
    report.fact("events_a_poll", COUNT)
    report.fact("requests_a_submit", COUNT)
    report.fact("tokens_a_request", PROMPT_TOKENS)
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        report.figure("poll_us", poll_us(Path(folder) / "poll"), unit="us", goal="<= 2")
        submits, cancels = submit_and_cancel_us(Path(folder) / "submit")
        report.figure("submit_us", submits, unit="us", goal="<= 100")
        report.figure("cancel_us", cancels, unit="us")
        empty, stats = idle_us(Path(folder) / "idle")
        report.figure("empty_poll_us", empty, unit="us")
        report.figure("stats_us", stats, unit="us")
    loop = program("bench/bench_native", str(ROOT / "build" / "engines" / "smollm2-135m"))
    report.figure("overhead", loop["overhead_runs"], unit="", goal="<= 0.02")
    report.fact("bare_step_us", loop["bare_step_us"])
    report.fact("library_step_us", loop["library_step_us"])
    rate = program("tests/simulated_rate")
    report.figure("simulated_tokens_per_core_s", [rate["simulated_tokens_per_core_s"]], unit="tokens/s", goal=">= 2e6")
    report.figure("library_tokens_per_core_s", [rate["library_tokens_per_core_s"]], unit="tokens/s")
    report.print()


def program(name: str, *arguments: str) -> dict[str, Any]:
    """Runs a program of the native build and returns the JSON object of its last line."""
    command = [str(ROOT / "build" / "native" / name), *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONGEST_PROGRAM_S).stdout
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def poll_us(directory: Path) -> list[float]:
    """Times polls of 64 waiting events."""
    runs = []
    # The store of events grows with the slots: with so many it holds what all calls of a run take.
    with engine(directory, time_mode="virtual", slots=4 * COUNT) as loaded:
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


def idle_us(directory: Path) -> tuple[list[float], list[float]]:
    """Times polls that find nothing, and readings of the counters."""
    with engine(directory, time_mode="virtual", slots=1) as loaded:
        buffers = PollBuffers(events=COUNT, tokens=4096, payload_bytes=0, text_bytes=4096)
        return timed_us(lambda: loaded.poll(buffers, 0)), timed_us(loaded.stats)


def timed_us(call: Callable[[], object]) -> list[float]:
    """The median time of a call, in each of the runs."""
    runs = []
    for _ in range(RUNS):
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            call()
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
