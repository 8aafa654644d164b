# SPDX-License-Identifier: Apache-2.0
"""Memory of what waits: `make bench-memory`.

200,000 prompts of 4,000 tokens that share nothing wait in the core at once, ids drawn from a vocabulary of 65,536 and
one of 131,072; a third part has 300 shared heads of 3,000 tokens, which lie in memory once. Then as many again pass
through, one going in for each that ends, and in the first part ten times as many.

    waiting_mib_*      resident memory that they add, in MiB (goal: at most 2,048)
    growth_mib_*       what passing more through adds to that, and of it:
    in_use_mib_*       what the C library's allocator has given out and not got back
    objects_*          memory blocks of Python's objects, a number; near 0 where nothing is kept
    bytes_per_request  memory of one request beside its ids

The parts are `64k`, `128k` and `heads`; named on the command line, only these run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import psutil

from benchmarks.core_load import Load, engine_facts
from benchmarks.frame import Report
from services.broker.core.workers import Amount, Worker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

REQUESTS, TOKENS = 200_000, 4_000
HEADS, HEAD_TOKENS = 300, 3_000
MIB = 1024 * 1024


class _AllocatorInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class Memory(NamedTuple):
    """What a process has, in bytes, and how many blocks Python's objects take."""

    resident: int
    in_use: int
    objects: int

    def since(self, before: Memory) -> Memory:
        """What has come to it."""
        return Memory(*(now - then for now, then in zip(self, before, strict=True)))


def memory() -> Memory:
    """What this process has now."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _AllocatorInfo
    found = mallinfo()
    resident = int(psutil.Process().memory_info().rss)
    return Memory(resident, int(found.uordblks + found.hblkhd), sys.getallocatedblocks())


def measure(answer: Connection, vocabulary: int, heads: int, passes: int, requests: int) -> None:
    """Runs in a process of its own; sends what waits, what came to it with the passes, and the core's estimate."""
    load = Load(
        vocabulary=vocabulary,
        block_tokens=64,
        heads=heads,
        head_tokens=HEAD_TOKENS if heads else 0,
        prompt_tokens=TOKENS,
        max_tokens=128,
    )
    before = memory()
    while len(load.decision.requests) < requests:
        load.submit(64)
    full, estimated = memory(), load.decision.requests.held_bytes()
    worker = Worker("w", engine_facts(vocabulary, 64), pool_tokens=1 << 24, credit=Amount(1 << 40, 64, 0), now=0.0)
    load.decision.worker_up(worker)
    for _ in range(passes * requests // 64):
        load.finish(64)
        load.submit(64)
    answer.send((full.since(before), memory().since(full), estimated))


def run(vocabulary: int, heads: int, passes: int, requests: int) -> tuple[Memory, Memory, int]:
    """Measures one part; returns what waits, what came to it with the passes, and the core's estimate."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=measure, args=(there, vocabulary, heads, passes, requests)
    )
    began = time.perf_counter()
    process.start()
    there.close()
    waiting, growth, estimated = here.recv()
    process.join()
    took = time.perf_counter() - began
    print(f"vocabulary {vocabulary:,}, {heads} heads: {waiting.resident / MIB:,.0f} MiB waiting, {took:.0f} s")
    return waiting, growth, estimated


def main() -> None:
    """Measures all parts, or those that are named."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory")
    parser.add_argument("parts", nargs="*", help="what to measure; everything where absent")
    parser.add_argument("--passes", type=int, default=10, help="times as many that pass through in the first part")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="prompts that wait at once")
    options = parser.parse_args()
    wanted = options.parts
    report = Report("memory")
    report.fact("requests", options.requests)
    report.fact("tokens", TOKENS)
    report.fact("passes", options.passes)
    parts = (("64k", 1 << 16, 0, options.passes), ("128k", 1 << 17, 0, 1), ("heads", 1 << 16, HEADS, 1))
    for name, vocabulary, heads, passes in parts:
        if wanted and name not in wanted:
            continue
        waiting, growth, estimated = run(vocabulary, heads, passes, options.requests)
        report.figure(f"waiting_mib_{name}", [waiting.resident / MIB], unit="MiB", goal="<= 2048")
        report.figure(f"growth_mib_{name}", [growth.resident / MIB], unit="MiB", goal="about 0")
        report.figure(f"in_use_mib_{name}", [growth.in_use / MIB], unit="MiB")
        report.figure(f"objects_{name}", [growth.objects], unit="")
        report.figure(f"estimated_mib_{name}", [estimated / MIB], unit="MiB")
        if not heads and vocabulary == 1 << 16:
            ids = options.requests * TOKENS * 2
            report.figure("bytes_per_request", [(waiting.resident - ids) / options.requests], unit="B")
    report.print()


if __name__ == "__main__":
    main()
