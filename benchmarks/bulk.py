# SPDX-License-Identifier: Apache-2.0
"""What a bulk job costs a row, from the upload to the export, and whether the broker's memory stays flat.

Real processes on a simulated engine whose time is virtual, so that what is left is the suite's own cost: rows into the
journal (SQLite, `synchronous=FULL`), order at seal, dispatch, results into the journal, results out. Client, broker and
worker share the machine's cores. Each size is a job of its own in a suite of its own, of short prompts that share
heads; rows are made while they are sent, so that the client's memory is flat as well.

    python -m benchmarks.bulk --sizes 10000,100000
    python -m benchmarks.bulk --sizes 1000000 --forms text
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from benchmarks.frame import Report
from engines.simulated import write_simulated_engine
from ifabric.broker.v1 import broker_service_pb2, job_service_pb2, job_service_pb2_grpc
from services.cli.ready import serving_engines
from services.cli.suite import Plan, Suite
from services.common.rpc import channel

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGE_ROWS = 1000
HEADS = 1000
HEAD_TOKENS, TAIL_TOKENS = 16, 8
CALL_S = 3600.0
SAMPLE_S = 0.2
ENGINE: dict[str, Any] = {
    "slots": 256, "step_token_budget": 8192, "kv_pool_blocks": 65536, "step_us": 0, "prompt_token_ns": 0,
    "generated_token_ns": 0,
}  # fmt: skip


class Measured(NamedTuple):
    """One job."""

    rows: int
    ingest_s: float
    seal_s: float
    run_s: float
    export_s: float
    start_mb: float
    peak_mb: float
    end_mb: float
    client_growth_mb: float
    broker_cpu_s: float
    worker_cpu_s: float

    @property
    def us_per_row(self) -> float:
        """Upload, seal and run together; the export comes on top."""
        return 1e6 * (self.ingest_s + self.seal_s + self.run_s) / self.rows


def prompts(rows: int, form: str) -> Iterator[broker_service_pb2.Prompt]:
    """Prompts of a job, in no order."""
    chance = np.random.default_rng(1)
    heads = chance.integers(97, 123, (HEADS, HEAD_TOKENS), dtype="<i4")
    for start in range(0, rows, MESSAGE_ROWS):
        count = min(MESSAGE_ROWS, rows - start)
        tails = chance.integers(97, 123, (count, TAIL_TOKENS), dtype="<i4")
        ids = np.concatenate([heads[chance.integers(0, HEADS, count)], tails], axis=1)
        if form == "text":
            for line in ids.astype(np.uint8):
                yield broker_service_pb2.Prompt(text=line.tobytes().decode())
        else:
            for line in ids:
                yield broker_service_pb2.Prompt(packed_token_ids=line.tobytes())


def uploads(rows: int, form: str, name: dict[str, Any]) -> Iterator[job_service_pb2.UploadRowsRequest]:
    """Messages of an upload."""
    made = prompts(rows, form)
    for start in range(0, rows, MESSAGE_ROWS):
        count = min(MESSAGE_ROWS, rows - start)
        message = job_service_pb2.UploadRowsRequest(first_row=start, **(name if start == 0 else {}))
        for number in range(start, start + count):
            message.rows.add(row_id=f"row-{number}").request.prompt.CopyFrom(next(made))
        yield message


class Memory:
    """Resident memory of a process while something runs, in MB."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.start = self.peak = self.now()

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def now(self) -> float:
        """This moment's."""
        return float(self._process.memory_info().rss) / 1e6

    async def watch(self) -> None:
        """Keeps the peak until it is cancelled."""
        while True:
            self.peak = max(self.peak, self.now())
            await asyncio.sleep(SAMPLE_S)


async def run(rows: int, form: str, folder: Path) -> Measured:
    """One job in a suite of its own."""
    write_simulated_engine(folder / "engine", **ENGINE)
    plan = Plan((folder / "engine",), folder / "logs", journal=folder / "journal.db")
    async with Suite(plan) as suite:
        await serving_engines(suite, limit_s=plan.start_limit_s)
        async with channel(suite.broker.address) as to_broker:
            stub: Any = job_service_pb2_grpc.JobServiceStub(to_broker)
            await job(stub, 1000, form, {"job_id": "warm-up", "tenant": "bench"})
            broker, client = Memory(suite.broker.process.pid), Memory(psutil.Process().pid)
            worker = Memory(suite.workers[0].process.pid)
            before = broker.cpu_s(), worker.cpu_s()
            watches = [asyncio.create_task(each.watch()) for each in (broker, client)]
            times = await job(stub, rows, form, {"job_id": f"{form}-{rows}", "tenant": "bench"})
            for watch in watches:
                watch.cancel()
            return Measured(
                rows,
                *times,
                broker.start,
                broker.peak,
                broker.now(),
                client.peak - client.start,
                broker.cpu_s() - before[0],
                worker.cpu_s() - before[1],
            )


async def job(stub: Any, rows: int, form: str, name: dict[str, Any]) -> tuple[float, float, float, float]:
    """Runs a job; returns the seconds that ingest, seal, run and export took."""
    defaults = broker_service_pb2.GenerationRequest(max_tokens=1)
    spec = job_service_pb2.JobSpec(job_id=name["job_id"], tenant=name["tenant"], defaults=defaults)
    await stub.CreateJob(job_service_pb2.CreateJobRequest(spec=spec), timeout=CALL_S)
    marks = [time.perf_counter()]
    durable = 0
    async for answer in stub.UploadRows(uploads(rows, form, name), timeout=CALL_S):
        durable = answer.durable_rows
    assert durable == rows
    marks.append(time.perf_counter())
    await stub.SealJob(job_service_pb2.SealJobRequest(row_count=rows, **name), timeout=CALL_S)
    marks.append(time.perf_counter())
    end = None
    async for message in stub.WatchJob(job_service_pb2.WatchJobRequest(**name), timeout=CALL_S):
        end = message.job
    assert end is not None
    assert (end.finished_rows, end.failed_rows) == (rows, 0)
    marks.append(time.perf_counter())
    fetched = 0
    async for message in stub.FetchResults(job_service_pb2.FetchResultsRequest(**name), timeout=CALL_S):
        fetched += len(message.results)
    assert fetched == rows
    marks.append(time.perf_counter())
    ingest, seal, run_, export = (later - earlier for earlier, later in pairwise(marks))
    return ingest, seal, run_, export


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.bulk")
    parser.add_argument("--sizes", default="10000,100000")
    parser.add_argument("--forms", default="text,ids", help="`text` alone leaves out the run of token ids.")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    report = Report("bulk")
    report.fact("sizes", sizes)
    measured: dict[tuple[str, int], list[Measured]] = {}
    for size in sizes:
        for form in options.forms.split(",") if size == sizes[-1] else ("text",):
            for _ in range(options.runs):
                with tempfile.TemporaryDirectory(prefix="ifab-bulk-") as folder:
                    one = asyncio.run(run(size, form, Path(folder)))
                measured.setdefault((form, size), []).append(one)
                sys.stderr.write(
                    f"{form} {size}: ingest {size / one.ingest_s:,.0f} rows/s, seal {one.seal_s:.2f} s, "
                    f"run {size / one.run_s:,.0f} rows/s, export {size / one.export_s:,.0f} rows/s, "
                    f"broker {one.start_mb:.0f} to {one.peak_mb:.0f} MB, "
                    f"processor {1e6 * one.broker_cpu_s / size:.0f} us a row in the broker, "
                    f"{1e6 * one.worker_cpu_s / size:.0f} in the worker\n"
                )
    text = measured["text", sizes[-1]]
    report.figure("ingest_rows_per_s", [one.rows / one.ingest_s for one in text], unit="rows/s", goal=">= 20,000")
    if ids := measured.get(("ids", sizes[-1])):
        report.figure(
            "ingest_ids_rows_per_s", [each.rows / each.ingest_s for each in ids], unit="rows/s", goal=">= 40,000"
        )
    report.figure("export_rows_per_s", [one.rows / one.export_s for one in text], unit="rows/s", goal=">= 100,000")
    report.figure("run_rows_per_s", [one.rows / one.run_s for one in text], unit="rows/s")
    for name in ("broker", "worker"):
        used = [1e6 * getattr(one, f"{name}_cpu_s") / one.rows for one in text]
        report.figure(f"{name}_cpu_us_per_row", used, unit="us")
    report.figure("seal_s", [one.seal_s for one in text], unit="s")
    smallest = measured["text", sizes[0]]
    growth = [large.peak_mb - small.peak_mb for large, small in zip(text, smallest, strict=True)]
    report.figure("broker_rss_growth_mb", growth, unit="MB")
    report.figure("client_rss_growth_mb", [one.client_growth_mb for one in text], unit="MB")
    per_row = {str(size): round(np.median([one.us_per_row for one in measured["text", size]]), 3) for size in sizes}
    report.fact("us_per_row", per_row)
    print("  us per row: " + ", ".join(f"{size}: {value}" for size, value in per_row.items()))
    report.print()


if __name__ == "__main__":
    main()
