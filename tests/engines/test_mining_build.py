# SPDX-License-Identifier: Apache-2.0
"""Mining engines from a checkpoint: calibrated, compiled, whole, taken up again; and what is refused on the way."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from engines import card_tier, inspect
from engines.checkpoint import Checkpoint
from engines.graph import plugins
from engines.graph.numpy_interpreter import run
from engines.mining import builder
from engines.mining.build import MiningBuild, build_mining_engine
from engines.mining.calibration import calibrate
from engines.mining.network import build_network
from engines.mining.packing import pack
from engines.mining.reference import hidden_states
from engines.model_config import ModelShape
from services.common.errors import FabricError, FailedPreconditionError, NotFoundError
from services.worker.native._library import LIBRARY_VARIABLE, library_path
from tests.engines.models import SMALL, make_weights, write_checkpoint
from tests.engines.test_mining_network import cosine, make_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from engines.build import Progress
    from engines.graph.ir import Graph

WORDS = ["red", "green", "blue", "one", "two", "three"]
TEXTS = "\n".join(" ".join(WORDS[(i * j) % 6] for j in range(1, 12)) for i in range(1, 30))


@dataclass
class Compiler:
    """Stands in for the card's own builder: keeps the network, and names it by its content."""

    version: str = "10.14.1"
    plugins: Path | None = None
    compiled: list[Graph] = field(default_factory=list)
    fails: BaseException | None = None

    def compile(self, graph: Graph, *, rows: int, slots: int) -> bytes:
        if self.fails is not None:
            raise self.fails
        self.compiled.append(graph)
        digest = hashlib.sha256(repr((graph.operations, rows, slots)).encode())
        for name, value in sorted(graph.constants.items()):
            digest.update(name.encode() + value.tobytes())
        return b"plan " + digest.hexdigest().encode()


@pytest.fixture
def wanted(tmp_path: Path) -> MiningBuild:
    model = tmp_path / "model"
    write_checkpoint(model, SMALL, ml_dtypes.bfloat16)
    vocabulary = {word: 7 * index for index, word in enumerate(WORDS)}
    (model / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "red"},
            }
        )
    )
    (tmp_path / "texts.txt").write_text(TEXTS)
    return MiningBuild(
        tmp_path / "engine", card_tier.load("hopper-141gb-mining"), model, "small", calibration=tmp_path / "texts.txt"
    )


def test_an_engine_is_whole_and_its_network_computes_what_the_model_does(wanted: MiningBuild) -> None:
    compiler = Compiler()
    built = build_mining_engine(wanted, compiler=compiler)
    assert built.fresh
    assert inspect.verify(wanted.target) == []
    contract = inspect.describe(wanted.target).contract
    assert contract.engine_id == built.engine_id == "small-fp8-hopper-141gb-mining"
    assert (contract.limits.max_input_tokens, contract.limits.step_token_budget) == (128, 8192)
    assert contract.model.kv_cache_dtype is None
    assert contract.build.calibration is not None
    assert contract.build.calibration.startswith("29 texts, sha256 ")
    assert {file.path for file in contract.files} == {"mining.plan", "tensorrt.json", "tokenizer.json"}
    assert [path.name for path in wanted.target.parent.iterdir() if path.name.startswith(".")] == []
    weights, prompts = make_weights(SMALL, ml_dtypes.bfloat16), make_prompts(SMALL)
    found = run(compiler.compiled[0], pack(prompts, 128))["hidden"]
    for index, prompt in enumerate(prompts):
        assert cosine(found[index], hidden_states(SMALL, weights, prompt)[-1]) >= 0.98


def test_the_same_inputs_again_do_nothing_and_others_build_anew(wanted: MiningBuild) -> None:
    compiler = Compiler()
    first = build_mining_engine(wanted, compiler=compiler)
    assert build_mining_engine(wanted, compiler=compiler) == replace(first, fresh=False)
    assert len(compiler.compiled) == 1
    write_checkpoint(wanted.model, SMALL, ml_dtypes.bfloat16, seed=1)
    other = build_mining_engine(wanted, compiler=compiler)
    assert other.fresh
    assert other.engine_digest != first.engine_digest
    assert build_mining_engine(wanted, compiler=Compiler(version="10.15.0")).fresh


def test_an_interrupted_build_is_taken_up_and_published_whole(wanted: MiningBuild) -> None:
    seen: list[str] = []
    telling = replace(wanted, progress=lambda progress: seen.append(progress.step))
    with pytest.raises(KeyboardInterrupt):
        build_mining_engine(telling, compiler=Compiler(fails=KeyboardInterrupt()))
    assert not wanted.target.exists()
    assert "calibrating activations" in seen
    seen.clear()
    built = build_mining_engine(telling, compiler=Compiler())
    assert built.fresh
    assert "calibrating activations" not in seen, "the scales were found before"
    assert inspect.verify(wanted.target) == []


WIDE = ModelShape(2, 128, 128, 4, 2, 64, 101, 1e-5, 10_000.0)
"""Heads of a size that the attention kernel takes."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "installed" / plugins.LIBRARY
    path.parent.mkdir()
    path.write_bytes(b"kernels")
    return path


def test_with_the_plugin_library_each_part_is_one_kernel_and_the_engine_carries_it(
    wanted: MiningBuild, library: Path
) -> None:
    write_checkpoint(wanted.model, WIDE, ml_dtypes.bfloat16)
    without, compiler = Compiler(), Compiler(plugins=library)
    recorded = build_mining_engine(wanted, compiler=without)
    (remark,) = recorded.remarks
    assert remark.endswith("libifab_plugins.so is not in `plugins` beside the native library")
    assert json.loads((wanted.target / "tensorrt.json").read_text())["plugins"] == []
    contract = inspect.describe(wanted.target).contract
    assert "kernels=recorded" in contract.build.flags
    held = contract.card.memory_bytes
    built = build_mining_engine(wanted, compiler=compiler)
    assert built.fresh
    assert built.remarks == ()
    assert inspect.verify(wanted.target) == []
    assert json.loads((wanted.target / "tensorrt.json").read_text())["plugins"] == ["libifab_plugins.so"]
    assert (wanted.target / "libifab_plugins.so").read_bytes() == b"kernels"
    assert "libifab_plugins.so" in {file.path for file in inspect.describe(wanted.target).contract.files}
    contract = inspect.describe(wanted.target).contract
    assert "kernels=attention,norm,gated_unit" in contract.build.flags
    assert contract.card.memory_bytes < held, "kernels of our own hold less"
    assert not build_mining_engine(wanted, compiler=compiler).fresh
    library.write_bytes(b"other kernels")
    assert build_mining_engine(wanted, compiler=compiler).fresh
    kinds = Counter(operation.kind for operation in compiler.compiled[0].operations)
    assert (kinds["packed_attention"], kinds["gated_unit"]) == (WIDE.layers, WIDE.layers)
    assert kinds["norm"] >= 2 * WIDE.layers
    assert plugins.kinds_of(without.compiled[0]) == frozenset()
    weights, prompts = make_weights(WIDE, ml_dtypes.bfloat16), make_prompts(WIDE)
    found = run(compiler.compiled[0], pack(prompts, 128))["hidden"]
    for index, prompt in enumerate(prompts):
        assert cosine(found[index], hidden_states(WIDE, weights, prompt)[-1]) >= 0.98


def test_what_a_kernel_does_not_take_keeps_the_recorded_operations(wanted: MiningBuild, library: Path) -> None:
    compiler = Compiler(plugins=library)
    built = build_mining_engine(wanted, compiler=compiler)
    (remark,) = built.remarks
    assert remark.startswith("attention is left to TensorRT's own kernels: heads of 16 values, and the kernel takes 64")
    assert plugins.kinds_of(compiler.compiled[0]) == {"norm", "gated_unit"}
    assert "kernels=norm,gated_unit" in inspect.describe(wanted.target).contract.build.flags


@pytest.mark.parametrize(("width", "taken"), [(8, True), (32_768, True), (0, False), (12, False), (32_776, False)])
def test_rows_that_the_kernels_take(width: int, taken: bool) -> None:
    assert (plugins.row_limits(width) is None) is taken


def test_the_plugin_library_is_looked_for_beside_the_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "libifab_engine.so"))
    assert builder.plugin_library() is None
    library = tmp_path / "plugins" / plugins.LIBRARY
    library.parent.mkdir()
    library.touch()
    assert builder.plugin_library() == library
    monkeypatch.delenv(LIBRARY_VARIABLE)
    assert builder.plugin_library() in (None, library_path().parent / "plugins" / plugins.LIBRARY)


def test_a_tier_in_16_bits_needs_no_calibration(wanted: MiningBuild) -> None:
    plain = replace(wanted.tier, limits=replace(wanted.tier.mining, weights="bfloat16"))
    wanted = replace(wanted, tier=plain)
    compiler = Compiler()
    build_mining_engine(replace(wanted, calibration=None), compiler=compiler)
    contract = inspect.describe(wanted.target).contract
    assert contract.build.calibration is None
    assert contract.model.weights_dtype == "bfloat16"
    assert "quantize" not in {operation.kind for operation in compiler.compiled[0].operations}


def test_several_layers_are_returned_in_order(wanted: MiningBuild) -> None:
    compiler = Compiler()
    build_mining_engine(replace(wanted, layers=(0, -1)), compiler=compiler)
    payload = inspect.describe(wanted.target).contract.capabilities.payload
    assert payload is not None
    assert (payload.shape, payload.layers) == ((2, 64), (0, -1))
    assert [tensor.name for tensor in compiler.compiled[0].outputs] == ["layer_0", "hidden"]


def test_scales_are_the_largest_magnitudes_of_real_tokens() -> None:
    weights, prompts = make_weights(SMALL, np.float32), make_prompts(SMALL)
    scales = calibrate(SMALL, weights, prompts, row_tokens=128, dtype="float32").activations
    assert set(scales) == {f"layers_{i}.{word}" for i in range(2) for word in ("qkv", "o", "mlp", "down")}
    norm = weights["model.layers.0.input_layernorm.weight"].astype(np.float64)
    ids = np.concatenate(prompts)
    x = weights["model.embed_tokens.weight"].astype(np.float64)[ids]
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + SMALL.norm_epsilon) * norm
    assert scales["layers_0.qkv"] == pytest.approx(np.abs(normed).max() / 448, rel=1e-5)
    batched = calibrate(SMALL, weights, prompts * 6, row_tokens=128, dtype="float32").activations
    assert batched == pytest.approx(scales, rel=1e-5)
    with pytest.raises(FailedPreconditionError, match="there is no prompt to calibrate on"):
        calibrate(SMALL, weights, [], row_tokens=128)


def test_padding_moves_no_scale() -> None:
    weights = make_weights(SMALL, np.float32)
    short = [np.array([5, 6, 7], np.int32)]
    weights["model.embed_tokens.weight"][0] *= 1000.0  # what padding holds, and no prompt here does
    loud = calibrate(SMALL, weights, short, row_tokens=128, dtype="float32").activations
    weights["model.embed_tokens.weight"][0] = 0.0
    assert calibrate(SMALL, weights, short, row_tokens=128, dtype="float32").activations == loud


def spoil(name: str, value: Any) -> Callable[[MiningBuild], MiningBuild]:
    return lambda wanted: replace(wanted, **{name: value})


def without_tokenizer(wanted: MiningBuild) -> MiningBuild:
    (wanted.model / "tokenizer.json").unlink()
    return wanted


def with_broken_tokenizer(wanted: MiningBuild) -> MiningBuild:
    (wanted.model / "tokenizer.json").write_text("{")
    return wanted


def with_ids_beyond(wanted: MiningBuild) -> MiningBuild:
    text = (wanted.model / "tokenizer.json").read_text()
    (wanted.model / "tokenizer.json").write_text(text.replace('"three": 35', '"three": 101'))
    return wanted


def with_other_figures(wanted: MiningBuild) -> MiningBuild:
    config = json.loads((wanted.model / "config.json").read_text())
    (wanted.model / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    return wanted


def with_a_layer_more(wanted: MiningBuild) -> MiningBuild:
    config = json.loads((wanted.model / "config.json").read_text())
    (wanted.model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    return wanted


def with_nan(wanted: MiningBuild) -> MiningBuild:
    with Checkpoint.open(wanted.model) as checkpoint:
        at = checkpoint.places["model.layers.1.self_attn.v_proj.weight"].begin
    path = wanted.model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[at : at + 2] = b"\xff\x7f"
    path.write_bytes(content)
    return wanted


def with_texts(text: bytes) -> Callable[[MiningBuild], MiningBuild]:
    def change(wanted: MiningBuild) -> MiningBuild:
        assert wanted.calibration is not None
        wanted.calibration.write_bytes(text)
        return wanted

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoil("tier", card_tier.load("hopper-141gb-generate")), "tier hopper-141gb-generate is no mining tier"),
        (spoil("calibration", None), "whose scales come from real activations: name a file of texts"),
        (spoil("layers", (2,)), "layers: 2 is not one of -1 to 1"),
        (without_tokenizer, "no tokenizer.json in"),
        (with_broken_tokenizer, "is no tokenizer that can be read"),
        (with_ids_beyond, "gives ids beyond the model's vocabulary of 101"),
        (with_other_figures, "has the extents [128, 64], expected [256, 64]"),
        (with_a_layer_more, "has no tensor model.layers.2.input_layernorm.weight"),
        (with_nan, "is not finite: is the checkpoint whole?"),
        (with_texts(b""), "there is no prompt to calibrate on"),
        (with_texts(b"\xff\xfe"), "the calibration texts are no UTF-8 at byte 1"),
        (with_texts(b"red\n" * 513), "513 calibration texts, at most 512 are taken"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_built_is_one_sentence_and_leaves_nothing(
    wanted: MiningBuild, change: Callable[[MiningBuild], MiningBuild], says: str
) -> None:
    changed = change(wanted)
    with pytest.raises(FabricError) as raised:
        build_mining_engine(changed, compiler=Compiler())
    assert says in raised.value.message
    assert "\n" not in raised.value.message
    assert not wanted.target.exists()


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a card")
def test_a_machine_without_the_builder_says_so_in_one_sentence(wanted: MiningBuild) -> None:
    says = "whose Python package tensorrt is not installed|this machine has no NVIDIA driver"
    with pytest.raises((NotFoundError, FailedPreconditionError), match=says):
        builder.find()
    with pytest.raises((NotFoundError, FailedPreconditionError), match=says):
        build_mining_engine(wanted)
    assert not wanted.target.exists()


def test_progress_never_goes_beyond_its_end(wanted: MiningBuild) -> None:
    seen: list[Progress] = []
    build_mining_engine(replace(wanted, progress=seen.append), compiler=Compiler())
    assert seen[0].step == "reading the checkpoint"
    assert seen[-1].step == "publishing"
    assert all(0 <= each.done <= each.total for each in seen)
    calibrating = [each.done for each in seen if each.step == "calibrating activations"]
    assert calibrating == sorted(calibrating)
    assert calibrating[-1] == 29


def test_a_network_of_all_layers_is_small_enough_to_be_kept(wanted: MiningBuild) -> None:
    """The network in 16 bits holds no copy of a weight: its constants are views on the checkpoint's file."""
    with Checkpoint.open(wanted.model) as checkpoint:
        graph = build_network(SMALL, checkpoint)
        projections = [value for name, value in graph.constants.items() if name.endswith("_proj_weight")]
        assert len(projections) == 14
        assert not any(value.flags.owndata for value in projections)
