# SPDX-License-Identifier: Apache-2.0
"""Memory of what waits: `make bench-memory`.

200,000 prompts of 4,000 tokens that share nothing wait in the core at once, ids drawn from a vocabulary of 65,536 and
one of 131,072; a third part has 300 shared heads of 3,000 tokens, which lie in memory once. Then as many again pass
through, one going in for each that ends, and in the first part ten times as many.

    waiting_mib_*      resident memory that they add, in MiB (goal: at most 2,048)
    growth_mib_*       what passing more through adds to that
    bytes_per_request  memory of one request beside its ids

The parts are `64k`, `128k` and `heads`; named on the command line, only these run.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from typing import TYPE_CHECKING

import psutil

from benchmarks.core_load import Load, engine_facts
from benchmarks.frame import Report
from services.broker.core.workers import Amount, Worker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

REQUESTS, TOKENS = 200_000, 4_000
HEADS, HEAD_TOKENS = 300, 3_000
MIB = 1024 * 1024


def resident() -> int:
    """Resident memory of this process, in bytes."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def measure(answer: Connection, vocabulary: int, heads: int, passes: int) -> None:
    """Runs in a process of its own; sends (bytes waiting, bytes after the passes, estimated bytes)."""
    load = Load(
        vocabulary=vocabulary,
        block_tokens=64,
        heads=heads,
        head_tokens=HEAD_TOKENS if heads else 0,
        prompt_tokens=TOKENS,
        max_tokens=128,
    )
    before = resident()
    while len(load.decision.requests) < REQUESTS:
        load.submit(64)
    waiting, estimated = resident() - before, load.decision.requests.held_bytes()
    worker = Worker("w", engine_facts(vocabulary, 64), pool_tokens=1 << 24, credit=Amount(1 << 40, 64, 0), now=0.0)
    load.decision.worker_up(worker)
    for _ in range(passes * REQUESTS // 64):
        load.finish(64)
        load.submit(64)
    answer.send((waiting, resident() - before, estimated))


def run(vocabulary: int, heads: int, passes: int) -> tuple[float, float, float]:
    """Measures one part; returns waiting, growth and estimate in MiB."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(there, vocabulary, heads, passes))
    began = time.perf_counter()
    process.start()
    there.close()
    waiting, after, estimated = here.recv()
    process.join()
    took = time.perf_counter() - began
    print(f"vocabulary {vocabulary:,}, {heads} heads: {waiting / MIB:,.0f} MiB waiting, {took:.0f} s")
    return waiting / MIB, (after - waiting) / MIB, estimated / MIB


def main() -> None:
    """Measures all parts, or those that are named."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory")
    parser.add_argument("parts", nargs="*", help="what to measure; everything where absent")
    parser.add_argument("--passes", type=int, default=10, help="times as many that pass through in the first part")
    options = parser.parse_args()
    wanted = options.parts
    report = Report("memory")
    report.fact("requests", REQUESTS)
    report.fact("tokens", TOKENS)
    report.fact("passes", options.passes)
    parts = (("64k", 1 << 16, 0, options.passes), ("128k", 1 << 17, 0, 1), ("heads", 1 << 16, HEADS, 1))
    for name, vocabulary, heads, passes in parts:
        if wanted and name not in wanted:
            continue
        waiting, growth, estimated = run(vocabulary, heads, passes)
        report.figure(f"waiting_mib_{name}", [waiting], unit="MiB", goal="<= 2048")
        report.figure(f"growth_mib_{name}", [growth], unit="MiB", goal="about 0")
        report.figure(f"estimated_mib_{name}", [estimated], unit="MiB")
        if not heads and vocabulary == 1 << 16:
            ids_mib = REQUESTS * TOKENS * 2 / MIB
            report.figure("bytes_per_request", [(waiting - ids_mib) * MIB / REQUESTS], unit="B")
    report.print()


if __name__ == "__main__":
    main()
