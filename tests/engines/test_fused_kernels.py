# SPDX-License-Identifier: Apache-2.0
"""Networks with kernels of our own: what the kernels compute, that networks with and without agree, and the plugins."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from engines.graph import plugins
from engines.graph.fused_kernels import FP8_LARGEST
from engines.graph.ir import Graph, GraphError
from engines.graph.numpy_interpreter import run
from engines.graph.plugins import BuilderRefusedError
from engines.graph.tensorrt_lowering import lower
from engines.mining.calibration import calibrate
from engines.mining.layer import Fp8Scales, Fusion
from engines.mining.network import build_network
from engines.mining.packing import lay_out, pack
from engines.mining.reference import hidden_states
from engines.model_config import ModelShape
from tests.engines.models import SMALL, make_weights
from tests.engines.test_mining_network import cosine, make_prompts

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING = Fusion(attention=True, norm=True, gated_unit=True)
ONE_BY_ONE = [Fusion(attention=True), Fusion(norm=True), Fusion(gated_unit=True), EVERYTHING]
TOKENS, HEADS, KV_HEADS, SIZE = 16, 4, 2, 8
EXTENTS = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "row_tokens": TOKENS}


def attention_graph(dtype: str, *, packed: bool = True, output_scale: float = 0.0) -> Graph:
    graph = Graph()
    qkv = graph.input("qkv", dtype, ("tokens", (HEADS + 2 * KV_HEADS) * SIZE))
    positions, segments = (
        graph.input(name, "int32", ("rows", TOKENS)) if packed else None for name in ("positions", "segments")
    )
    cosine, sine = (graph.input(name, "float32", (TOKENS, SIZE // 2)) for name in ("cosine", "sine"))
    out = graph.packed_attention(
        "attention",
        qkv,
        positions,
        segments,
        cosine,
        sine,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_size=SIZE,
        row_tokens=TOKENS,
        output_scale=output_scale,
    )
    graph.output("out", out)
    return graph


def attention_feeds(dtype: Any) -> dict[str, npt.NDArray[Any]]:
    """Two rows: three segments and padding, and one segment whose positions do not begin at its place."""
    rng = np.random.default_rng(3)
    angle = np.arange(TOKENS)[:, None] * 10_000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))
    segments = np.array([[0] * 5 + [1] * 1 + [2] * 6 + [-1] * 4, [7] * TOKENS], np.int32)
    return {
        "qkv": rng.normal(size=(2 * TOKENS, (HEADS + 2 * KV_HEADS) * SIZE)).astype(dtype),
        "positions": rng.integers(0, TOKENS, (2, TOKENS)).astype(np.int32),
        "segments": segments,
        "cosine": np.cos(angle).astype(np.float32),
        "sine": np.sin(angle).astype(np.float32),
    }


def attended_plainly(feeds: dict[str, npt.NDArray[Any]], *, packed: bool) -> npt.NDArray[np.float64]:
    """Token by token and head by head, with complex numbers for rotary positions."""
    qkv = feeds["qkv"].astype(np.float64).reshape(2, TOKENS, HEADS + 2 * KV_HEADS, SIZE)
    turn = feeds["cosine"].astype(np.float64) + 1j * feeds["sine"]
    out = np.zeros((2, TOKENS, HEADS, SIZE))
    for row, t, head in np.ndindex(2, TOKENS, HEADS):

        def turned(token: int, which: int, row: int = row) -> npt.NDArray[np.complex128]:
            left, right = np.split(qkv[row, token, which], 2)
            place = feeds["positions"][row, token] if packed else token
            result: npt.NDArray[np.complex128] = (left + 1j * right) * turn[place]
            return result

        segments = feeds["segments"][row] if packed else np.zeros(TOKENS)
        seen = [u for u in range(t + 1) if segments[u] == segments[t]]
        key = HEADS + head // (HEADS // KV_HEADS)
        scores = np.array([(turned(t, head).conj() @ turned(u, key)).real for u in seen]) / SIZE**0.5
        share = np.exp(scores - scores.max())
        out[row, t, head] = share / share.sum() @ qkv[row, seen, key + KV_HEADS]
    return out.reshape(2 * TOKENS, HEADS * SIZE)


@pytest.mark.parametrize("packed", [True, False])
def test_attention_is_what_its_definition_says(packed: bool) -> None:
    feeds = attention_feeds(np.float32)
    found = run(attention_graph("float32", packed=packed), feeds)["out"]
    np.testing.assert_allclose(found, attended_plainly(feeds, packed=packed), rtol=1e-5, atol=1e-5)
    narrow = attention_feeds(ml_dtypes.bfloat16)
    rounded = run(attention_graph("bfloat16", packed=packed), narrow)["out"]
    assert rounded.dtype == ml_dtypes.bfloat16
    expected = attended_plainly(narrow, packed=packed)
    assert 0 < np.abs(rounded.astype(np.float64) - expected).max() < 0.03


def test_results_leave_in_fp8_over_their_scale_and_held_at_its_ends() -> None:
    feeds = attention_feeds(ml_dtypes.bfloat16)
    wide = attended_plainly(feeds, packed=True)
    scale = float(np.abs(wide).max()) / 500  # beyond what e4m3 holds
    found = run(attention_graph("bfloat16", output_scale=scale), feeds)["out"]
    assert found.dtype == ml_dtypes.float8_e4m3fn
    real = found.astype(np.float64)
    assert np.abs(real).max() == FP8_LARGEST
    np.testing.assert_allclose(real * scale, np.clip(wide, -448 * scale, 448 * scale), rtol=0.08, atol=3 * scale)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_networks_with_and_without_kernels_are_the_same(kv_heads: int, packed: bool) -> None:
    shape = ModelShape(2, 64, 128, 4, kv_heads, 16, 101, 1e-5, 10_000.0)
    weights, prompts = make_weights(shape, np.float32), make_prompts(shape)
    feeds = (pack if packed else lay_out)(prompts, 128)
    recorded, fused = (
        run(build_network(shape, weights, packed=packed, dtype="float32", layers=(0, -1), fused=fusion), feeds)
        for fusion in (Fusion(), EVERYTHING)
    )
    for name, state in recorded.items():
        np.testing.assert_allclose(fused[name], state, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def scales() -> Fp8Scales:
    return calibrate(SMALL, make_weights(SMALL, ml_dtypes.bfloat16), make_prompts(SMALL), row_tokens=128)


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("fused", [*ONE_BY_ONE, Fusion(True, True, True, fp8_results=False)])
def test_each_kernel_by_itself_keeps_the_network_close_to_the_model(
    fused: Fusion, fp8: bool, scales: Fp8Scales
) -> None:
    weights, prompts = make_weights(SMALL, ml_dtypes.bfloat16), make_prompts(SMALL)
    graph = build_network(SMALL, weights, scales=scales if fp8 else None, fused=fused)
    found = run(graph, pack(prompts, 128))["hidden"]
    for index, prompt in enumerate(prompts):
        assert cosine(found[index], hidden_states(SMALL, weights, prompt)[-1]) >= (0.98 if fp8 else 0.999)
    own = [operation for operation in graph.operations if operation.kind in plugins.NAMES]
    leaving = {operation.output.dtype for operation in own}
    beside = [tensor for operation in own for tensor in operation.beside]
    assert [tensor.dtype for tensor in beside] == ["bfloat16"] * (2 * SMALL.layers - 1 if fused.norm else 0)
    assert leaving == {"fp8_e4m3" if fp8 and fused.fp8_results else "bfloat16"}
    by_builder = sum(operation.kind == "quantize" for operation in graph.operations)
    by_kernels = len(own) if fused.fp8_results else 0
    assert by_builder + by_kernels == (4 * SMALL.layers if fp8 else by_kernels)


def test_a_norm_of_one_kernel_is_the_recorded_one_to_the_bit() -> None:
    weights, feeds = make_weights(SMALL, ml_dtypes.bfloat16), pack(make_prompts(SMALL), 128)
    recorded, fused = (run(build_network(SMALL, weights, fused=each), feeds) for each in (Fusion(), Fusion(norm=True)))
    np.testing.assert_array_equal(fused["hidden"], recorded["hidden"])


def test_weights_that_come_in_fp8_are_taken_as_they_are(scales: Fp8Scales) -> None:
    class Quantized(dict[str, npt.NDArray[Any]]):
        asked: list[tuple[str, ...]] = []  # noqa: RUF012 -- of this test alone

        def fp8(self, names: tuple[str, ...]) -> tuple[npt.NDArray[Any], float]:
            self.asked.append(names)
            whole = np.concatenate([self[name] for name in names]).astype(np.float32)
            return (whole / 0.25).astype(ml_dtypes.float8_e4m3fn), 0.25

    weights = Quantized(make_weights(SMALL, ml_dtypes.bfloat16))
    graph = build_network(SMALL, weights, scales=scales, fused=Fusion(attention=True))
    prefix = "model.layers.0.self_attn"
    assert weights.asked[0] == tuple(f"{prefix}.{word}_proj.weight" for word in "qkv")
    assert graph.constants["layers_0.qkv_proj_weight_scale"] == np.float32(0.25)
    assert len(weights.asked) == 5 * SMALL.layers


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"heads": 3}, r"qkv is bfloat16 \('tokens', 64\), must be bfloat16 or float32 \('tokens', 56\)"),
        ({"row_tokens": 32}, r"cosine is float32 \(16, 4\), must be float32 \(32, 4\)"),
        ({"output_scale": -1.0}, "output_scale is -1.0, must be 0 or more"),
        ({"heads": 3, "kv_heads": 2.5}, "3 heads of 8 for 2.5 heads of keys"),
    ],
)
def test_what_does_not_fit_is_named(wrong: dict[str, Any], says: str) -> None:
    graph = Graph()
    qkv = graph.input("qkv", "bfloat16", ("tokens", 64))
    cosine, sine = (graph.input(name, "float32", (16, 4)) for name in ("cosine", "sine"))
    with pytest.raises(GraphError, match=says):
        graph.packed_attention("attention", qkv, None, None, cosine, sine, **{**EXTENTS, **wrong})
    with pytest.raises(GraphError, match="given together or not at all"):
        graph.packed_attention(
            "attention", qkv, graph.input("positions", "int32", ("rows", 16)), None, cosine, sine, **EXTENTS
        )


def test_halves_and_weights_have_to_fit() -> None:
    graph = Graph()
    x = graph.input("x", "bfloat16", ("tokens", 7))
    with pytest.raises(GraphError, match="does not fall into halves"):
        graph.gated_unit("gated", x)
    with pytest.raises(GraphError, match=r"norm normed: x .* do not fit"):
        graph.norm("normed", x, graph.constant("weight", np.ones(8, ml_dtypes.bfloat16)), epsilon=1e-5)
    weight = graph.constant("fitting", np.ones(7, ml_dtypes.bfloat16))
    with pytest.raises(GraphError, match=r"norm normed: x .* and y .* do not fit"):
        graph.added_norm("normed", x, graph.input("y", "bfloat16", ("others", 7)), weight, epsilon=1e-5)
    with pytest.raises(GraphError, match=r"x is bfloat16, z is float32"):
        graph.added_norm("normed", x, graph.input("z", "float32", ("tokens", 7)), weight, epsilon=1e-5)
    total, normed = graph.added_norm("normed", x, x, weight, epsilon=1e-5, output_scale=0.5)
    assert (total.dtype, normed.dtype) == ("bfloat16", "fp8_e4m3")
    with pytest.raises(GraphError, match="the name normed is taken"):
        graph.norm("normed", x, weight, epsilon=1e-5)


def test_a_norm_of_a_sum_is_handed_to_the_builder_with_both_results(tmp_path: Path) -> None:
    graph = Graph()
    x, y = (graph.input(name, "bfloat16", ("tokens", 8)) for name in "xy")
    weight = graph.input("weight", "bfloat16", (8,))
    total, normed = graph.added_norm("normed", x, y, weight, epsilon=1e-5, output_scale=0.5)
    graph.output("total", total)
    graph.output("out", normed)
    trt, library = Bindings(), tmp_path / plugins.LIBRARY
    library.touch()
    plugins.load(trt, library)
    network = trt.network()
    lower(trt, network, graph)
    ((inputs, _, (name, fields, _)),) = trt.added
    assert (inputs, name) == (["x", "y", "weight"], "ifab_norm")
    assert {key: (data.tolist(), kind) for key, data, kind in fields} == {
        "epsilon": ([pytest.approx(1e-5)], "float32"),
        "added": ([1], "int32"),
        "output_scale": ([0.5], "float32"),
    }
    assert trt.marked == [("total", 1), ("out", 0)]


@dataclass
class Bindings:
    """The part of TensorRT's bindings that plugins need: keeps what a network is told."""

    creators: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    libraries: list[str] = field(default_factory=list)
    refuses: bool = False
    added: list[tuple[Any, ...]] = field(default_factory=list)
    marked: list[tuple[str, int]] = field(default_factory=list)
    bool = int32 = float32 = float16 = bfloat16 = fp8 = "a type"
    PluginFieldType = SimpleNamespace(INT32="int32", FLOAT32="float32")
    TensorRTPhase = SimpleNamespace(BUILD="build")
    PluginFieldCollection = list

    @staticmethod
    def PluginField(name: str, data: npt.NDArray[Any], kind: str) -> tuple[str, npt.NDArray[Any], str]:
        return name, data, kind

    def get_plugin_registry(self) -> Any:
        return SimpleNamespace(
            get_creator=lambda *key: self.creators.get(key),
            load_library=lambda path: None if self.refuses else self._load(path),
        )

    def _load(self, path: str) -> str:
        self.libraries.append(path)
        for name in plugins.NAMES.values():
            made = SimpleNamespace(create_plugin=lambda *said: None if said[1][0][1][0] == 12 else said)
            self.creators[name, "1", "ifab"] = made
        return "a handle"

    def network(self) -> Any:
        def add_plugin(inputs: list[Any], shapes: list[Any], plugin: Any) -> Any:
            self.added.append((inputs, shapes, plugin))
            return SimpleNamespace(get_output=lambda index: SimpleNamespace(name="of the plugin", index=index))

        return SimpleNamespace(
            add_input=lambda name, _dtype, _shape: name,
            add_plugin_v3=add_plugin,
            add_identity=lambda x: SimpleNamespace(get_output=lambda _i: SimpleNamespace(name="out", index=x.index)),
            mark_output=lambda tensor: self.marked.append((tensor.name, tensor.index)),
        )


@pytest.mark.parametrize("packed", [True, False])
def test_a_builder_is_handed_the_plugin_with_its_inputs_and_fields(packed: bool, tmp_path: Path) -> None:
    trt, library = Bindings(), tmp_path / plugins.LIBRARY
    library.touch()
    plugins.load(trt, library)
    plugins.load(trt, library)
    assert trt.libraries == [str(library)], "a registry refuses the same plugins a second time"
    assert plugins.offered(trt) == set(plugins.NAMES)
    lower(trt, trt.network(), attention_graph("bfloat16", packed=packed, output_scale=0.5))
    ((inputs, shapes, (name, fields, phase)),) = trt.added
    assert inputs == ["qkv", *(["positions", "segments"] if packed else []), "cosine", "sine"]
    assert (shapes, name, phase) == ([], "ifab_packed_attention", "build")
    assert {key: (data.dtype.name, data.tolist(), kind) for key, data, kind in fields} == {
        "heads": ("int32", [HEADS], "int32"),
        "kv_heads": ("int32", [KV_HEADS], "int32"),
        "head_size": ("int32", [SIZE], "int32"),
        "row_tokens": ("int32", [TOKENS], "int32"),
        "packed": ("int32", [int(packed)], "int32"),
        "output_scale": ("float32", [0.5], "float32"),
    }


def test_a_plugin_that_is_not_to_be_had_is_one_sentence(tmp_path: Path) -> None:
    trt = Bindings()
    assert plugins.offered(trt) == frozenset()
    with pytest.raises(
        BuilderRefusedError, match=r"needs the plugin ifab_packed_attention 1 of ifab, .* load libifab_plugins\.so"
    ):
        lower(trt, trt.network(), attention_graph("bfloat16"))
    with pytest.raises(BuilderRefusedError, match=r"the plugin library .*none\.so is not there"):
        plugins.load(trt, tmp_path / "none.so")
    library = tmp_path / plugins.LIBRARY
    library.touch()
    with pytest.raises(BuilderRefusedError, match="does not load"):
        plugins.load(Bindings(refuses=True), library)
    plugins.load(trt, library)
    with pytest.raises(BuilderRefusedError, match="ifab_packed_attention takes bfloat16 alone"):
        lower(trt, trt.network(), attention_graph("float32"))


def test_a_plugin_that_refuses_its_extents_is_one_sentence(tmp_path: Path) -> None:
    trt, library = Bindings(), tmp_path / plugins.LIBRARY
    library.touch()
    plugins.load(trt, library)
    shape = ModelShape(1, 48, 64, 12, 12, 4, 11, 1e-5, 10_000.0)
    graph = build_network(shape, make_weights(shape, ml_dtypes.bfloat16), fused=Fusion(attention=True))
    attention = next(operation for operation in graph.operations if operation.kind == "packed_attention")
    with pytest.raises(BuilderRefusedError, match=r"attention_out: ifab_packed_attention refuses \{'heads': 12"):
        plugins.create(trt, attention)


@pytest.mark.parametrize(
    ("extents", "says"),
    [
        ({}, None),
        ({"head_size": 64, "row_tokens": 8192}, None),
        ({"head_size": 96}, "heads of 96 values, and the kernel takes 64 or 128"),
        ({"kv_heads": 5}, "32 heads of queries for 5 heads of keys"),
        ({"row_tokens": 120}, "rows of 120 tokens, and the kernel takes multiples of 16 to 8192"),
        ({"row_tokens": 8208}, "rows of 8208 tokens"),
    ],
)
def test_the_kernels_limits_are_known_before_a_builder_is_asked(extents: dict[str, int], says: str | None) -> None:
    whole = {"heads": 32, "kv_heads": 8, "head_size": 128, "row_tokens": 128, **extents}
    found = plugins.limits(**whole)
    assert (found is None) if says is None else (found is not None and says in found)
