# SPDX-License-Identifier: Apache-2.0
"""Plans of the mining network for benchmarks: the same for the bare loop and for the suite."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines.graph import plugins
from engines.graph.tensorrt_lowering import ProfileRange, build_plan
from engines.mining.layer import PARTS, RECORDED, Fp8Scales, Fusion
from engines.mining.network import build_network

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks.gpu.mining_model import RandomWeights
    from engines.model_config import ModelShape

WORKSPACE_BYTES: Final = 16 << 30


@dataclass(frozen=True, slots=True)
class Made:
    """A plan."""

    plan: bytes
    timing_cache: bytes
    recorded_s: float
    """Seconds until the network was recorded, weights included."""
    built_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """What both benchmarks are asked about kernels of our own."""
    parser.add_argument(
        "--fused", type=Path, metavar="LIBRARY", help=f"build with the plugins of this {plugins.LIBRARY}"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of a layer, with --fused; all")
    parser.add_argument("--wide-results", action="store_true", help="kernels hand on 16 bits in FP8 networks, too")


def fusion_of(said: argparse.Namespace) -> Fusion:
    """What the command line asks for."""
    if said.fused is None:
        return RECORDED
    return parts_of(said, said.parts)


def parts_of(said: argparse.Namespace, parts: Sequence[str]) -> Fusion:
    """Kernels of our own for these parts, with results as the command line asks."""
    return Fusion(**dict.fromkeys(parts, True), fp8_results=not said.wide_results)


def label(fused: Fusion) -> str:
    """Of a row of a table: the parts that are kernels of our own, or `recorded`."""
    return "+".join(fused.parts) + ("" if fused.fp8_results else ", wide results") if fused.parts else "recorded"


def make_plan(
    trt: Any,
    logger: Any,
    shape: ModelShape,
    weights: RandomWeights,
    *,
    rows: int,
    scales: Fp8Scales | None,
    packed: bool,
    fused: Fusion,
    timing_cache: bytes = b"",
    detailed: bool = False,
) -> Made:
    """Records and builds; the network's host copies are let go of before it returns.

    Plugins have to be loaded (`engines.graph.plugins.load`).
    """
    began = time.perf_counter()
    graph = build_network(shape, weights, packed=packed, scales=scales, fused=fused)
    recorded = time.perf_counter()
    ranges = {"rows": ProfileRange(1, rows, max(rows, 8)), "prompts": ProfileRange(1, rows, max(rows, 8) * 4)}
    plan, cache = build_plan(
        trt,
        logger,
        graph,
        ranges,
        workspace_bytes=WORKSPACE_BYTES,
        detailed=detailed,
        timing_cache=timing_cache,
    )
    return Made(plan, cache, recorded - began, time.perf_counter() - recorded)
