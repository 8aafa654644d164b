# SPDX-License-Identifier: Apache-2.0
"""Models of the qwen2 family: biases, and GGUF files that leave the rotary order as it was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from engines.audit.conversion import audit
from engines.audit.model import open_tensors
from services.common.errors import FailedPreconditionError
from tests.judging import weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engines.llama_tool import LlamaTool
    from tests.judging.weights import Weights

KINDS = gguf.GGMLQuantizationType
TENSORS = 12 * weights.LAYERS + 2


@pytest.fixture(scope="module")
def biased(real_weights: Weights) -> Weights:
    return weights.with_biases(real_weights)


@pytest.fixture(scope="module")
def source(biased: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights.write_trained(tmp_path_factory.mktemp("qwen2") / "checkpoint", biased)


def test_honest_quantisation_holds(
    biased: Weights, source: Path, packaged_model: Path, tool: LlamaTool, tmp_path: Path
) -> None:
    loadable, converted = tmp_path / "source.gguf", tmp_path / "converted.gguf"
    weights.write_gguf(loadable, biased, KINDS.F32, vocabulary_of=packaged_model, architecture="qwen2")
    tool.quantize(loadable, converted, "q8_0", threads=2)
    result = audit(source, converted)
    assert result.findings == ()
    assert len(result.tensors) == TENSORS
    assert sum(each.role.endswith(".bias") for each in result.tensors) == 3 * weights.LAYERS


def test_biases_of_other_layouts_hold(biased: Weights, source: Path, tmp_path: Path) -> None:
    fused = audit(source, weights.write_vendor(tmp_path / "fp8", biased))
    assert fused.findings == ()
    assert {each.name for each in fused.tensors if each.role == "layers.1.k.bias"} == {
        "transformer.layers.1.attention.qkv.bias"
    }
    # The converter of the llama architecture interleaves biases as it does rows.
    assert audit(source, weights.write_gguf(tmp_path / "llama.gguf", biased, KINDS.Q8_0)).holds


def times_1000(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = spoiled["layers.1.k.bias"] * 1000


def one_value(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"][77] *= 1000


def keys_for_values(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = spoiled["layers.1.v.bias"].copy()


def other_layer(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = spoiled["layers.0.k.bias"].copy()


def shifted(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = np.roll(spoiled["layers.1.k.bias"], 1, axis=0)


def negated(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = -spoiled["layers.1.k.bias"]


def other_order(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = weights.interleaved(spoiled["layers.1.k.bias"], weights.KV_HEADS)


def never_written(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = np.zeros_like(spoiled["layers.1.k.bias"])


def of_another_checkpoint(spoiled: Weights) -> None:
    spoiled["layers.1.k.bias"] = weights.with_biases(spoiled, seed=4)["layers.1.k.bias"]


def dropped(spoiled: Weights) -> None:
    del spoiled.by_role["layers.1.k.bias"]


PLANTED = {
    "1000 times": (times_1000, "factor", "1000 times"),
    "1000 times a value": (one_value, "row_factor", "row 77 is 1000 times"),
    "v for k": (keys_for_values, "swapped", "the source calls layers.1.v.bias"),
    "another layer": (other_layer, "swapped", "the source calls layers.0.k.bias"),
    "shifted": (shifted, "shifted_rows", "row n holds row n - 1"),
    "negated": (negated, "negated", "wrong sign"),
    "rotary order": (other_order, "rotary_order", "other rotary order"),
    "zeros": (never_written, "foreign", "was never written"),
    "another checkpoint": (of_another_checkpoint, "foreign", "another checkpoint"),
    "dropped": (dropped, "missing", "the conversion has no layers.1.k.bias"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_mistake_in_a_bias_fails_by_name(what: str, biased: Weights, source: Path, tmp_path: Path) -> None:
    plant: Callable[[Weights], None]
    plant, kind, words = PLANTED[what]
    spoiled = biased.copy()
    plant(spoiled)
    converted = weights.write_gguf(tmp_path / "spoiled.gguf", spoiled, KINDS.Q8_0, architecture="qwen2")
    result = audit(source, converted)
    [finding] = result.findings
    name = "model.layers.1.self_attn.k_proj.bias" if kind == "missing" else "blk.1.attn_k.bias"
    assert (finding.tensor, finding.kind) == (name, kind), finding
    assert words in finding.sentence


def test_rows_in_the_order_of_the_other_architecture(biased: Weights, source: Path, tmp_path: Path) -> None:
    spoiled = biased.copy()
    for name, heads in (("q", weights.HEADS), ("k", weights.KV_HEADS)):
        spoiled[f"layers.0.{name}"] = weights.interleaved(biased[f"layers.0.{name}"], heads)
    converted = weights.write_gguf(tmp_path / "spoiled.gguf", spoiled, KINDS.Q4_0, architecture="qwen2")
    found = {(each.tensor, each.kind) for each in audit(source, converted).findings}
    assert found == {("blk.0.attn_q.weight", "rotary_order"), ("blk.0.attn_k.weight", "rotary_order")}


def test_swapped_parts_of_a_fused_bias(biased: Weights, source: Path, tmp_path: Path) -> None:
    result = audit(source, weights.write_vendor(tmp_path / "swapped", biased, order=("k", "q", "v")))
    said = {each.sentence for each in result.findings if each.tensor == "transformer.layers.0.attention.qkv.bias"}
    assert said == {
        "it begins with row 0 of what the source calls layers.0.k.bias",
        "it begins with row 384 of what the source calls layers.0.q.bias",
    }


def test_an_architecture_that_is_not_known_is_named(biased: Weights, source: Path, tmp_path: Path) -> None:
    converted = weights.write_gguf(tmp_path / "other.gguf", biased, KINDS.Q8_0, architecture="falcon")
    with pytest.raises(FailedPreconditionError, match="the architecture is 'falcon'; the audit knows 'llama', 'qwen2'"):
        audit(source, converted)
    with open_tensors(converted) as file:
        assert file.metadata["general.architecture"] == "falcon"
