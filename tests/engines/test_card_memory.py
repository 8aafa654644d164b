# SPDX-License-Identifier: Apache-2.0
"""What engines are predicted to take of a card's memory, beside what was seen."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu.llama_engine import CardEngine
from benchmarks.gpu.memory import llama_parts, mining_parts
from benchmarks.gpu.mining_model import dense_7b
from engines.planner import MIB


@pytest.mark.parametrize(
    ("engine", "said_mib"),
    [
        (CardEngine(256, 0, 128, 128, 4096), 774.09),
        (CardEngine(128, 0, 128, 128, 2048), 387.05),
        (CardEngine(64, 24, 2112, 64, 4096), 797.81),
        (CardEngine(64, 0, 512, 512, 4096, layout="unified", pool_tokens=65536), 1284.09),
    ],
)
def test_the_runtimes_buffer_is_what_libllama_allocates(engine: CardEngine, said_mib: float) -> None:
    # What libllama 0.3.36 wrote in its log as its compute buffer for three layers of this model, to 0.01 MiB.
    assert llama_parts(engine)["activations"] / MIB == pytest.approx(said_mib, abs=0.006)


@pytest.mark.parametrize(("layers", "seen_mib"), [(4, 2722), (32, 8144)])
def test_a_mining_worker_takes_what_is_predicted(layers: int, seen_mib: int) -> None:
    # What an H200 showed of the worker's process, FP8 with attention of our own (docs/gpu-truth.md).
    command = [sys.executable, "-m", "benchmarks.gpu.memory", "mining", "--format", "fp8", "--rows", "64"]
    command += ["--layers", str(layers), "--seen-mib", str(seen_mib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert json.loads(done.stdout.splitlines()[-1])["predicted_over_seen"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("tokens", "kept"), [(2_048, 138_412_032), (8_192, 551_550_976)])
def test_a_plan_with_kernels_of_our_own_keeps_what_is_predicted(tokens: int, kept: int) -> None:
    # `context_bytes` of a plan on an H200, FP8, with attention, norms and gated units of our own (docs/gpu-truth.md).
    parts = mining_parts(dense_7b(4), rows=tokens // 128, prompts=256, weights="fp8", packed=True, own_kernels=True)
    assert parts["activations"] == pytest.approx(kept, rel=0.005)


def test_the_command_sums_its_parts_and_compares_with_what_was_seen() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.memory", "mining", "--format", "fp8", "--rows", "16"]
    command += ["--runtime-mib", "3", "--launch-mib", "4", "--activations-mib", "70"]
    done = subprocess.run([*command, "--seen-mib", "2000"], capture_output=True, text=True, timeout=120, check=True)

    figures = json.loads(done.stdout.splitlines()[-1])
    names = ("weights", "cache", "activations", "buffers", "context", "runtime", "engine", "launch")
    parts = [figures[name] for name in names]
    assert parts[5:] == [3 * MIB, 0, 4 * MIB]
    assert figures["activations"] == 70 * MIB
    assert figures["total"] == sum(parts)
    assert figures["predicted_over_seen"] == figures["total"] / (2000 * MIB)
