# SPDX-License-Identifier: Apache-2.0
"""`ifab engine plan`, `build` and `schema` from outside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from engines import evidence
from engines.simulated import write_simulated_engine
from tests.cli.test_commands import ifab
from tests.engines.models import GROUPED_70B, SMALL, config_document

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "Small Model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_document(SMALL)))
    return directory


def test_a_plan_is_a_sum_and_the_commands_that_build_it(model: Path, tmp_path: Path) -> None:
    words = ("engine", "plan", "--model", str(model), "--tier", "ada-24gb-long")
    done = ifab(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["memory_bytes"]["total"] == sum(v for k, v in said["memory_bytes"].items() if k != "total")
    assert (said["slots"], said["max_input_tokens"]) == (128, 3840)
    assert [command["line"].split()[0] for command in said["commands"]] == ["python3", "trtllm-build"]
    assert "--max_batch_size 128" in said["commands"][1]["line"]
    told = ifab(*words, cwd=tmp_path).stdout
    assert said["commands"][1]["line"] in told
    for command in said["commands"]:
        assert all(flag["why"] in told for flag in command["flags"])


def test_all_tiers_are_a_line_each_and_what_does_not_fit_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_document(GROUPED_70B.shape)))
    done = ifab("engine", "plan", "--model", ".", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == 21
    assert any(line.startswith("ada-24gb-generate ") and "does not fit this model" in line for line in lines)
    assert any(line.startswith("hopper-141gb-generate ") and "slots, budget 8,192" in line for line in lines)
    refused = ifab("engine", "plan", "--model", ".", "--tier", "ada-24gb-mining", "--json", cwd=tmp_path)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["message"].count(" GiB") == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tier", "ada-24gb-generate"), "name its directory with --model"),
        (("--tier", "h300-generate", "--model", "m"), "there is no tier h300-generate; there are ada-24gb-generate"),
        (("--tier", "ada-24gb-generate", "--model", "m"), "are not on this machine: build in the image of"),
        (("--tier", "ada-24gb-mining", "--model", "m"), "no config.json in m: name the directory of a checkpoint"),
        (("--tier", "ada-24gb-mining", "--model", "m", "--name", "A b"), "'A b' cannot begin an engine's id"),
        (("--tier", "cpu-nothing"), "there is no tier cpu-nothing"),
    ],
)
def test_what_cannot_be_built_here_is_one_sentence(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = ifab("engine", "build", "engine", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_schema_of_contracts_is_printed_for_others(tmp_path: Path) -> None:
    done = ifab("engine", "schema", cwd=tmp_path)
    printed = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed["title"] == "contract.json"
    unknown = ifab("engine", "schema", "nothing", cwd=tmp_path)
    assert unknown.returncode == 1
    assert "name one of contract, evidence" in unknown.stderr


def test_evidence_is_listed_and_what_does_not_count_says_why(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine)
    kept = evidence.write(
        engine, kind="audit", outcome="holds", summary="272 tensors hold", command="ifab engine audit a b"
    )
    (kept.parent / "ladder-0.json").write_text("{")
    done = ifab("engine", "evidence", "engine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "audit  holds" in first
    assert "272 tensors hold (ifab engine audit a b)" in first
    assert second.startswith("! ")
    assert "ladder-0.json: no JSON at character 2" in second
    said = json.loads(ifab("engine", "evidence", "engine", "--json", cwd=tmp_path).stdout)
    assert [each["kind"] for each in said["evidence"]] == ["audit"]
    assert [each["kind"] for each in said["flawed"]] == ["ladder"]
