# SPDX-License-Identifier: Apache-2.0
"""What many sequences at once give over one: generated tokens a second of the CPU engine, through the C interface.

One loaded engine takes one prompt, then sixteen, in turns. The clock runs from the last prompt computed to the last
token, so that only steps that generate are measured.

    python -m benchmarks.batch --runs 5 --tokens 64
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.frame import ROOT, Report
from services.worker.native import Engine, EventKind, Options, PollBuffers, Request

ENGINE = ROOT / "build" / "engines" / "smollm2-135m"
PROMPT_TOKENS = 64
RUN_LIMIT_S = 300.0


def generate(engine: Engine, buffers: PollBuffers, first_id: int, sequences: int, tokens: int) -> float:
    """Generates for several prompts at once; returns tokens a second."""
    rng = np.random.default_rng(first_id)
    prompts = rng.integers(100, 40_000, (sequences, PROMPT_TOKENS), dtype=np.int32)
    options = Options(max_tokens=tokens, ignore_end=True)
    refused = engine.submit([Request(first_id + i, ids.tobytes(), options) for i, ids in enumerate(prompts)])
    assert refused == [None] * sequences, refused
    contexts = ends = counted = 0
    begin = limit = time.perf_counter()
    while ends < sequences:
        events = engine.poll(buffers, 1000)
        assert not (events["kind"] == EventKind.FAILED).any()
        contexts += int((events["kind"] == EventKind.CONTEXT_DONE).sum())
        ends += int((events["kind"] == EventKind.FINISHED).sum())
        if contexts < sequences:
            begin = time.perf_counter()
        else:
            counted += int(events["token_count"][events["kind"] == EventKind.TOKENS].sum())
        assert time.perf_counter() - limit < RUN_LIMIT_S
    return counted / (time.perf_counter() - begin)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Generated tokens a second of sixteen sequences and of one.")
    parser.add_argument("--engine", type=Path, default=ENGINE)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    one: list[float] = []
    many: list[float] = []
    with Engine.create(arguments.engine) as engine:
        minimum = engine.describe().poll
        buffers = PollBuffers(
            events=max(minimum.events, 256),
            tokens=max(minimum.tokens, 4096),
            payload_bytes=minimum.payload_bytes,
            text_bytes=minimum.text_bytes,
        )
        generate(engine, buffers, 1, arguments.sequences, 4)
        for run in range(1, arguments.runs + 1):
            one.append(generate(engine, buffers, 1000 * run, 1, arguments.tokens))
            many.append(generate(engine, buffers, 1000 * run + 500, arguments.sequences, arguments.tokens))
    report = Report("batch")
    report.figure("one_tokens_per_s", one, unit="tokens/s")
    report.figure("many_tokens_per_s", many, unit="tokens/s")
    report.ratio("many_over_one", of="many_tokens_per_s", over="one_tokens_per_s", goal=">= 3.5")
    report.fact("sequences", arguments.sequences)
    report.print()


if __name__ == "__main__":
    main()
