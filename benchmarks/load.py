# SPDX-License-Identifier: Apache-2.0
"""What somebody waits for who calls while a bulk job has the engine: `make bench-load`.

Single calls for one token, one after the other, over real gRPC through broker and worker, three times:

    added    on an engine whose steps take no time: what is measured is what the suite adds
    alone    on an engine whose steps take 10 ms, with nothing else there
    loaded   the same while a bulk job of prompts with shared heads keeps all of its slots busy

`bulk_rows` of the job ended meanwhile. Everything shares the machine, the client that measures included.
"""

from __future__ import annotations

import asyncio
import statistics
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from benchmarks.frame import Report, take_no_options
from benchmarks.throughput import VOCABULARY, Suite, latencies_ms, ready
from ifabric.broker.v1 import broker_service_pb2 as wire
from ifabric.broker.v1 import broker_service_pb2_grpc
from services.common.rpc import channel

if TYPE_CHECKING:
    from collections.abc import Sequence

RUNS, CALLS = 3, 200
STEP_US = 10_000
BULK_ROWS, BULK_TOKENS, BULK_BATCH = 50_000, 64, 250


def bulk_messages() -> list[wire.ExchangeRequest]:
    """More bulk work than the measurement lasts: 100 heads of 512 tokens, 64 of their own each."""
    rng = np.random.default_rng(7)
    heads = rng.integers(300, VOCABULARY, (100, 512), dtype=np.int32)
    made = []
    for first in range(0, BULK_ROWS, BULK_BATCH):
        message = wire.ExchangeRequest()
        for at in range(first, first + BULK_BATCH):
            request = message.requests.add(request_id=f"bulk-{at}", max_tokens=BULK_TOKENS)
            tail = rng.integers(300, VOCABULARY, 64, dtype=np.int32)
            request.prompt.packed_token_ids = np.concatenate([heads[at % 100], tail]).tobytes()
        made.append(message)
    made[0].open.CopyFrom(wire.ExchangeOpen(job_id="bulk"))
    return made


class BulkJob:
    """A job that runs beside the calls until it is cancelled."""

    def __init__(self, stub: Any) -> None:
        self._call = stub.Exchange()
        self._more = asyncio.Event()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        self.ended = 0

    async def under_way(self, rows: int) -> None:
        """Waits until so many rows have ended."""
        async with asyncio.timeout(60):
            while self.ended < rows:
                self._more.clear()
                await self._more.wait()

    async def stop(self) -> None:
        """Ends it."""
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self) -> None:
        for message in bulk_messages():
            await self._call.write(message)

    async def _read(self) -> None:
        while (answer := await self._call.read()) is not grpc.aio.EOF:
            self.ended += sum(outcome.HasField("finished") for outcome in answer.outcomes)
            self._more.set()


async def measure(suite: Suite, *, with_bulk: bool) -> tuple[dict[str, list[list[float]]], int]:
    """Latencies in ms, ascending, by kind and run; and how many bulk rows ended during those that were loaded."""
    found: dict[str, list[list[float]]] = {}
    async with channel(suite.broker.address) as made, channel(suite.broker.address) as other:
        stub = broker_service_pb2_grpc.BrokerServiceStub(made)
        await ready(stub)
        await latencies_ms(stub, CALLS)
        found["alone"] = [await latencies_ms(stub, CALLS) for _ in range(RUNS)]
        if not with_bulk:
            return found, 0
        job = BulkJob(broker_service_pb2_grpc.BrokerServiceStub(other))
        await job.under_way(500)
        before = job.ended
        found["loaded"] = [await latencies_ms(stub, CALLS) for _ in range(RUNS)]
        rows = job.ended - before
        await job.stop()
    return found, rows


def tell(report: Report, name: str, runs: Sequence[Sequence[float]], goal: str = "") -> None:
    """Adds p50 and p99 of one kind."""
    report.figure(f"{name}_p50_ms", [statistics.median(run) for run in runs], unit="ms")
    report.figure(f"{name}_p99_ms", [run[int(CALLS * 0.99)] for run in runs], unit="ms", goal=goal)


def main() -> None:
    """Measures all three."""
    take_no_options(__doc__)
    report = Report("load")
    report.fact("calls", CALLS)
    with ExitStack() as stack:
        found, _ = asyncio.run(measure(Suite(stack), with_bulk=False))
    tell(report, "added", found["alone"], "<= 2")
    with ExitStack() as stack:
        real: dict[str, Any] = {"time_mode": "real", "step_us": STEP_US, "slots": 64, "step_token_budget": 8192}
        found, rows = asyncio.run(measure(Suite(stack, **real), with_bulk=True))
    for name, runs in found.items():
        tell(report, name, runs)
    report.fact("step_ms", STEP_US / 1000)
    report.fact("bulk_rows", rows)
    report.print()


if __name__ == "__main__":
    main()
