# SPDX-License-Identifier: Apache-2.0
"""How fast `ifab mine` brings hidden states to the disk, what that costs, and whether memory stays flat.

Real processes on a simulated engine whose time is virtual, with payloads of 8 KB (4,096 values of 2 bytes). What is
compared are the same rows on the same engine over the same stream: mined, and answered without their payload
(`omit_payload`) to a client that does nothing with the answers. The two take turns, so that a slow moment of the
machine hits both; processor time by process says where the difference goes. Growth is the peak of the largest run over
that of the smallest.

    python -m benchmarks.mine --sizes 10000,100000 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from benchmarks.frame import Report
from engines.simulated import write_simulated_engine
from services.cli.files.formats import layout, rows_of
from services.cli.files.opening import look, survey
from services.cli.job import stream_rows
from services.cli.ready import serving_engines
from services.cli.suite import Plan, Suite
from services.common.rpc import channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ifabric.broker.v1 import broker_service_pb2
    from services.cli.files.rows import BadRow, Row
    from services.common.errors import FabricError

HIDDEN = 4096
SAMPLE_S = 0.1
START_S = 180.0
SILENCE_S = 60.0
WINDOW = 4096
IFAB = (sys.executable, "-c", "from services.cli.main import main; main()")
PROCESSES = ("client", "broker", "worker")


class Run(NamedTuple):
    """One file of rows, from its first byte to its last result."""

    rows_per_s: float
    cpu_us: dict[str, float]
    """Processor time a row, by process."""
    client_mb: float
    """Peak, in MiB."""
    broker_mb: float


class _Uncollected:
    """A sink that only counts."""

    def __init__(self) -> None:
        self.rows = 0

    def finished(self, row: Row, result: broker_service_pb2.GenerationResult) -> None:
        """See `services.cli.job.Sink`."""
        self.rows += 1

    def failed(self, row_id: str, line: int, error: FabricError) -> None:
        """See `services.cli.job.Sink`."""
        raise AssertionError(f"{row_id}: {error}")


async def bare(broker: str, path: str) -> dict[str, Any]:
    """Reads a file of rows as `ifab mine` does, and has them answered without their payload."""

    def without_payload(rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        for row in rows:
            row.request.omit_payload = True  # type: ignore[union-attr]  # rows of ours can be sent
            yield row

    began = time.monotonic()
    source = look(path)
    form = layout(source)
    survey(source)
    sink = _Uncollected()
    async with channel(broker) as to_broker:
        with rows_of(source, form) as rows:
            outcome, _ = await stream_rows(
                to_broker, without_payload(rows), sink, job_id="bare", window=WINDOW, silence_s=SILENCE_S
            )
    if outcome.broken_by is not None:
        raise outcome.broken_by
    return {"rows": sink.rows, "failed": 0, "wall_s": time.monotonic() - began}


async def _peak_mb(process: psutil.Process) -> float:
    """Watches a process until it ends or the task is cancelled, and returns its largest resident size."""
    peak = 0
    with suppress(asyncio.CancelledError, psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)
    return peak / 2**20


async def _run(suite: Suite, count: int, *command: str) -> Run:
    """Runs a client to its end; its last line says how it went."""
    services = {"broker": suite.broker.process.pid, "worker": suite.workers[0].process.pid}
    before = {name: _cpu_s(pid) for name, pid in services.items()}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    client = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    peaks = [asyncio.create_task(_peak_mb(psutil.Process(pid))) for pid in (client.pid, services["broker"])]
    said, _ = await client.communicate()
    peaks[1].cancel()
    client_mb, broker_mb = await asyncio.gather(*peaks)
    document = json.loads(said)
    assert (document["rows"], document["failed"]) == (count, 0)
    used = {name: _cpu_s(pid) - before[name] for name, pid in services.items()}
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    used["client"] = now.ru_utime + now.ru_stime - children.ru_utime - children.ru_stime
    cpu_us = {name: 1e6 * seconds / count for name, seconds in used.items()}
    return Run(count / document["wall_s"], cpu_us, client_mb, broker_mb)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _measure(sizes: Sequence[int], rounds: int, folder: Path) -> tuple[list[Run], list[Run], list[Run]]:
    """Mines each size once, then the last in turns with bare runs: runs by size, mined runs, bare runs."""
    write_simulated_engine(
        folder / "engine", max_output_tokens=0, max_input_tokens=128, payload_dtype="float16", hidden_size=HIDDEN,
        slots=256, step_token_budget=8192, step_us=0, prompt_token_ns=0,
    )  # fmt: skip
    files = {size: folder / f"{size}.jsonl" for size in sizes}
    for size, path in files.items():
        with path.open("w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"id": f"r{number}", "prompt": f"row {number}"}) + "\n" for number in range(size)
            )
    async with Suite(Plan((folder / "engine",), folder / "logs", start_limit_s=START_S)) as suite:
        await serving_engines(suite, limit_s=START_S)
        to = suite.broker.address

        async def mined(size: int) -> Run:
            with tempfile.TemporaryDirectory(dir=folder) as shards:
                return await _run(suite, size, *IFAB, "mine", str(files[size]), "-o", shards, "--broker", to, "--json")

        by_size = [await mined(size) for size in sizes]
        pairs: tuple[list[Run], list[Run]] = [], []
        for _ in range(rounds):
            size = sizes[-1]
            pairs[1].append(
                await _run(suite, size, sys.executable, "-m", "benchmarks.mine", "--bare", to, str(files[size]))
            )
            pairs[0].append(await mined(size))
        return by_size, *pairs


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,100000", help="Rows of each run, ascending.")
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of a mined and a bare run of the largest size.")
    parser.add_argument("--bare", nargs=2, metavar=("BROKER", "FILE"), help="Be the client of a bare run.")
    options = parser.parse_args()
    if options.bare:
        print(json.dumps(asyncio.run(bare(*options.bare))))
        return
    sizes = [int(size) for size in options.sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        by_size, mined, bares = asyncio.run(_measure(sizes, options.rounds, Path(folder)))
    report = Report("mine")
    for size, run in zip(sizes, by_size, strict=True):
        report.figure(f"rows_per_s_{size}", [run.rows_per_s], unit="rows/s")
        report.figure(f"client_peak_mb_{size}", [run.client_mb], unit="MiB")
        report.figure(f"broker_peak_mb_{size}", [run.broker_mb], unit="MiB")
    report.figure("mined_rows_per_s", [run.rows_per_s for run in mined], unit="rows/s")
    report.figure("bare_rows_per_s", [run.rows_per_s for run in bares], unit="rows/s")
    report.ratio("mined_over_bare", of="mined_rows_per_s", over="bare_rows_per_s", goal=">= 0.9")
    for name in PROCESSES:
        report.figure(f"mined_{name}_cpu_us", [run.cpu_us[name] for run in mined], unit="us")
        report.figure(f"bare_{name}_cpu_us", [run.cpu_us[name] for run in bares], unit="us")
    report.figure("client_growth_mb", [by_size[-1].client_mb - by_size[0].client_mb], unit="MiB")
    report.figure("broker_growth_mb", [by_size[-1].broker_mb - by_size[0].broker_mb], unit="MiB")
    report.fact("payload_bytes", 2 * HIDDEN)
    report.print()


if __name__ == "__main__":
    main()
