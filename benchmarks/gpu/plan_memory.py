# SPDX-License-Identifier: Apache-2.0
"""What a plan takes of a card's memory, step by step, in a process that does nothing else: the parts of a worker's.

    python3 -m benchmarks.gpu.plan_memory --plan FOLDER/engine/mining.plan --layers 4 --rows 64 [--fused LIBRARY]

Steps: the driver's context, creating the runtime, reading the plan, creating its context, the first launch of full
rows. They go into `python3 -m benchmarks.gpu.memory mining` as `--context-mib`, `--runtime-mib`, `--engine-mib` (less
the weights), `--activations-mib` and `--launch-mib`; the last line is JSON in bytes. Run it while nothing else is on
the card. `process` is what the driver says of this process, where it tells.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.cards import cards, driver
from benchmarks.gpu.mining_model import dense_7b, make_feeds
from benchmarks.gpu.plan_runner import Runner, used_bytes
from engines.graph import plugins


def process_bytes() -> int | None:
    """Memory of the card that this process holds."""
    with driver() as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(cards()[0])
        held: dict[int, Any] = {
            each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        }
    return held.get(os.getpid())


def idle_bytes() -> int:
    """Memory of the card in use before this process touches it."""
    with driver() as nvml:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(cards()[0])).used)


def main() -> None:
    """Measures one plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--fused", type=Path, metavar="LIBRARY", help="library with the plan's plugins")
    said = parser.parse_args()
    idle = idle_bytes()
    import tensorrt_bindings as trt
    import torch

    torch.cuda.init()
    context = used_bytes() - idle
    if said.fused is not None:
        plugins.load(trt, said.fused)
    shape, plan = dense_7b(said.layers), said.plan.read_bytes()
    # Made on the host: kernels of PyTorch would take memory of their own.
    feeds = {name: value.cuda() for name, value in make_feeds(shape, said.rows, 5, "cpu").items()}
    runner = Runner(trt, trt.Logger(trt.Logger.WARNING), plan)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        runner.bind(feeds, shape.hidden_size)
        runner.first_launch()
    parts = {"driver_context_bytes": context, **runner.memory_parts(), "plan_bytes": len(plan)}
    parts |= {"all_bytes": used_bytes() - idle, "process_bytes": process_bytes() or 0}
    for name, size in parts.items():
        print(f"{name:24} {size / (1 << 20):12,.1f} MiB")
    print(json.dumps(parts))


if __name__ == "__main__":
    main()
