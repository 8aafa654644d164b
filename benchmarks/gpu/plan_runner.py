# SPDX-License-Identifier: Apache-2.0
"""One plan on a card: launched, timed by named classes of layers, copied back, and its memory part by part."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.roofline import timed

if TYPE_CHECKING:
    from collections.abc import Iterable

CLASSES: Final = (
    ("weight products", re.compile(r"_proj(?!_weight|_scale)")),
    (
        "attention and rotary",
        re.compile(
            r"attention|attend\b|scores|masked|mask_|rotated|_(sine|cosine|halves|exchanged|by_head|narrow|wide|heads)\b"
            r"|gemm_mha|Softm|MaxrSub"
        ),
    ),
    ("gated unit", re.compile(r"silu|gated|gate_sigmoid|Sigm|Silu")),
    ("norms and sums", re.compile(r"norm|Mean|Sqrt|\battended\b|_\d+\.out\b")),
    ("quantise", re.compile(r"_fp8|_real|_scale|Quant")),
    ("gather and embedding", re.compile(r"embed|gather|Gath|last|tokens")),
)
"""Classes of layers by what their names and their metadata say, the first that fits: the network's own operations where
the builder keeps them, and its abbreviations in kernels that it names itself."""
OTHER: Final = "other"
_LISTED: Final = 10


class Runner:
    """One engine and its context on the current stream.

    Attributes:
        memory: Bytes of the card in use after each step of bringing it up, as the driver counts them.
    """

    def __init__(self, trt: Any, logger: Any, plan: bytes) -> None:
        self.trt = trt
        self.memory = {"before": used_bytes()}
        self.runtime = trt.Runtime(logger)
        self.memory["runtime"] = used_bytes()
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        self.memory["engine"] = used_bytes()
        self.context = self.engine.create_execution_context()
        self.memory["context"] = used_bytes()

    def bind(self, feeds: dict[str, Any], hidden_size: int) -> Any:
        """Binds inputs and a fresh output; returns the output, bfloat16 [prompts, hidden_size]."""
        import torch

        listed = {self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)}
        for name, value in feeds.items():
            if name not in listed:
                continue
            self.context.set_input_shape(name, tuple(value.shape))
            self.context.set_tensor_address(name, value.data_ptr())
        self.output = torch.empty((feeds["last_rows"].numel(), hidden_size), dtype=torch.bfloat16, device="cuda")
        self.context.set_tensor_address("hidden", self.output.data_ptr())
        return self.output

    def launch(self) -> None:
        """Enqueues one launch."""
        import torch

        if not self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("the launch was refused")

    def first_launch(self) -> None:
        """Launches, waits, and notes what that took of the card's memory."""
        import torch

        self.launch()
        torch.cuda.synchronize()
        self.memory["first launch"] = used_bytes()

    def memory_parts(self) -> dict[str, int]:
        """Bytes that each step took, beside what the engine says of itself."""
        steps = itertools.pairwise(self.memory.items())
        parts = {f"{name}_bytes".replace(" ", "_"): later - before for (_, before), (name, later) in steps}
        return {**parts, "device_memory_size_v2": int(self.engine.device_memory_size_v2)}

    def layer_times(self, repeats: int) -> dict[str, float]:
        """Milliseconds a launch of each layer of the plan, with the profiler on, which slows the whole."""
        import torch

        times: dict[str, float] = {}

        class Profiler(self.trt.IProfiler):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()

            def report_layer_time(self, name: str, ms: float) -> None:
                times[name] = times.get(name, 0.0) + ms

        self.context.profiler = Profiler()
        for _ in range(repeats):
            self.launch()
            torch.cuda.synchronize()
        sources = self._sources()
        return {f"{name} {sources.get(name, '')}".strip(): ms / repeats for name, ms in times.items()}

    def _sources(self) -> dict[str, str]:
        """Names of the network's operations that each layer of the plan came of, where the plan kept them."""
        inspector = self.engine.create_engine_inspector()
        told = json.loads(inspector.get_engine_information(self.trt.LayerInformationFormat.JSON))
        layers = [layer for layer in told.get("Layers", []) if isinstance(layer, dict)]
        return {layer["Name"]: " ".join(str(layer.get("Metadata", "")).split("\x1e")) for layer in layers}

    def copy_back(self, launches: int) -> dict[str, float]:
        """Milliseconds of the pinned copy of an output, and of a launch in a loop with and without it.

        Returns:
            `copy_ms` of a copy by itself; `loop_ms` of a launch with two outputs taken in turn, each copied on a stream
            of its own behind the next launch; `bare_ms` of the same loop without copies; and both ratios.
        """
        import torch

        outputs = [self.output, torch.empty_like(self.output)]
        hosts = [torch.empty(self.output.shape, dtype=self.output.dtype, pin_memory=True) for _ in outputs]
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        copy_ms = statistics.median(timed(lambda: hosts[0].copy_(outputs[0], non_blocking=True), 20))

        def loop(copied: bool) -> float:
            free = [torch.cuda.Event() for _ in outputs]
            torch.cuda.synchronize()
            began = time.perf_counter()
            for number in range(launches):
                which = number % 2
                main.wait_event(free[which])
                self.context.set_tensor_address("hidden", outputs[which].data_ptr())
                self.launch()
                if copied:
                    computed = main.record_event()
                    with torch.cuda.stream(side):
                        side.wait_event(computed)
                        hosts[which].copy_(outputs[which], non_blocking=True)
                        free[which].record(side)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / launches * 1e3

        loop(True)
        pairs = [(loop(False), loop(True)) for _ in range(3)]
        bare_ms, loop_ms = (statistics.median(side_) for side_ in zip(*pairs, strict=True))
        self.context.set_tensor_address("hidden", self.output.data_ptr())
        return {
            "copy_ms": copy_ms,
            "bare_ms": bare_ms,
            "loop_ms": loop_ms,
            "copy_over_step": copy_ms / bare_ms,
            "loop_over_bare": loop_ms / bare_ms,
        }


def used_bytes() -> int:
    """Memory of the card in use, by any process, as `cudaMemGetInfo` counts it, without PyTorch's spare room."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def class_of(layer: str) -> str:
    """The class of a layer of a plan, by its name."""
    return next((name for name, pattern in CLASSES if pattern.search(layer)), OTHER)


def by_class(times: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each class, in the order of `CLASSES`, those without a layer left out."""
    found = dict.fromkeys([name for name, _ in CLASSES] + [OTHER], 0.0)
    for layer, ms in times.items():
        found[class_of(layer)] += ms
    return {name: ms for name, ms in found.items() if ms}


def breakdown_lines(times: dict[str, float]) -> Iterable[str]:
    """A table of classes, then the longest layers that are no weight product."""
    whole = sum(times.values())
    for name, ms in by_class(times).items():
        yield f"   {name:22} {ms:9.4f} ms {100 * ms / whole:6.2f} %"
    rest = [(ms, layer) for layer, ms in times.items() if class_of(layer) != CLASSES[0][0]]
    for ms, layer in sorted(rest, reverse=True)[:_LISTED]:
        yield f"      {ms:8.4f} ms  {class_of(layer):20}  {layer[:120]}"
