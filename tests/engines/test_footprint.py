# SPDX-License-Identifier: Apache-2.0
"""What engines are predicted to take of a card: values that live at once, and the parts of an engine's memory."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.gpu.llama_engine import CardEngine
from benchmarks.gpu.memory import llama_parts
from engines.graph.footprint import peak_bytes
from engines.graph.ir import Graph, Tensor
from engines.planner import MIB

HALF = 2


def product(graph: Graph, name: str, x: Tensor, width: int) -> Tensor:
    weight = graph.constant(f"{name}_weight", np.zeros((int(x.shape[-1]), width), np.float16))
    return graph.matmul(name, x, weight)


def test_chains_are_one_kernel_and_values_end_with_their_last_reader() -> None:
    graph = Graph()
    x = product(graph, "first", graph.input("x", "float16", ("rows", 8)), 16)
    gate = graph.elementwise("gated", "mul", x, graph.sigmoid("gate", x))
    wide = product(graph, "second", gate, 64)
    graph.output("out", product(graph, "third", wide, 4))

    # `first` (16) and `gated` (16) live at once, then `gated` and `second` (64); `third` lies in the output's memory.
    assert peak_bytes(graph, {"rows": 10}) == 10 * (16 + 64) * HALF


def test_what_is_read_again_later_lives_until_then() -> None:
    graph = Graph()
    residual = product(graph, "first", graph.input("x", "float16", ("rows", 8)), 16)
    inner = product(graph, "second", residual, 64)
    graph.output("out", graph.elementwise("sum", "add", residual, product(graph, "third", inner, 16)))

    assert peak_bytes(graph, {"rows": 10}) == 10 * (16 + 64 + 16) * HALF


def test_views_take_no_memory_and_an_absent_extent_is_named() -> None:
    graph = Graph()
    x = product(graph, "first", graph.input("x", "float16", ("rows", 8)), 16)
    graph.output("out", product(graph, "second", graph.reshape("seen", x, ("rows", 16)), 4))

    assert peak_bytes(graph, {"rows": 10}) == 10 * 16 * HALF
    with pytest.raises(KeyError, match="rows"):
        peak_bytes(graph, {"tokens": 10})


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


def test_the_command_sums_its_parts_and_compares_with_what_was_seen() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.memory", "mining", "--format", "fp8", "--rows", "16"]
    command += ["--parts", "attention", "--runtime-mib", "3", "--launch-mib", "4", "--activations-mib", "70"]
    done = subprocess.run([*command, "--seen-mib", "2000"], capture_output=True, text=True, timeout=120, check=True)

    figures = json.loads(done.stdout.splitlines()[-1])
    names = ("weights", "cache", "activations", "buffers", "context", "runtime", "engine", "launch")
    parts = [figures[name] for name in names]
    assert parts[5:] == [3 * MIB, 0, 4 * MIB]
    assert figures["activations"] == 70 * MIB
    assert figures["total"] == sum(parts)
    assert figures["predicted_over_seen"] == figures["total"] / (2000 * MIB)
