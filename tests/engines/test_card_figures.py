# SPDX-License-Identifier: Apache-2.0
"""Figures of the mining benchmark that need no card: its options, its classes of layers, its counts of operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu import mining_engine, mining_plan
from benchmarks.gpu.mining_model import ROW_TOKENS, dense_7b, flops, product_flops, product_shapes
from benchmarks.gpu.plan_runner import OTHER, breakdown_lines, by_class, class_of
from engines.mining.layer import RECORDED, Fusion

if TYPE_CHECKING:
    import argparse


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("layers_0.qkv_proj_weight_real + layers_0.qkv_proj", "weight products"),
        ("layers_3.down_proj", "weight products"),
        ("layers_0.attention_out", "attention and rotary"),
        ("__myl_CastMulAdd_myl0_7 layers_0.q_wide layers_0.q_rotated", "attention and rotary"),
        ("_gemm_mha_v2_myl0_5", "attention and rotary"),
        ("__myl_SiluMul_myl0_9", "gated unit"),
        ("layers_1.gated", "gated unit"),
        ("layers_1.mlp_norm.weighted", "norms and sums"),
        ("__myl_AddMeanAddSqrt_myl0_3 layers_0.attended layers_0.mlp_norm.mean", "norms and sums"),
        ("layers_2.out", "norms and sums"),
        ("layers_0.down_fp8", "quantise"),
        ("embedded", "gather and embedding"),
        ("__myl_Fc_myl0_1", OTHER),
    ],
)
def test_a_layer_of_a_plan_is_of_one_class(layer: str, name: str) -> None:
    assert class_of(layer) == name


def test_classes_sum_to_the_whole_and_are_printed_with_their_share() -> None:
    times = {"layers_0.o_proj": 3.0, "layers_1.o_proj": 3.0, "layers_0.attention_out": 1.5, "strange": 0.5}
    assert by_class(times) == {"weight products": 6.0, "attention and rotary": 1.5, OTHER: 0.5}
    lines = list(breakdown_lines(times))
    assert "weight products" in lines[0]
    assert lines[0].endswith(" 75.00 %")
    assert "layers_0.attention_out" in lines[3]
    assert len(lines) == 5, "three classes, and two layers that are no product"


def test_products_are_counted_once() -> None:
    shape = dense_7b(2)
    assert product_shapes(shape) == {
        "qkv": (12288, 4096),
        "o": (4096, 4096),
        "gate_up": (22016, 4096),
        "down": (4096, 11008),
    }
    matrices = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert product_flops(shape, 3) == 2.0 * 3 * ROW_TOKENS * 2 * matrices
    assert flops(shape, 3) - product_flops(shape, 3) == 2.0 * 3 * ROW_TOKENS * 2 * (2 * ROW_TOKENS * 4096)


@pytest.mark.parametrize(
    ("line", "fused", "label"),
    [
        ("", RECORDED, "recorded"),
        ("--fused lib.so", Fusion(True, True, True), "attention+norm+gated_unit"),
        ("--fused lib.so --parts attention", Fusion(attention=True), "attention"),
        ("--fused lib.so --parts attention norm", Fusion(attention=True, norm=True), "attention+norm"),
        ("--fused lib.so --parts norm --wide-results", Fusion(norm=True, fp8_results=False), "norm, wide results"),
    ],
)
def test_the_command_line_says_which_kernels_are_ours(line: str, fused: Fusion, label: str) -> None:
    said: argparse.Namespace = mining_engine.options().parse_args(["--out", "folder", *line.split()])
    assert mining_plan.fusion_of(said) == fused
    assert mining_plan.label(fused) == label
    assert mining_engine.fusions_of(said) == [fused]


def test_further_parts_are_measured_beside_each_once() -> None:
    line = "--out folder --fused lib.so --parts attention --beside attention norm --beside attention --beside norm"
    line += " --beside-recorded"
    found = mining_engine.fusions_of(mining_engine.options().parse_args(line.split()))
    assert list(map(mining_plan.label, found)) == ["attention", "attention+norm", "norm", "recorded"]
    without = mining_engine.options().parse_args(["--out", "folder", "--beside", "norm"])
    assert mining_engine.fusions_of(without) == [RECORDED]
