# SPDX-License-Identifier: Apache-2.0
"""The mining network, interpreted operation by operation, against the model written plainly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from engines.graph.ir import Graph, GraphError
from engines.graph.numpy_interpreter import run
from engines.mining.layer import Fp8Scales
from engines.mining.network import build_network
from engines.mining.packing import lay_out, pack
from engines.mining.reference import hidden_states
from engines.model_config import ModelShape
from tests.engines.models import make_weights

LENGTHS = (1, 20, 30, 78, 127, 128)


def make_prompts(shape: ModelShape, seed: int = 1) -> list[npt.NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, shape.vocab_size, length).astype(np.int32) for length in LENGTHS]


def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_layer_agrees_with_the_plain_model(kv_heads: int, packed: bool) -> None:
    shape = ModelShape(3, 64, 128, 4, kv_heads, 16, 101, 1e-5, 10000.0)
    weights, prompts = make_weights(shape, np.float32), make_prompts(shape)
    graph = build_network(shape, weights, packed=packed, dtype="float32", layers=(0, 1, 2, -1))
    found = run(graph, (pack if packed else lay_out)(prompts, 128))
    for index, prompt in enumerate(prompts):
        expected = hidden_states(shape, weights, prompt)
        for name, state in zip(("layer_0", "layer_1", "layer_2", "hidden"), expected, strict=True):
            np.testing.assert_allclose(found[name][index], state, rtol=2e-4, atol=2e-4)


def test_bfloat16_and_fp8_stay_close() -> None:
    shape = ModelShape(2, 64, 128, 4, 4, 16, 101, 1e-5, 10000.0)
    weights, prompts = make_weights(shape, ml_dtypes.bfloat16), make_prompts(shape)
    feeds = pack(prompts, 128)
    largest: dict[str, float] = {}
    inputs = {"input_norm.weighted": "qkv", "attention_out": "o", "mlp_norm.weighted": "mlp", "gated": "down"}

    def watch(operation: Any, value: npt.NDArray[Any]) -> None:
        layer, _, rest = operation.name.partition(".")
        if rest in inputs:
            largest[f"{layer}.{inputs[rest]}"] = float(np.abs(value.astype(np.float32)).max())

    plain = run(build_network(shape, weights), feeds, watch=watch)["hidden"]
    scales = Fp8Scales({name: value / 448 for name, value in largest.items()})
    quantised = run(build_network(shape, weights, scales=scales), feeds)["hidden"]
    for index, prompt in enumerate(prompts):
        expected = hidden_states(shape, weights, prompt)[-1]
        assert cosine(plain[index], expected) >= 0.999
        assert cosine(quantised[index], expected) >= 0.98


def test_a_prompt_is_untouched_by_its_neighbours_in_the_row() -> None:
    shape = ModelShape(2, 64, 128, 4, 2, 16, 101, 1e-5, 10000.0)
    graph = build_network(shape, make_weights(shape, ml_dtypes.bfloat16))
    prompts = make_prompts(shape)
    together = run(graph, pack(prompts, 128))["hidden"]
    for index, prompt in enumerate(prompts):
        np.testing.assert_array_equal(together[index], run(graph, pack([prompt], 128))["hidden"][0])


def test_packing_wastes_little_and_refuses_what_cannot_fit() -> None:
    packed = pack([np.ones(n, np.int32) for n in (100, 28, 64, 64, 128)], 128)
    assert packed["input_ids"].shape == (3, 128)
    assert (packed["segments"] >= 0).all()
    for length in (0, 129):
        for place in (pack, lay_out):
            with pytest.raises(ValueError, match=f"prompt 1 has {length} tokens, must have 1 to 128"):
                place([np.ones(5, np.int32), np.ones(length, np.int32)], 128)


def test_types_and_extents_are_strict() -> None:
    graph = Graph()
    a, b = graph.input("a", "float32", ("n", 4)), graph.input("b", "bfloat16", (1, 4))
    with pytest.raises(GraphError, match="a is float32, b is bfloat16"):
        graph.elementwise("sum", "add", a, b)
    with pytest.raises(GraphError, match="inner extents 4 and 3 differ"):
        graph.matmul("product", a, graph.constant("c", np.zeros((3, 2), np.float32)))
    graph.output("out", graph.unary("root", "sqrt", a))
    with pytest.raises(GraphError, match="input a is float64, must be float32"):
        run(graph, {"a": np.ones((2, 4)), "b": np.ones((1, 4), ml_dtypes.bfloat16)})
