# SPDX-License-Identifier: Apache-2.0
"""Engines by TensorRT-LLM's tools: what they are told, what is made of what they write, and what is not believed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import pytest

from engines import card_tier, inspect, planner
from engines.vendor import commands
from engines.vendor.build import VendorBuild, build_vendor_engine
from engines.vendor.tools import VendorTools
from services.common import schema
from services.common.errors import FabricError, FailedPreconditionError, NotFoundError
from tests.engines import vendor_standin
from tests.engines.models import GROUPED_8B, SMALL, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

GENERATION = [name for name in card_tier.names() if not name.endswith("-mining")]


@pytest.mark.parametrize("name", GENERATION)
def test_commands_say_everything_and_give_a_reason_for_each(name: str) -> None:
    plan = planner.plan(card_tier.load(name), GROUPED_8B)
    made = (
        commands.quantize(plan, Path("model"), Path("texts"), Path("checkpoint")),
        commands.build(plan, Path("checkpoint"), Path("engine")),
    )
    for command, known in zip(made, (vendor_standin.QUANTIZE, vendor_standin.BUILD), strict=True):
        assert [flag.name.removeprefix("--") for flag in command.flags] == known
        assert all(len(flag.why) > 10 for flag in command.flags)
        words = shlex.split(command.line())
        assert words[-len(command.arguments()) :] == command.arguments()
    said = dict(zip(made[1].arguments()[::2], made[1].arguments()[1::2], strict=True))
    assert said["--max_batch_size"] == str(plan.slots)
    assert said["--max_num_tokens"] == str(plan.tier.generation.step_token_budget)
    assert said["--max_seq_len"] == str(plan.max_sequence_tokens)
    fp8 = ("--use_paged_context_fmha", "--use_fp8_context_fmha", "--multiple_profiles", "--remove_input_padding")
    assert {said[flag] for flag in fp8} == {"enable"}


def test_one_checkpoint_serves_all_tiers_of_one_card() -> None:
    plans = [planner.plan(card_tier.load(name), GROUPED_8B) for name in GENERATION]
    lines = {commands.quantize(plan, Path("m"), Path("t"), Path("c")).line() for plan in plans if plan.cards.count == 1}
    assert len(lines) == 1


class Scene:
    """Programs, a model and texts in one folder."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("quantize.py", "trtllm-build"):
            text = Path(vendor_standin.__file__).read_text()
            (self.bin / name).write_text(f"#!{sys.executable}\n{text}")
            (self.bin / name).chmod(0o755)
        self.asked()
        write_checkpoint(folder / "model", SMALL, ml_dtypes.bfloat16)
        (folder / "model" / "tokenizer.json").write_text("{}")
        (folder / "texts").mkdir()
        (folder / "texts" / "a.txt").write_text("one\ntwo\n")
        self.wanted = VendorBuild(
            folder / "engines" / "small",
            card_tier.load("hopper-141gb-generate"),
            folder / "model",
            "small",
            folder / "texts",
        )
        self.tools = VendorTools.find(quantize=self.bin / "quantize.py", path=str(self.bin))

    def asked(self, **asked: Any) -> None:
        (self.bin / "standin.json").write_text(json.dumps(asked))

    def calls(self) -> list[str]:
        calls = self.bin / "calls.txt"
        return calls.read_text().split() if calls.exists() else []


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_an_engine_is_whole_and_says_what_it_was_planned_to_be(scene: Scene) -> None:
    built = build_vendor_engine(scene.wanted, scene.tools)
    assert built.fresh
    assert inspect.verify(scene.wanted.target) == []
    contract = inspect.describe(scene.wanted.target).contract
    plan = planner.plan(scene.wanted.tier, planner_model(scene))
    assert contract.engine_id == "small-fp8-hopper-141gb-generate"
    assert (contract.limits.slots, contract.limits.step_token_budget) == (plan.slots, 8192)
    assert contract.limits.kv_cache_memory_fraction == plan.cache_fraction
    assert contract.card.memory_bytes == plan.memory.total
    assert (contract.runtime.name, contract.runtime.version) == ("tensorrt-llm", "1.2.1")
    assert {file.path for file in contract.files} == {
        "rank0.engine", "config.json", "executor.json", "tokenizer.json",
    }  # fmt: skip
    assert "use_fp8_context_fmha=enable" in contract.build.flags
    assert contract.build.calibration is not None
    settings = json.loads((scene.wanted.target / "executor.json").read_bytes())
    assert schema.check_text("executor", (scene.wanted.target / "executor.json").read_bytes())[1] == []
    assert settings["kv_cache"]["max_tokens"] >= plan.slots * plan.max_sequence_tokens
    assert "trtllm-build" in scene.wanted.target.with_name("small.build.log").read_text()


def planner_model(scene: Scene) -> Any:
    from engines import model_config

    return model_config.read(scene.wanted.model)


def test_the_checkpoint_is_made_once_for_all_tiers(scene: Scene) -> None:
    first = build_vendor_engine(scene.wanted, scene.tools)
    again = build_vendor_engine(scene.wanted, scene.tools)
    assert again == replace(first, fresh=False)
    long = replace(scene.wanted, target=scene.wanted.target.with_name("long"), tier=card_tier.load("hopper-80gb-long"))
    assert build_vendor_engine(long, scene.tools).fresh
    assert scene.calls() == ["quantize.py", "trtllm-build", "trtllm-build"]


def test_two_cards_have_two_ranks(scene: Scene) -> None:
    pair = replace(scene.wanted, tier=card_tier.load("blackwell-32gb-pair-generate"))
    build_vendor_engine(pair, scene.tools)
    contract = inspect.describe(pair.target).contract
    assert {"rank0.engine", "rank1.engine"} < {file.path for file in contract.files}
    assert (contract.card.count, contract.card.tensor_parallel) == (2, 2)


def test_a_build_that_failed_is_taken_up_where_it_was(scene: Scene) -> None:
    build = scene.bin / "trtllm-build"
    whole = build.read_text()
    build.write_text(whole.replace("quantizing = Path", 'asked["fail"] = 1\n    quantizing = Path'))
    with pytest.raises(FailedPreconditionError) as raised:
        build_vendor_engine(scene.wanted, scene.tools)
    assert re.search(r"^trtllm-build ended with status 3: \[TRT\] \[E\] out of memory; all that", raised.value.message)
    assert not scene.wanted.target.exists()
    build.write_text(whole)
    assert build_vendor_engine(scene.wanted, scene.tools).fresh
    assert scene.calls() == ["quantize.py", "trtllm-build", "trtllm-build"]
    assert inspect.verify(scene.wanted.target) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"without": ["use_fp8_context_fmha"]}, "trtllm-build does not know --use_fp8_context_fmha: it is of another"),
        ({"without": ["qformat", "seed"]}, "quantize.py does not know --qformat, --seed: it is of another release"),
        ({"changes": {"kv_cache_scaling_factor": 1.0}}, "every kv_cache_scaling_factor is exactly 1.0"),
        ({"changes": {"kv_cache_scaling_factor": None}}, "has no tensor transformer.layers.0.attention.kv_cache"),
        ({"changes": {"mlp.gate.activation_scaling_factor": None}}, "mlp.gate.activation_scaling_factor: quantise"),
        ({"changes": {"mlp.proj.weights_scaling_factor": float("nan")}}, "is not positive and finite everywhere"),
        ({"changes": {"mlp.proj.weights_scaling_factor": 0.0}}, "is not positive and finite everywhere"),
        ({"changes": {"quantization.kv_cache_quant_algo": None}}, "quantization.kv_cache_quant_algo is None, expected"),
        ({"changes": {"mapping.tp_size": 2}}, "mapping.tp_size is 2, expected 1"),
        ({"changes": {"build_config.max_batch_size": 8}}, "build_config.max_batch_size is 8, expected 2048"),
        (
            {"changes": {"build_config.plugin_config.use_fp8_context_fmha": False}},
            "plugin_config.use_fp8_context_fmha is False, expected True",
        ),
        ({"changes": {"ranks": 0}}, "trtllm-build ended well and wrote no rank0.engine"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_what_a_tool_leaves_out_or_makes_otherwise_is_no_engine(scene: Scene, asked: Any, says: str) -> None:
    scene.asked(**asked)
    with pytest.raises(FailedPreconditionError) as raised:
        build_vendor_engine(scene.wanted, scene.tools)
    assert says in raised.value.message
    assert not scene.wanted.target.exists()


def test_a_tool_that_hangs_is_ended(scene: Scene) -> None:
    scene.asked(hang=True)
    plan = planner.plan(scene.wanted.tier, planner_model(scene))
    command = commands.build(plan, scene.wanted.model, scene.wanted.target)
    with pytest.raises(FailedPreconditionError, match=r"trtllm-build took longer than 0\.5 s and was ended"):
        scene.tools.run(command, scene.bin / "log", limit_s=0.5)


def test_tools_that_are_not_here_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as raised:
        VendorTools.find(path=str(tmp_path))
    assert raised.value.message == (
        "engines that generate are built by TensorRT-LLM 1.2.1, and its quantize.py and trtllm-build are not on this "
        "machine: build in the image of deploy/images/tensorrt-llm; `ifab engine plan` shows the commands anywhere"
    )


def without(name: str) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        place = scene.wanted.model.parent / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return change


def without_an_end(scene: Scene) -> None:
    path = scene.wanted.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("model/tokenizer.json"), "no tokenizer.json in"),
        (without("model/model.safetensors"), "neither model.safetensors nor model.safetensors.index.json"),
        (without("model"), "no config.json in"),
        (without("texts"), "no such calibration texts"),
        (without_an_end, "names no eos_token_id: without one nothing ends a generation"),
    ],
)
def test_what_is_missing_is_said_before_any_tool_runs(scene: Scene, change: Callable[[Scene], None], says: str) -> None:
    change(scene)
    with pytest.raises(FabricError, match=re.escape(says)):
        build_vendor_engine(scene.wanted, scene.tools)
    assert scene.calls() == []
