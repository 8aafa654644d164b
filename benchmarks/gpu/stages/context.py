# SPDX-License-Identifier: Apache-2.0
"""What every stage is given, and what several of them need."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.gpu.driving import LIMIT_S
from benchmarks.gpu.llama_engine import CardEngine, write_directory

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Context:
    """A run of one stage."""

    root: Path
    """What `benchmarks/gpu/build_llama.sh` made."""
    native: Path
    """Build folder of the native library, for its programs."""
    work: Path
    """Folder of this run: engine directories, logs, figures."""
    model: Path
    """The weights."""
    repeats: int
    requests: int
    budget: int
    layout: str
    minutes: float
    only: tuple[str, ...]
    profiled: bool
    """Whether the engine tells what it called; the stage `heads` prints it."""
    rungs: str
    """Of the ladder: clients, between commas."""
    resident_clients: int
    """Of the ladder: that keep the resident engine busy; 0: it is idle."""
    kv_type: str
    """Of the cache: f16 or q8_0."""

    @property
    def logs(self) -> Path:
        """Folder of the services' logs."""
        return self.work / "logs"

    def prepare(self, engine: CardEngine, name: str = "engine") -> Path:
        """Writes an engine directory into the work folder."""
        directory = self.work / name
        write_directory(directory, self.model, engine, card="nvidia-h200", capability="9.0")
        return directory


class Rates(NamedTuple):
    """What llama-batched-bench says of one shape, in tokens a second."""

    prefill: float
    decode: float
    both: float


def batched_bench(context: Context, prompt: int, generated: int, sequences: int, ubatch: int) -> Rates:
    """Runs upstream's own benchmark, one stream a sequence, flash attention, everything on the card."""
    cells = sequences * (-(-(prompt + generated) // 256) * 256)
    command = [context.root / "bin/llama-batched-bench", "-m", context.model, "-ngl", 99, "-fa", "on", "-c", cells]
    command += [
        "-ctk",
        context.kv_type,
        "-ctv",
        context.kv_type,
        "-b",
        2048,
        "-ub",
        ubatch,
        "-npp",
        prompt,
        "-ntg",
        generated,
        "-npl",
        sequences,
    ]
    words = [*map(str, command), "--output-format", "jsonl"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith('{"n_kv_max"')]
    if not lines:
        raise RuntimeError(f"llama-batched-bench gave no figures: {done.stderr[-2000:]}")
    said = json.loads(lines[-1])
    return Rates(said["speed_pp"], said["speed_tg"], said["speed"])
