# SPDX-License-Identifier: Apache-2.0
"""What a second engine of the same weights costs in memory: two processes on one machine, each with its own engine.

Memory is the proportional set size that the kernel counts: a page that two processes share is half each's. Each process
loads the engine, answers one long prompt so that weights and cache are touched, and waits while it is counted.

    python -m benchmarks.two_engines --engine build/engines/smollm2-135m
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.frame import ROOT, Report

ENGINE = ROOT / "build" / "engines" / "smollm2-135m"
_LIMIT_S = 120.0
_MIB = 1 << 20
_HOLD = """
import sys
from pathlib import Path
import numpy as np
from services.worker.native import Engine, EventKind, Options, PollBuffers, Request
with Engine.create(Path(sys.argv[1])) as engine:
    ids = np.arange(100, 1100, dtype=np.int32)
    assert engine.submit([Request(1, ids.tobytes(), Options(max_tokens=8))]) == [None]
    buffers = PollBuffers(events=64, tokens=4096, payload_bytes=0, text_bytes=4096)
    while not (engine.poll(buffers, 1000)["kind"] == EventKind.FINISHED).any():
        pass
    print("ready", flush=True)
    sys.stdin.readline()
"""
_BARE = "import sys, services.worker.native; print('ready', flush=True); sys.stdin.readline()"


def resident(programs: list[list[str]]) -> float:
    """Starts programs one after another and returns what all of them hold together, in MiB, once all are ready."""
    held = [
        subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for words in programs
    ]
    try:
        for each in held:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        texts = [Path(f"/proc/{each.pid}/smaps_rollup").read_text() for each in held]
        return sum(int(found) for text in texts for found in re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)) / 1024
    finally:
        for each in held:
            each.communicate("\n", timeout=_LIMIT_S)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Memory of one and of two processes with the same engine.")
    parser.add_argument("--engine", type=Path, default=ENGINE)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    engine = [sys.executable, "-c", _HOLD, str(arguments.engine.resolve())]
    bare = [sys.executable, "-c", _BARE]
    report = Report("two_engines")
    report.figure("bare_mib", [resident([bare]) for _ in range(arguments.runs)], unit="MiB")
    report.figure("one_mib", [resident([engine]) for _ in range(arguments.runs)], unit="MiB")
    report.figure("two_mib", [resident([engine, engine]) for _ in range(arguments.runs)], unit="MiB")
    report.ratio("two_over_one", of="two_mib", over="one_mib")
    report.fact("weights_mib", round((arguments.engine / "model.gguf").stat().st_size / _MIB, 1))
    report.print()


if __name__ == "__main__":
    main()
