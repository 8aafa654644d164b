# SPDX-License-Identifier: Apache-2.0
"""A soak: many requests in scaled time against suites side by side, each of which is `tests.chaos.soaking`'s.

    make soak                                                    # one suite, as much as fits into three minutes
    make soak REQUESTS=10000000 SUITES=12 CORES=8-31 SECONDS=540 OUT=build/soak

The suites share nothing: each has its broker, provisioner, workers and clients, its share of the requests, its own
random numbers, and its own cores where cores are named. Every ten seconds, and at the end, the folder gets

    soak.json       the figures of all suites together, with those of each; `ended` says whether they are the last
    soak.log        a line each time, as on the terminal
    suite-NN.jsonl  the figures of one suite, a line each time
    suite-NN.err    what it wrote beside

so that a machine that goes away leaves what there was. SIGTERM and Ctrl-C stop it in order, as the time limit does.
The last line is the JSON. The status is 1 where any suite lost, doubled, leaked, grew, or did not come to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame import commit, machine
from tests.chaos.soaking import DRAIN_S, EVERY_S, REST_S
from tests.chaos.together import Suite, table, together
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

END_WITHIN_S = DRAIN_S + REST_S + 30.0
"""What suites may take after they were told to stop, before they are killed."""


class SideBySide:
    """Suites that soak at the same time.

    Args:
        folder: Where figures and logs go.
        suites: How many.
        requests: Of all together.
        limit_s: When they are told to stop, counted from their start as processes.
        seed: Of the first; each next one has the next.
        cores: What they share out; none pins nothing.
    """

    def __init__(
        self, folder: Path, *, suites: int, requests: int, limit_s: float, seed: int, cores: Sequence[int]
    ) -> None:
        self._folder = folder
        self._requests = requests
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._suites = [
            Suite(
                number=number,
                requests=requests * (number + 1) // suites - requests * number // suites,
                seed=seed + number,
                cores=tuple(cores[len(cores) * number // suites : len(cores) * (number + 1) // suites]),
            )
            for number in range(suites)
        ]

    async def run(self) -> dict[str, Any]:
        """Runs them to their end, or to the time limit, and returns the figures."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._folder.mkdir(parents=True, exist_ok=True)
        running = [asyncio.create_task(self._run_one(suite)) for suite in self._suites]
        with (self._folder / "soak.log").open("w") as log:
            while not all(task.done() for task in running):
                await asyncio.wait(running, timeout=EVERY_S)
                self._say(log)
        for task in running:
            task.result()
        return self._keep(ended=True)

    async def _run_one(self, suite: Suite) -> None:
        name = f"suite-{suite.number:02}"
        with (self._folder / f"{name}.jsonl").open("w") as lines, (self._folder / f"{name}.err").open("w") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.chaos.soaking",
                *("--requests", str(suite.requests), "--seconds", str(self._limit_s), "--seed", str(suite.seed)),
                *(("--cores", *map(str, suite.cores)) if suite.cores else ()),
                cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=errors,
                start_new_session=True,  # Ctrl-C is ours: we tell it, and it ends in order
                limit=2**20,
            )  # fmt: skip
            assert process.stdout is not None
            telling = asyncio.create_task(self._tell(process))
            try:
                async for line in process.stdout:
                    lines.write(line.decode())
                    lines.flush()
                    suite.figures = json.loads(line)
                suite.status = await process.wait()
            finally:
                telling.cancel()
                with contextlib.suppress(ProcessLookupError):  # services of one that ended out of order
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.gather(telling, return_exceptions=True)

    async def _tell(self, process: asyncio.subprocess.Process) -> None:
        """Asks a suite to end when it is time, and kills it with its services where it does not."""
        left_s = self._began + self._limit_s - time.monotonic()
        try:
            await asyncio.wait_for(self._stop.wait(), max(0.0, left_s))
        except TimeoutError:
            self._stop.set()
        process.terminate()
        await asyncio.sleep(END_WITHIN_S)
        os.killpg(process.pid, signal.SIGKILL)

    def _say(self, log: Any) -> None:
        figures = self._keep(ended=False)
        line = (
            f"{time.monotonic() - self._began:5.0f} s: {figures['requests']:,} of {self._requests:,} requests,"
            f" {figures['requests_a_second']:,}/s, {figures['worker_deaths']} deaths,"
            f" lost {figures['lost']}, doubled {figures['doubled']}, wrong {figures['wrong']}\n"
        )
        for file in (log, sys.stderr):
            file.write(line)
            file.flush()

    def _keep(self, *, ended: bool) -> dict[str, Any]:
        """Writes the figures so far whole, or not at all."""
        took_s = time.monotonic() - self._began
        said = {"limit_s": self._limit_s, "asked": self._requests, **commit(), "machine": machine()}
        figures = {"ended": ended, **together(self._suites, took_s), **said}
        part = self._folder / "soak.json.part"
        part.write_text(json.dumps(figures, indent=1) + "\n")
        part.replace(self._folder / "soak.json")
        return figures


def cores_of(text: str) -> list[int]:
    """Cores named as `8-31` or `0,2,4-7`.

    Raises:
        argparse.ArgumentTypeError: It is no such list, or names a core that this process may not use.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of cores such as 0,2 or 8-31")
        found += range(int(first), int(last if dash else first) + 1)
    if wrong := sorted(set(found) - os.sched_getaffinity(0)):
        raise argparse.ArgumentTypeError(f"this process may not use the cores {wrong}")
    return sorted(set(found))


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def main(words: Sequence[str] | None = None) -> int:
    """Entry point of `make soak`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=_number, default=1)
    parser.add_argument("--requests", type=_number, default=10_000_000, help="of all suites together")
    parser.add_argument("--seconds", type=_number, default=180, help="when to stop sending all the same")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=cores_of, default=[], help="such as 8-31: shared out among the suites")
    parser.add_argument("--out", type=Path, help="folder for figures and logs; none keeps nothing")
    said = parser.parse_args(words)
    if 0 < len(said.cores) < said.suites:
        parser.error(f"{said.suites} suites want a core each; --cores names {len(said.cores)}")
    if said.requests < said.suites:
        parser.error(f"{said.suites} suites want a request each; --requests says {said.requests}")
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_run(said.out or Path(folder), said))
    sys.stdout.write(table(figures) + "\n" + json.dumps(figures) + "\n")
    for fault in figures["faults"]:
        sys.stderr.write(fault + "\n")
    return 1 if figures["faults"] else 0


async def _run(folder: Path, said: argparse.Namespace) -> dict[str, Any]:
    return await SideBySide(
        folder, suites=said.suites, requests=said.requests, limit_s=said.seconds, seed=said.seed, cores=said.cores
    ).run()


if __name__ == "__main__":
    raise SystemExit(main())
