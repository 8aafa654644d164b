# SPDX-License-Identifier: Apache-2.0
"""Builds the mining network with TensorRT on a card, checks it against PyTorch, and measures it beside the roofline.

    python3 -m benchmarks.gpu.mining_engine --layers 4 --rows 8 16 64 --formats bfloat16 fp8 --out FOLDER
    python3 -m benchmarks.gpu.mining_engine --layers 32 --rows 64 --formats fp8 --fused LIBRARY --breakdown --out FOLDER
    python3 -m benchmarks.gpu.mining_engine --fused LIBRARY --beside attention norm --beside attention gated_unit ...

Needs the TensorRT 10.6 libraries and bindings on LD_LIBRARY_PATH and PYTHONPATH, PyTorch, and a card. Weights are
random with the extents of a 7-billion-parameter dense model. Each engine is optimised for one number of rows of 128
tokens, the per-step token budget, since that is what a contract states. Times are medians over `--repeats` launches
after warm-up. The roofline is an 8192-cubed product in the same process, before and after; `--sustained` adds what it
and the plan do for two seconds back to back, with clock and watts; `products at their own shapes` are PyTorch's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu import mining_plan, roofline
from benchmarks.gpu.mining_model import (
    ROW_TOKENS,
    RandomWeights,
    dense_7b,
    expected_and_scales,
    flops,
    make_feeds,
    product_flops,
    product_shapes,
    torch_reference,
)
from benchmarks.gpu.plan_runner import CLASSES, Runner, breakdown_lines, by_class, used_bytes
from engines.graph import plugins
from engines.mining.layer import PARTS, RECORDED, Fusion

if TYPE_CHECKING:
    from engines.mining.layer import Fp8Scales
    from engines.model_config import ModelShape

CHECKED_ROWS: Final = 8
BUILD_FIXED_S: Final = {"bfloat16": 30, "fp8": 10}
BUILD_LAYER_S: Final = 2.5
"""What builds are expected to take: kernels are chosen once, then each layer's weights are written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What all plans of one run share."""

    trt: Any
    logger: Any
    said: argparse.Namespace
    shape: ModelShape
    weights: RandomWeights
    feeds: dict[str, Any]
    expected: Any
    scales: Fp8Scales
    peak: dict[str, float]
    """TFLOP/s of the roofline by format."""
    context_bytes: int
    """Of the card, in use before there was anything on it: the driver's context, mostly."""


def measure(
    bench: Bench, number_format: str, layout: str, rows: int, fused: Fusion, cache: bytes
) -> tuple[dict[str, Any], bytes]:
    """Builds one plan, checks it and measures it; returns its row of the table and the timing cache."""
    import torch

    said, shape = bench.said, bench.shape
    made = mining_plan.make_plan(
        bench.trt,
        bench.logger,
        shape,
        bench.weights,
        rows=rows,
        scales=bench.scales if number_format == "fp8" else None,
        packed=layout == "packed",
        fused=fused,
        timing_cache=cache,
        detailed=True,
    )
    runner = Runner(bench.trt, bench.logger, made.plan)
    output = runner.bind(bench.feeds, shape.hidden_size)
    runner.first_launch()
    cosine = torch.nn.functional.cosine_similarity(output.float(), bench.expected.float()).min().item()
    work = make_feeds(shape, rows, 5)
    runner.bind(work, shape.hidden_size)
    times = roofline.timed(runner.launch, said.repeats)
    ms = statistics.median(times)
    rate = flops(shape, rows) / ms / 1e9
    row: dict[str, Any] = {
        "format": number_format,
        "layout": layout,
        "kernels": mining_plan.label(fused),
        "layers": shape.layers,
        "rows": rows,
        "ms": ms,
        "ms_min": min(times),
        "ms_max": max(times),
        "tflops": rate,
        "of_roofline": rate / bench.peak[number_format],
        "tokens_per_s": rows * ROW_TOKENS / ms * 1e3,
        "cosine_min": cosine,
        "record_s": made.recorded_s,
        "build_s": made.built_s,
        "plan_bytes": len(made.plan),
    }
    show(row)
    row["memory"] = {"driver_context_bytes": bench.context_bytes, **runner.memory_parts(), "plan_bytes": len(made.plan)}
    print("   memory", json.dumps(row["memory"]), flush=True)
    row["copy_back"] = runner.copy_back(max(20, round(500 / ms)))
    show(row["copy_back"], "   copy-back")
    if said.sustained:
        row["sustained"] = sustained(bench, runner, number_format, rows)
        show(row["sustained"], "   sustained")
    if said.compile and (number_format, layout, fused) == ("bfloat16", said.layouts[0], mining_plan.fusion_of(said)):
        compiled = torch.compile(partial(torch_reference, shape, bench.weights))
        taken = roofline.timed(partial(compiled, work), said.repeats)
        row |= {"compile_ms": statistics.median(taken), "compile_ms_min": min(taken), "compile_ms_max": max(taken)}
        show({key: row[key] for key in row if key.startswith("compile_ms")}, "   torch.compile")
    if said.breakdown:
        row["breakdown"] = breakdown(bench, runner, number_format, rows, ms)
    return row, made.timing_cache


def sustained(bench: Bench, runner: Runner, number_format: str, rows: int) -> dict[str, float]:
    """Plan and roofline for two seconds each, and their ratio."""
    peak = roofline.sustained_roofline(number_format)
    plan = roofline.sustained(runner.launch)
    rate = flops(bench.shape, rows) / plan["ms"] / 1e9
    return {
        "ms": plan["ms"],
        "tflops": rate,
        "roofline_tflops": peak["tflops"],
        "of_sustained_roofline": rate / peak["tflops"],
        "tokens_per_s": rows * ROW_TOKENS / plan["ms"] * 1e3,
        **{
            f"{which}_{unit}": ran.get(unit, 0.0)
            for which, ran in (("plan", plan), ("roofline", peak))
            for unit in ("mhz", "watts")
        },
    }


def breakdown(bench: Bench, runner: Runner, number_format: str, rows: int, ms: float) -> dict[str, Any]:
    """Layer times by class, and the weight products beside PyTorch's at the same shapes."""
    shape = bench.shape
    times = runner.layer_times(5)
    classes = by_class(times)
    print("\n".join(breakdown_lines(times)), flush=True)
    count = product_flops(shape, rows)
    own = roofline.at_their_shapes(rows * ROW_TOKENS, product_shapes(shape), number_format)
    products_ms = classes.get(CLASSES[0][0])
    found = {
        "classes_ms": classes,
        "profiled_ms": sum(times.values()),
        "products_tflops": count / products_ms / 1e9 if products_ms else None,
        "own_shapes_tflops": own["tflops"],
        "own_shapes_each": own["each"],
        "own_shapes_ms": own["ms"] * shape.layers,
        "own_shapes_over_step": own["ms"] * shape.layers / ms,
        "own_shapes_of_roofline": own["tflops"] / bench.peak[number_format],
        "layers_ms": times,
    }
    show({key: value for key, value in found.items() if isinstance(value, float)}, "   products at their own shapes")
    show(own["each"], "      TFLOP/s of each")
    return found


def show(row: dict[str, Any], before: str = "") -> None:
    """Prints a row."""
    print(before, {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--formats", nargs="+", choices=["bfloat16", "fp8"], default=["bfloat16", "fp8"])
    parser.add_argument("--layouts", nargs="+", choices=["packed", "own-rows"], default=["packed"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--breakdown", action="store_true", help="layer times by class, products at their own shapes")
    parser.add_argument("--sustained", action="store_true", help="plan and roofline for two seconds back to back")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile beside the first in bfloat16")
    parser.add_argument("--beside-recorded", action="store_true", help="with --fused: the recorded network as well")
    parser.add_argument(
        "--beside",
        nargs="+",
        choices=PARTS,
        action="append",
        default=[],
        help="with --fused: these parts as well; may be given again",
    )
    mining_plan.add_options(parser)
    return parser


def fusions_of(said: argparse.Namespace) -> list[Fusion]:
    """All that the command line asks for, each once, the first one first."""
    fusions = [mining_plan.fusion_of(said)]
    if said.fused is not None:
        fusions += [mining_plan.parts_of(said, parts) for parts in said.beside]
    return list(dict.fromkeys([*fusions, *([RECORDED] if said.beside_recorded else [])]))


def expected_seconds(number_format: str, layers: int) -> float:
    """How long a build is expected to take."""
    return BUILD_FIXED_S[number_format] + BUILD_LAYER_S * layers


def main() -> None:
    """Builds, checks and measures what the command line asks for."""
    said = options().parse_args()
    import tensorrt_bindings as trt
    import torch

    said.out.mkdir(parents=True, exist_ok=True)
    logger = trt.Logger(trt.Logger.WARNING)
    torch.cuda.init()
    context_bytes = used_bytes()
    if said.fused is not None:
        plugins.load(trt, said.fused)
    shape = dense_7b(said.layers)
    weights = RandomWeights(shape, 7)
    feeds = make_feeds(shape, CHECKED_ROWS, 3)
    expected, scales = expected_and_scales(shape, weights, feeds)
    before = roofline.rooflines()
    print("roofline TFLOP/s", before, flush=True)
    bench = Bench(trt, logger, said, shape, weights, feeds, expected, scales, before, context_bytes)
    rows_out: list[dict[str, Any]] = []
    cache = b""
    torch.cuda.synchronize()
    # A stream of its own: on the default one TensorRT waits for every launch.
    with torch.cuda.stream(torch.cuda.Stream()):
        asked = itertools.product(said.formats, said.layouts, said.rows, fusions_of(said))
        for number_format, layout, rows, fused in asked:
            expect = expected_seconds(number_format, said.layers)
            print(f"building {number_format}, {layout}, {mining_plan.label(fused)}: about {expect:.0f} s", flush=True)
            row, cache = measure(bench, number_format, layout, rows, fused, cache)
            rows_out.append(row)
            document = {"before": before, "context_bytes": context_bytes, "rows": rows_out}
            (said.out / "mining_engine.json").write_text(json.dumps(document, indent=1))
    after = roofline.rooflines()
    document = {"before": before, "after": after, "context_bytes": context_bytes, "rows": rows_out}
    (said.out / "mining_engine.json").write_text(json.dumps(document, indent=1))
    print("roofline TFLOP/s after", after)


if __name__ == "__main__":
    main()
