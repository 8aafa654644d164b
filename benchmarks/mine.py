# SPDX-License-Identifier: Apache-2.0
"""How fast `ifab mine` brings hidden states to the disk, and whether memory stays flat on client and broker.

Real processes on a simulated engine whose time is virtual, with payloads of 8 KB (4,096 values of 2 bytes). Each size
is a run of its own, in the same suite; peaks are sampled, and growth is the peak of the last run over the first's. What
the bytes cost is told by the same rows on an engine whose payload is one value, the least that a mining engine returns.

    python -m benchmarks.mine --sizes 10000,100000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.frame import Report
from engines.simulated import write_simulated_engine
from services.cli.ready import serving_engines
from services.cli.suite import Plan, Suite

HIDDEN = 4096
SAMPLE_S = 0.1
START_S = 180.0
IFAB = (sys.executable, "-c", "from services.cli.main import main; main()")


async def _peak_mb(process: psutil.Process) -> float:
    """Watches a process until it ends or the task is cancelled, and returns its largest resident size."""
    peak = 0
    with suppress(asyncio.CancelledError, psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)
    return peak / 2**20


async def _mine(folder: Path, broker: str, broker_pid: int, count: int) -> tuple[float, float, float]:
    """Mines so many rows; returns rows a second, and the peaks of client and broker in MiB."""
    rows = folder / f"{count}.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": f"r{number}", "prompt": f"row {number}"}) + "\n" for number in range(count))
    words = ("mine", str(rows), "-o", str(folder / str(count)), "--broker", broker, "--json")
    client = await asyncio.create_subprocess_exec(
        *IFAB, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    peaks = [asyncio.create_task(_peak_mb(psutil.Process(pid))) for pid in (client.pid, broker_pid)]
    said, _ = await client.communicate()
    peaks[1].cancel()
    client_mb, broker_mb = await asyncio.gather(*peaks)
    document = json.loads(said)
    assert (document["rows"], document["failed"]) == (count, 0)
    return count / document["wall_s"], client_mb, broker_mb


async def _run(sizes: list[int], hidden: int, folder: Path) -> list[tuple[float, float, float]]:
    write_simulated_engine(
        folder / "engine", max_output_tokens=0, max_input_tokens=128, payload_dtype="float16", hidden_size=hidden,
        slots=256, step_token_budget=8192, step_us=0, prompt_token_ns=0,
    )  # fmt: skip
    async with Suite(Plan((folder / "engine",), folder / "logs", start_limit_s=START_S)) as suite:
        await serving_engines(suite, limit_s=START_S)
        broker = suite.broker
        return [await _mine(folder, broker.address, broker.process.pid, size) for size in sizes]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,100000", help="Rows of each run, ascending.")
    sizes = [int(size) for size in parser.parse_args().sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        [(bare, _, _)] = asyncio.run(_run(sizes[-1:], 1, Path(other)))
        runs = asyncio.run(_run(sizes, HIDDEN, Path(folder)))
    report = Report("mine")
    report.figure(f"bare_rows_per_s_{sizes[-1]}", [bare], unit="rows/s")
    for size, (rate, client_mb, broker_mb) in zip(sizes, runs, strict=True):
        report.figure(f"rows_per_s_{size}", [rate], unit="rows/s")
        report.figure(f"client_peak_mb_{size}", [client_mb], unit="MiB")
        report.figure(f"broker_peak_mb_{size}", [broker_mb], unit="MiB")
    report.ratio("rate_over_bare", of=f"rows_per_s_{sizes[-1]}", over=f"bare_rows_per_s_{sizes[-1]}", goal=">= 0.9")
    report.figure("client_growth_mb", [runs[-1][1] - runs[0][1]], unit="MiB")
    report.figure("broker_growth_mb", [runs[-1][2] - runs[0][2]], unit="MiB")
    report.fact("payload_bytes", 2 * HIDDEN)
    report.print()


if __name__ == "__main__":
    main()
