# SPDX-License-Identifier: Apache-2.0
"""Engine directories of mining plans: what the builder writes is what readers accept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engines import inspect
from engines.mining.directory import MiningEngine, write_directory
from engines.model_config import ModelShape
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = MiningEngine(
    engine_id="dense-7b-4-layers-bf16-h200-mining",
    shape=ModelShape(4, 4096, 11008, 32, 32, 128, 32000, 1e-5, 10000.0),
    row_tokens=128,
    rows=16,
    slots=256,
    weights_dtype="bfloat16",
    activations_dtype="bfloat16",
    layers=(-1,),
    card_family="nvidia-h200",
    compute_capability="9.0",
    card_memory_bytes=4 << 30,
    longest_step_ms=2000,
    runtime_version="10.6.0",
    flags=("network=engines.mining",),
    calibration=None,
)


def test_a_directory_is_whole_and_says_what_the_plan_was_built_for(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    digest = write_directory(target, ENGINE, b"plan", b"{}")
    assert inspect.verify(target) == []
    contract = inspect.describe(target).contract
    assert contract.limits.step_token_budget == contract.limits.built_step_token_budget == 2048
    assert contract.capabilities.payload is not None
    assert contract.capabilities.payload.size_bytes == 8192
    assert write_directory(target, ENGINE, b"plan", b"{}") == digest
    assert write_directory(target, ENGINE, b"another plan", b"{}") != digest
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["engine"]


def test_a_plan_with_plugins_has_their_library_beside_it(tmp_path: Path) -> None:
    target, library = tmp_path / "engine", tmp_path / "libifab_plugins.so"
    library.write_bytes(b"kernels")
    engine = replace(ENGINE, plugins=(library,))
    digest = write_directory(target, engine, b"plan", b"{}")
    assert json.loads((target / "tensorrt.json").read_text())["plugins"] == ["libifab_plugins.so"]
    assert (target / "libifab_plugins.so").read_bytes() == b"kernels"
    assert inspect.verify(target) == []
    library.write_bytes(b"other kernels")
    assert write_directory(target, engine, b"plan", b"{}") != digest
    other = library.rename(tmp_path / "attention.so")
    with pytest.raises(FailedPreconditionError, match="name of a shared library"):
        write_directory(target, replace(ENGINE, plugins=(other,)), b"plan", b"{}")


def test_several_layers_come_as_the_first_extent(tmp_path: Path) -> None:
    write_directory(tmp_path / "engine", replace(ENGINE, layers=(1, -1)), b"plan", b"{}")
    payload = inspect.describe(tmp_path / "engine").contract.capabilities.payload
    assert payload is not None
    assert payload.shape == (2, 4096)


def test_what_readers_would_refuse_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"limits\.slots: 0"):
        write_directory(tmp_path / "engine", replace(ENGINE, slots=0), b"plan", b"{}")
    assert not (tmp_path / "engine").exists()
