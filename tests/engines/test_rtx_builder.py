# SPDX-License-Identifier: Apache-2.0
"""A vendor's builder takes the network: TensorRT for RTX (the extra `rtx`), which compiles on a machine without a card.

What it makes is not run here: it runs on cards of compute capability 8.x and 12.x only. Its builder is as strict about
types and extents as the others', which is what is asked of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import ml_dtypes
import pytest

from engines.graph.ir import Graph
from engines.mining import builder
from engines.mining.calibration import calibrate
from engines.mining.layer import Fusion
from engines.mining.network import build_network
from engines.model_config import ModelShape
from services.common.errors import FailedPreconditionError
from tests.engines.models import make_weights
from tests.engines.test_mining_network import make_prompts

if TYPE_CHECKING:
    from engines.mining.layer import Fp8Scales

pytest.importorskip(builder.RTX_PACKAGE, reason="TensorRT for RTX is the extra `rtx`, and not installed")

SHAPE = ModelShape(2, 64, 128, 4, 2, 16, 101, 1e-5, 10_000.0)


@pytest.fixture(scope="module")
def rtx() -> builder.Builder:
    return builder.find(rtx=True)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_the_network_compiles(rtx: builder.Builder, kv_heads: int, fp8: bool) -> None:
    shape = replace(SHAPE, kv_heads=kv_heads)
    weights = make_weights(shape, ml_dtypes.bfloat16)
    scales: Fp8Scales | None = None
    if fp8:
        scales = calibrate(shape, weights, make_prompts(shape), row_tokens=128)
    graph = build_network(shape, weights, scales=scales, layers=(0, -1))
    plan = rtx.compile(graph, rows=4, slots=32)
    assert len(plan) > 10_000


def test_a_network_that_the_builder_refuses_is_one_sentence(rtx: builder.Builder) -> None:
    graph = Graph()
    a = graph.input("a", "float32", ("rows", 4))
    graph.output("out", graph.reshape("flat", a, (7, 5)))
    with pytest.raises(FailedPreconditionError, match=r"TensorRT 1\.\d+.* made no plan of the network: ") as raised:
        rtx.compile(graph, rows=4, slots=4)
    assert "\n" not in raised.value.message


def test_a_network_with_kernels_of_our_own_is_refused_by_a_builder_that_takes_no_plugins(rtx: builder.Builder) -> None:
    graph = build_network(SHAPE, make_weights(SHAPE, ml_dtypes.bfloat16), fused=Fusion(attention=True))
    with pytest.raises(FailedPreconditionError, match=r"made no plan of the network: .* this builder takes none"):
        rtx.compile(graph, rows=4, slots=4)
