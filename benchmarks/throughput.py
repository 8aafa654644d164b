# SPDX-License-Identifier: Apache-2.0
"""How much a broker carries: `make bench-throughput`.

Client, broker and one worker on the simulated engine in virtual time, all over real gRPC on this machine: prompts of
1,024 tokens, 128 tokens out in deltas, through one Exchange stream. Then single calls one after the other, whose time
is what the suite adds since the engine takes none. Then the decision core alone, with more and more that waits.

    requests_per_s             requests through one stream (goal: 10,000; floor: 4,000)
    broker_cpu_us_per_request  the broker's own processor time (goal: at most 100)
    whole_*                    the same two with results in one piece instead of deltas, as bulk jobs are
    added_p50_ms, added_p99_ms what a single call takes (goal: p99 at most 2)
    core_us_<n>                processor time of the core alone with n requests in flight
    core_us_batch_<n>          the same with so many requests to a batch
    core_us_heads_<n>          the same with so many shared heads in the tree
    profile                    where the broker's time goes, function by function, under cProfile: shares of one run

The parts are `wire`, `profile`, `latency` and `core`; named on the command line, only these run.
"""

from __future__ import annotations

import argparse
import asyncio
import pstats
import resource
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import psutil

from benchmarks.core_load import Load, engine_facts
from benchmarks.frame import Report
from engines.simulated import write_simulated_engine
from ifabric.broker.v1 import broker_service_pb2 as wire
from ifabric.broker.v1 import broker_service_pb2_grpc
from services.broker.collector import spare_the_collector
from services.broker.core.workers import Amount, Worker
from services.common.rpc import channel
from tests.support.processes import ServiceProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT_TOKENS, HEAD_TOKENS, HEADS, MAX_TOKENS = 1024, 768, 32, 128
VOCABULARY = 32_000
REQUESTS, BATCH, RUNS = 20_000, 64, 3
CALLS = 500
LIVE = (1_000, 10_000, 100_000, 1_000_000)
TREES = (1, 300, 10_000, 100_000)
ENDS = 20_000
PARTS = ("wire", "profile", "latency", "core")
PROFILED = 30
"""Functions of the profile that are shown."""


Profile = dict[str, tuple[float, int]]
"""Own time in seconds and calls, by function."""


class Suite:
    """Provisioner, worker and broker as processes; the broker under cProfile where a file for it is named.

    The engine's steps take no time, unless `engine` says otherwise.
    """

    def __init__(self, stack: ExitStack, profile: Path | None = None, **engine: Any) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "engine"
        figures: dict[str, Any] = {
            "slots": 256,
            "step_token_budget": 1 << 16,
            "kv_block_tokens": 64,
            "kv_pool_blocks": 200_000,
            "max_input_tokens": 2048,
            "max_sequence_tokens": 4096,
            "vocab_size": VOCABULARY,
            "step_us": 0,
            "prompt_token_ns": 0,
            "generated_token_ns": 0,
        }
        write_simulated_engine(directory, **(figures | engine))
        self.provisioner = stack.enter_context(ServiceProcess("services.provisioner"))
        self.worker = stack.enter_context(
            ServiceProcess(
                "services.worker",
                {"engine_dir": str(directory), "provisioner": self.provisioner.address, "node_id": "bench"},
            )
        )
        self.broker = stack.enter_context(
            ServiceProcess(
                "services.broker",
                {"provisioner": self.provisioner.address, "log_level": "warning", "drain_grace_s": 1.0},
                profile=profile,
            )
        )


def cpu_s(process: ServiceProcess) -> float:
    """Processor time of a process so far, in seconds."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def messages(run: int, *, deltas: bool = True) -> list[wire.ExchangeRequest]:
    """All requests of one run, BATCH to a message; no two runs share a prompt."""
    rng = np.random.default_rng(run)
    heads = rng.integers(300, VOCABULARY, (HEADS, HEAD_TOKENS), dtype=np.int32)
    made = []
    for first in range(0, REQUESTS, BATCH):
        message = wire.ExchangeRequest()
        for at in range(first, min(first + BATCH, REQUESTS)):
            request = message.requests.add(request_id=f"{run}-{at}", max_tokens=MAX_TOKENS)
            tail = rng.integers(300, VOCABULARY, PROMPT_TOKENS - HEAD_TOKENS, dtype=np.int32)
            request.prompt.packed_token_ids = np.concatenate([heads[at % HEADS], tail]).tobytes()
        made.append(message)
    made[0].open.CopyFrom(wire.ExchangeOpen(job_id=f"bench-{run}", stream_deltas=deltas))
    return made


async def exchange(stub: Any, requests: Sequence[wire.ExchangeRequest]) -> float:
    """Sends a run and reads it to its end; returns the seconds that it took."""
    call = stub.Exchange()

    async def write() -> None:
        for message in requests:
            await call.write(message)
        await call.done_writing()

    began = time.perf_counter()
    writer = asyncio.get_running_loop().create_task(write())
    finished = 0
    while (answer := await call.read()) is not grpc.aio.EOF:
        finished += sum(outcome.HasField("finished") for outcome in answer.outcomes)
    await writer
    assert finished == REQUESTS, f"{finished} of {REQUESTS} requests finished"
    return time.perf_counter() - began


def request(text: str) -> wire.GenerateRequest:
    """A single call for one token."""
    prompt = wire.Prompt(text=text)
    return wire.GenerateRequest(request=wire.GenerationRequest(prompt=prompt, max_tokens=1))


async def ready(stub: Any) -> None:
    """Waits until the suite answers."""
    deadline = time.monotonic() + 30
    while True:
        try:
            await stub.Generate(request("warm up"), timeout=5)
        except grpc.aio.AioRpcError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def latencies_ms(stub: Any, calls: int = CALLS) -> list[float]:
    """What single calls take, one after the other, ascending."""
    taken = []
    for at in range(calls):
        began = time.perf_counter()
        await stub.Generate(request(f"call {at}"), timeout=10)
        taken.append((time.perf_counter() - began) * 1e3)
    return sorted(taken)


async def wire_rates(suite: Suite, report: Report) -> None:
    """Measures what goes through one stream over real sockets."""
    async with channel(suite.broker.address) as made:
        stub = broker_service_pb2_grpc.BrokerServiceStub(made)
        await ready(stub)
        await exchange(stub, messages(0))
        rates: list[float] = []
        shares: dict[str, list[float]] = {"broker": [], "worker": [], "client": []}
        for run in range(1, RUNS + 1):
            requests = messages(run)
            before = cpu_s(suite.broker), cpu_s(suite.worker), time.process_time()
            rates.append(REQUESTS / await exchange(stub, requests))
            after = cpu_s(suite.broker), cpu_s(suite.worker), time.process_time()
            for name, start, end in zip(shares, before, after, strict=True):
                shares[name].append((end - start) / REQUESTS * 1e6)
        whole_rates, whole_us = [], []
        for run in range(RUNS + 1, 2 * RUNS + 1):
            requests = messages(run, deltas=False)
            start = cpu_s(suite.broker)
            whole_rates.append(REQUESTS / await exchange(stub, requests))
            whole_us.append((cpu_s(suite.broker) - start) / REQUESTS * 1e6)
    report.figure("whole_requests_per_s", whole_rates, unit="1/s")
    report.figure("whole_broker_cpu_us_per_request", whole_us, unit="us", goal="<= 100")
    report.figure("requests_per_s", rates, unit="1/s", goal=">= 10,000, floor 4,000")
    report.figure("broker_cpu_us_per_request", shares["broker"], unit="us", goal="<= 100")
    report.figure("worker_cpu_us_per_request", shares["worker"], unit="us")
    report.figure("client_cpu_us_per_request", shares["client"], unit="us")


async def call_latencies(suite: Suite, report: Report) -> None:
    """Measures single calls, one after the other."""
    async with channel(suite.broker.address) as made:
        stub = broker_service_pb2_grpc.BrokerServiceStub(made)
        await ready(stub)
        runs = [await latencies_ms(stub) for _ in range(RUNS + 1)][1:]
    report.figure("added_p50_ms", [statistics.median(run) for run in runs], unit="ms")
    report.figure("added_p99_ms", [run[int(CALLS * 0.99)] for run in runs], unit="ms", goal="<= 2")


async def one_run(suite: Suite, runs: int) -> None:
    """So many runs through the stream, for the profile."""
    async with channel(suite.broker.address) as made:
        stub = broker_service_pb2_grpc.BrokerServiceStub(made)
        await ready(stub)
        for run in range(runs):
            await exchange(stub, messages(run))


def profiled(runs: int) -> Profile:
    """Own time and calls of each function of a broker that started, served so many runs, and stopped."""
    with ExitStack() as stack:
        written = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "broker.profile"
        suite = Suite(stack, written)
        asyncio.run(one_run(suite, runs))
        suite.broker.stop()
        stats: Any = pstats.Stats(str(written))
    found: Profile = {}
    for (path, line, name), (_, calls, own, _, _) in stats.stats.items():
        if "epoll" not in name and "acquire" not in name:  # waiting
            before = found.get(label := f"{_short_path(path)}:{name}" if line else name, (0.0, 0))
            found[label] = before[0] + own, before[1] + calls
    return found


def profile(report: Report) -> None:
    """Where the broker's time goes, less what starting and stopping it takes.

    cProfile about doubles the time and makes small functions look larger than they are.
    """
    idle, busy = profiled(0), profiled(1)
    rows = [
        (own - idle.get(name, (0.0, 0))[0], calls - idle.get(name, (0.0, 0))[1], name)
        for name, (own, calls) in busy.items()
    ]
    whole = sum(own for own, _, _ in rows)
    rows.sort(reverse=True)
    print(f"\nthe broker under cProfile: {whole / REQUESTS * 1e6:.0f} us a request; own time of each function")
    for own, calls, name in rows[:PROFILED]:
        print(f"  {own / whole:>6.1%} {calls / REQUESTS:>8.2f} calls a request  {name}")
    report.fact(
        "profile",
        [
            {"function": name, "share": round(own / whole, 4), "calls_per_request": round(calls / REQUESTS, 3)}
            for own, calls, name in rows[:PROFILED]
        ],
    )


def _short_path(path: str) -> str:
    """The part of a file's path that says what it is."""
    parts = Path(path).parts
    for top in ("site-packages", "services", "build"):
        if top in parts:
            return "/".join(parts[parts.index(top) + (top == "site-packages") :])
    return "/".join(parts[-2:])


def core_us(live: int, batch: int, heads: int = 300) -> float:
    """Processor time of the core for one request, with so many in flight, to a batch, and shared heads in the tree."""
    load = Load(
        vocabulary=VOCABULARY,
        block_tokens=64,
        heads=heads,
        head_tokens=HEAD_TOKENS,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=MAX_TOKENS,
    )
    load.decision.worker_up(
        Worker("bench", engine_facts(VOCABULARY, 64), pool_tokens=1 << 24, credit=Amount(1 << 40, 384, 0), now=0.0)
    )
    while len(load.decision.requests) < live:
        load.submit(64)
    spent = 0.0
    while load.ended < ENDS:
        works = load.works(batch)
        began = time.thread_time()
        refusals = load.decision.submit(works, load.now)
        load.finish(batch)
        spent += time.thread_time() - began
        assert not any(refusals), "the core refused work"
    return spent / load.ended * 1e6


def core(report: Report) -> None:
    """The decision core alone, with more and more that waits, and the collector set as the broker sets it."""
    spare_the_collector()
    for live in LIVE:
        report.figure(f"core_us_{live}", [core_us(live, 64)], unit="us", goal="does not grow")
    for heads in TREES:
        report.figure(f"core_us_heads_{heads}", [core_us(200_000, 64, heads)], unit="us", goal="does not grow")
    for batch in (1, 8, 256):
        report.figure(f"core_us_batch_{batch}", [core_us(10_000, batch)], unit="us")
    report.fact("peak_rss_mb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    """Measures all parts, or those that are named."""
    parser = argparse.ArgumentParser(prog="benchmarks.throughput")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything where absent")
    parts = parser.parse_args().parts or PARTS
    report = Report("throughput")
    if "wire" in parts or "latency" in parts:
        with ExitStack() as stack:
            suite = Suite(stack)
            if "wire" in parts:
                asyncio.run(wire_rates(suite, report))
            if "latency" in parts:
                asyncio.run(call_latencies(suite, report))
    if "profile" in parts:
        profile(report)
    if "core" in parts:
        core(report)
    report.print()


if __name__ == "__main__":
    main()
