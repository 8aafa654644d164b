# SPDX-License-Identifier: Apache-2.0
"""What the suite leaves of the engine's speed: client, broker and worker against a bare loop over the same library.

The work is the bundled job's prompts as token ids, every one of them generating the same number of tokens. The bare
loop submits all of it through the C interface in one call, in token order with the shared heads named, and polls until
the last end; the suite gets it from `run_job`, the client behind `ifab bulk run`, over gRPC. Engine, weights, threads
and slots are the same, each run begins with a fresh process, and the sides take turns, so that a slow moment of the
machine hits both. Client and services share the cores with the engine: that is the price that is measured.

Beside both runs upstream's library without ours: `native/bench/bench_llama_loop.cpp` steps llama.cpp directly, with the
same weights, layout, threads, slots and shared heads.

    python -m benchmarks.suite --runs 3 --rows 128 --tokens 32
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from benchmarks.frame import ROOT, Report
from services.cli.files.rows import read_rows
from services.cli.job import run_job
from services.cli.ready import serving_engines
from services.cli.suite import Plan, Suite
from services.common.rpc import channel
from services.worker.native import Engine, EventKind, Options, PollBuffers, Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

ENGINE = ROOT / "build" / "engines" / "smollm2-135m"
UPSTREAM_LOOP = ROOT / "build" / "native" / "bench" / "bench_llama_loop"
PROMPTS = ROOT / "examples" / "prompts.jsonl"
RUN_LIMIT_S = 600.0


class Measured(NamedTuple):
    """One run of the work."""

    tokens_per_s: float
    prompt_tokens_computed: int
    wall_s: float


def workload(engine: Path, rows: int) -> list[list[int]]:
    """Token ids of the first `rows` prompts of the bundled job, in token order."""
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:rows]
    return sorted(tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines)


def head_ends(prompts: list[list[int]], block: int) -> list[tuple[int, ...]]:
    """For each prompt in token order, the whole blocks that it shares with a neighbour, as the broker names them."""
    shared = [0, *(_shared(left, right) for left, right in pairwise(prompts)), 0]
    longest = [max(before, after) // block * block for before, after in pairwise(shared)]
    return [(end,) if end else () for end in longest]


def _shared(left: list[int], right: list[int]) -> int:
    """Length of the common start."""
    different = (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(different, min(len(left), len(right)))


def bare_loop(engine: Path, prompts: list[list[int]], tokens: int, answer: Connection) -> None:
    """Runs the work through the C interface in this process and sends what it took."""
    with Engine.create(engine) as loaded:
        minimum = loaded.describe().poll
        block = int(loaded.describe().limits["kv_block_tokens"])
        buffers = PollBuffers(
            events=max(minimum.events, 256),
            tokens=max(minimum.tokens, 4096),
            payload_bytes=minimum.payload_bytes,
            text_bytes=minimum.text_bytes,
        )
        options = Options(max_tokens=tokens, ignore_end=True)
        requests = [
            Request(number, np.array(ids, dtype="<i4").tobytes(), options, ends)
            for number, (ids, ends) in enumerate(zip(prompts, head_ends(prompts, block), strict=True), start=1)
        ]
        started = time.perf_counter()
        refused = [error for error in loaded.submit(requests) if error is not None]
        assert not refused, refused[0]
        left = len(requests)
        while left:
            events = loaded.poll(buffers, 1000)
            assert not (events["kind"] == EventKind.FAILED).any()
            left -= int((events["kind"] == EventKind.FINISHED).sum())
            assert time.perf_counter() - started < RUN_LIMIT_S
        wall_s = time.perf_counter() - started
        stats = loaded.stats()
    answer.send(Measured(len(prompts) * tokens / wall_s, stats.prompt_tokens_computed, wall_s))


def native(engine: Path, prompts: list[list[int]], tokens: int) -> Measured:
    """Runs the bare loop in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=bare_loop, args=(engine, prompts, tokens, send), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(RUN_LIMIT_S):
            raise RuntimeError(f"the bare loop took longer than {RUN_LIMIT_S:g} s")
        measured: Measured = receive.recv()
    finally:
        process.join(10)
        process.kill()
    return measured


def upstream(engine: Path, prompts: list[list[int]], tokens: int) -> Measured:
    """Runs the work through llama.cpp's library, stepped directly."""
    lines = "\n".join(" ".join(map(str, ids)) for ids in prompts)
    command = [str(UPSTREAM_LOOP), str(engine), str(tokens)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=True)
    said = json.loads(done.stdout)
    assert (said["requests"], said["generated_tokens"]) == (len(prompts), len(prompts) * tokens)
    return Measured(said["tokens_per_s"], said["prompt_tokens_computed"], said["wall_s"])


async def suite(engine: Path, prompts: list[list[int]], tokens: int) -> Measured:
    """Runs the work through client, broker and worker."""
    rows = [
        {"id": f"r{n}", "token_ids": ids, "max_tokens": tokens, "ignore_end": True} for n, ids in enumerate(prompts)
    ]
    np.random.default_rng(1).shuffle(rows)
    source = io.BytesIO("\n".join(json.dumps(row) for row in rows).encode())
    with tempfile.TemporaryDirectory() as logs:
        plan = Plan((engine,), Path(logs))
        async with Suite(plan) as running:
            await serving_engines(running, limit_s=plan.start_limit_s)
            async with channel(running.broker.address) as to_broker:
                outcome = await run_job(
                    to_broker, read_rows(source), lambda _: None, job_id="bench", window=4096, silence_s=RUN_LIMIT_S
                )
    assert outcome.report is not None, outcome.broken_by
    assert (outcome.failed, outcome.report.generated_tokens) == (0, len(prompts) * tokens)
    return Measured(
        outcome.report.generated_tokens / outcome.wall_s, outcome.report.prompt_tokens_computed, outcome.wall_s
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.suite")
    parser.add_argument("--engine", type=Path, default=ENGINE)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    prompts = workload(options.engine, options.rows)
    report = Report("suite")
    report.fact("rows", len(prompts))
    report.fact("tokens_a_row", options.tokens)
    report.fact("prompt_tokens_logical", sum(map(len, prompts)))
    sides: dict[str, Callable[[], Measured]] = {
        "native": lambda: native(options.engine, prompts, options.tokens),
        "suite": lambda: asyncio.run(suite(options.engine, prompts, options.tokens)),
        "upstream": lambda: upstream(options.engine, prompts, options.tokens),
    }
    runs: dict[str, list[Measured]] = {name: [] for name in sides}
    for number in range(options.runs):
        for name, side in sides.items():
            runs[name].append(side())
            sys.stderr.write(f"run {number + 1}: {name} {runs[name][-1].tokens_per_s:.1f} tok/s\n")
    for name, measured in runs.items():
        report.figure(f"{name}_tokens_per_s", [run.tokens_per_s for run in measured], unit="tok/s")
        report.figure(f"{name}_wall_s", [run.wall_s for run in measured], unit="s")
        report.figure(f"{name}_prompt_tokens_computed", [run.prompt_tokens_computed for run in measured], unit="tok")
    report.ratio("suite_over_native", of="suite_tokens_per_s", over="native_tokens_per_s", goal=">= 0.95")
    report.ratio("native_over_upstream", of="native_tokens_per_s", over="upstream_tokens_per_s")
    report.print()


if __name__ == "__main__":
    main()
