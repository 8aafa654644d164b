# SPDX-License-Identifier: Apache-2.0
"""A sweep finds what was planted, ranks it, goes on where it was, and proposes an engine that holds."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engines import inspect
from engines.simulated import write_simulated_engine
from engines.sweep.journal import Journal
from engines.sweep.searching import SweepResult, search
from engines.sweep.settings import Setting, grid, open_engine
from engines.sweep.variants import write_variant
from services.common.errors import FailedPreconditionError, InvalidArgumentError
from tests.judging.native_runs import NativeRuns
from tests.support import suite

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def prompts(count: int, tokens: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 250, tokens).tolist() for _ in range(count)]


def swept(
    folder: Path, work: Sequence[Sequence[int]], tokens: int, levers: Sequence[str], **engine: Any
) -> tuple[SweepResult, NativeRuns]:
    write_simulated_engine(folder / "engine", **engine)
    opened = open_engine(folder / "engine")
    runs = NativeRuns(opened, folder / "variants", work, tokens)
    return asyncio.run(search(opened, runs, Journal(None, "test"), levers=levers)), runs


def near(values: list[int], found: int, planted: int) -> bool:
    """Whether two values of a grid are at most one step apart."""
    return abs(values.index(found) - values.index(min(values, key=lambda value: abs(value - planted)))) <= 1


def test_a_planted_optimum_of_slots_is_found(tmp_path: Path) -> None:
    # Thirty-two requests, a step that costs the same whatever is in it: more than 32 slots are of no use.
    result, _ = swept(
        tmp_path, prompts(32, 16), 64, ["slots"], slots=8, step_token_budget=1024, step_us=5_000, prompt_token_ns=0
    )
    values = [point.setting.slots for point in result.curves[-1].points]
    assert near(values, result.best.setting.slots, 32)
    assert result.gain > 3, "from 8 to 32 at a time"


def test_a_planted_optimum_of_the_budget_is_found(tmp_path: Path) -> None:
    # All prompts of 64 slots fit one step from a budget of 64 * 32 on; a prompt token costs nothing, a step does.
    result, _ = swept(
        tmp_path, prompts(64, 32), 2, ["budget"], slots=64, step_token_budget=256, step_us=5_000, prompt_token_ns=0,
        generated_token_ns=0, max_input_tokens=64,
    )  # fmt: skip
    values = [point.setting.budget for point in result.curves[-1].points]
    assert near(values, result.best.setting.budget, 2048)
    assert result.worth[0].lever == "budget"


def test_levers_are_ranked_by_what_they_are_worth(tmp_path: Path) -> None:
    # Long answers: slots are worth eight times, the budget almost nothing, the cache's block nothing at all.
    result, _ = swept(
        tmp_path, prompts(64, 16), 64, ["budget", "slots", "block"], slots=8, step_token_budget=512, step_us=5_000,
        prompt_token_ns=1_000, kv_block_tokens=16,
    )  # fmt: skip
    assert result.worth[0].lever == "slots"
    worth = {each.lever: each.gain for each in result.worth}
    assert worth["slots"] > 2
    assert worth["block"] == pytest.approx(1.0, abs=0.05)


def test_the_budget_comes_first_and_a_flat_curve_is_left(tmp_path: Path) -> None:
    result, runs = swept(tmp_path, prompts(4, 8), 4, ["slots", "budget"], slots=4, step_token_budget=64, step_us=5_000)
    assert result.curves[0].lever == "budget"
    assert result.curves[0].flat
    assert max(setting.budget for setting in runs.measured) < 64 * 8, "the last values were not tried"


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path / "engine", slots=4, step_token_budget=64, step_us=5_000)
    opened = open_engine(tmp_path / "engine")
    first = NativeRuns(opened, tmp_path / "first", prompts(8, 8), 8)
    path = tmp_path / "sweep.jsonl"
    whole = asyncio.run(search(opened, first, Journal(path, "work"), levers=["budget", "slots"]))
    lines = path.read_text().splitlines()
    half = len(lines) // 2
    path.write_text("\n".join([*lines[:half], lines[half][:20]]))
    again = NativeRuns(opened, tmp_path / "again", prompts(8, 8), 8)
    result = asyncio.run(search(opened, again, Journal(path, "work"), levers=["budget", "slots"]))
    assert len(again.measured) == len(first.measured) - half
    assert result.best.setting == whole.best.setting
    other = NativeRuns(opened, tmp_path / "other", prompts(8, 8), 8)
    asyncio.run(search(opened, other, Journal(path, "other work"), levers=["budget"]))
    assert other.measured, "figures of other work are not used"


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("milk\n")
    with pytest.raises(FailedPreconditionError, match="line 1, is none that a sweep wrote"):
        Journal(path, "work")


def test_a_variant_is_an_engine_that_holds(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path / "engine", slots=16, step_token_budget=512, kv_block_tokens=16, kv_pool_blocks=64)
    opened = open_engine(tmp_path / "engine")
    target = write_variant(opened, tmp_path / "variant", Setting(1024, 32, chunk=False, block=32), engine_id="other")
    assert inspect.verify(target) == []
    limits = inspect.describe(target).contract.limits
    assert (limits.step_token_budget, limits.slots, limits.kv_block_tokens) == (1024, 32, 32)
    assert json.loads((target / "simulated.json").read_text())["kv_pool_blocks"] == 32, "the pool has the same tokens"
    with pytest.raises(FailedPreconditionError, match="exists"):
        write_variant(opened, target, opened.setting)
    with pytest.raises(InvalidArgumentError, match="slots: 32, expected at most step_token_budget, 8"):
        write_variant(opened, tmp_path / "refused", Setting(8, 32, chunk=False, block=32))
    assert not (tmp_path / "refused").exists()


def test_a_variant_of_a_real_engine_says_what_memory_it_takes(tmp_path: Path) -> None:
    opened = open_engine(suite.ENGINE)
    more = Setting(1024, opened.setting.slots * 2, heads=opened.setting.heads)
    variant = inspect.describe(write_variant(opened, tmp_path / "variant", more))
    assert inspect.verify(tmp_path / "variant") == []
    # 16 more sequences of 1,280 tokens, 30 layers, keys and values of 192 half floats; 512 more rows of a step.
    cache, step = 16 * 1280 * 30 * 2 * 192 * 2, 512 * 4 * (49152 + 32 * 576)
    assert variant.contract.card.memory_bytes - opened.contract.card.memory_bytes == cache + step


def test_the_grid_keeps_to_what_can_be(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path / "engine", slots=16, step_token_budget=64)
    opened = open_engine(tmp_path / "engine")
    assert grid(opened, "budget", opened.setting) == [16, 32, 64, 128, 256, 512]
    assert grid(opened, "chunk", opened.setting) == [0, 1]
    assert grid(opened, "heads", opened.setting) == []
    with pytest.raises(InvalidArgumentError, match="colour"):
        asyncio.run(search(opened, NativeRuns(opened, tmp_path / "v", [], 1), Journal(None, ""), levers=["colour"]))


@pytest.mark.e2e
@pytest.mark.timeout(450)
def test_the_command_sweeps_through_a_suite_and_proposes_an_engine(tmp_path: Path) -> None:
    write_simulated_engine(
        tmp_path / "engine", slots=4, step_token_budget=64, step_us=20_000, time_mode="real", max_input_tokens=512
    )
    words = ["--levers", "chunk", "--requests", "8", "-n", "4", "--runs", "1", "--flat", "0.2"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} and more"}) + "\n" for n in range(8)))
    done = suite.run(
        "engine", "sweep", str(tmp_path / "engine"), *words, "--prompts", str(tmp_path / "prompts.jsonl"),
        "--propose", str(tmp_path / "proposed"), "--html", str(tmp_path / "sweep.html"), "--json", within_s=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [len(curve["points"]) for curve in said["curves"]] == [2] * len(said["curves"])
    assert inspect.verify(tmp_path / "proposed") == []
    assert (tmp_path / "sweep.html").read_text().count("<svg") == 1
    assert said["evidence"].startswith(str(tmp_path / "engine.evidence" / "sweep-"))
