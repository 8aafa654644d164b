# SPDX-License-Identifier: Apache-2.0
"""What a card can do: products of PyTorch in bfloat16 and scaled FP8, short and sustained, at 8192-cubed and at shapes.

A card lowers its clock under power, so that what it does for two seconds back to back is less than a few launches show.
Clock and power are read from the driver while the work runs.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.cards import Watch, cards

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CUBE: Final = 8192
FORMATS: Final = ("bfloat16", "fp8", "fp8_fast")
"""FP8 as PyTorch has it by default, which plans are held to, and with sums in fewer bits, the most that a card has."""
SUSTAINED_S: Final = 2.0
_CHUNK_S: Final = 0.1
_LOOK_S: Final = 0.1


def timed(launch: Callable[[], Any], repeats: int, warm: int = 5) -> list[float]:
    """Milliseconds of each of `repeats` launches, by device events."""
    import torch

    for _ in range(warm):
        launch()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def sustained(launch: Callable[[], Any], seconds: float = SUSTAINED_S) -> dict[str, float]:
    """A launch over and over: `ms` of one in the mean, `launches`, and the card's `mhz` and `watts` meanwhile."""
    import torch

    one = statistics.median(timed(launch, 5, 2)) / 1e3
    chunk = max(1, round(_CHUNK_S / max(one, 1e-5)))
    done = 0
    with Watch(cards()[:1], _clock_and_power, _LOOK_S) as watch:
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            for _ in range(chunk):
                launch()
            torch.cuda.synchronize()
            done += chunk
    return {"ms": spent / done * 1e3, "launches": done, **_settled(watch.seen)}


def product(rows: int, columns: int, inner: int, number_format: str) -> tuple[Callable[[], Any], float]:
    """PyTorch's product of [rows, inner] and [columns, inner] transposed, and its floating-point operations."""
    import torch

    a, b = (torch.randn(size, inner, device="cuda", dtype=torch.bfloat16) for size in (rows, columns))
    count = 2.0 * rows * columns * inner
    if number_format == "bfloat16":
        return (lambda: a @ b.t()), count
    one = torch.ones((), device="cuda")
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    fast = number_format == "fp8_fast"

    def scaled() -> Any:
        return torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return scaled, count


def rooflines() -> dict[str, float]:
    """TFLOP/s of an 8192-cubed product in each of `FORMATS`, the median of 20."""
    found: dict[str, float] = {}
    for number_format in FORMATS:
        launch, count = product(CUBE, CUBE, CUBE, number_format)
        found[number_format] = count / statistics.median(timed(launch, 20)) / 1e9
    return found


def sustained_roofline(number_format: str) -> dict[str, float]:
    """The 8192-cubed product for two seconds: `tflops`, `mhz`, `watts`."""
    launch, count = product(CUBE, CUBE, CUBE, number_format)
    ran = sustained(launch)
    return {"tflops": count / ran["ms"] / 1e9, **ran}


def at_their_shapes(tokens: int, shapes: Mapping[str, tuple[int, int]], number_format: str) -> dict[str, Any]:
    """PyTorch's products at a network's own shapes.

    Args:
        tokens: Rows of the left matrix.
        shapes: Outputs and inputs of each product of a layer.
        number_format: One of `FORMATS`.

    Returns:
        `ms` of a layer's products, one after the other, their `tflops`, and `each` with TFLOP/s by name: what a perfect
        plan of exactly these products could reach.
    """
    each, total_ms, total = {}, 0.0, 0.0
    for name, (columns, inner) in shapes.items():
        launch, count = product(tokens, columns, inner, number_format)
        ms = statistics.median(timed(launch, 20))
        each[name] = count / ms / 1e9
        total_ms, total = total_ms + ms, total + count
    return {"ms": total_ms, "tflops": total / total_ms / 1e9, "each": each}


def _clock_and_power(nvml: Any, card: Any) -> tuple[float, float]:
    mhz = nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)
    return float(mhz), nvml.nvmlDeviceGetPowerUsage(card) / 1e3


def _settled(seen: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians of `mhz` and `watts` over the second half, once the clock has settled; empty if nothing was read."""
    half = seen[len(seen) // 2 :]
    if not half:
        return {}
    return {"mhz": statistics.median(m for m, _ in half), "watts": statistics.median(w for _, w in half)}
