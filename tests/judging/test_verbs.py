# SPDX-License-Identifier: Apache-2.0
"""The judging verbs of the command: each has an example and speaks JSON; failures are one sentence."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from engines.evidence import read_all
from engines.simulated import write_simulated_engine
from services.cli.app import app
from services.common.contract import engine_digest
from tests.judging import weights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.judging.weights import Weights

VERBS = ("audit", "compare", "ladder", "probe-guided", "sweep", "verdict")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_and_speaks_json(verb: str) -> None:
    shown = CliRunner().invoke(app, ["engine", verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0
    assert f"Example: ifab engine {verb}" in shown.output
    assert "--json" in shown.output


def test_an_audit_that_fails_names_the_tensor_and_exits_with_1(
    trained: Path, real_weights: Weights, tmp_path: Path
) -> None:
    spoiled = real_weights.copy()
    spoiled["layers.0.o"] *= 1000
    converted = weights.write_trained(tmp_path / "spoiled", spoiled, "float16")
    html = tmp_path / "audit.html"
    done = CliRunner().invoke(app, ["engine", "audit", str(trained), str(converted), "--json", "--html", str(html)])
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert said["holds"] is False
    assert said["findings"][0]["tensor"] == "model.layers.0.self_attn.o_proj.weight"
    assert "not what the source says" in done.stderr
    page = html.read_text()
    assert page.count("<svg") == 3
    assert "all its values are 1000 times what the source says" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched from elsewhere"


def test_an_audit_of_an_engine_directory_leaves_evidence(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine)
    weights.write_trained(tmp_path / "weights", real_weights, "bfloat16")
    (tmp_path / "weights" / "model.safetensors").rename(engine / "model.safetensors")
    (engine / "config.json").write_bytes((tmp_path / "weights" / "config.json").read_bytes())
    contract = json.loads((engine / "contract.json").read_text())
    for name in ("config.json", "model.safetensors"):
        data = (engine / name).read_bytes()
        entry = {"path": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        contract["files"].append(entry)
    (engine / "contract.json").write_text(json.dumps(contract))
    done = CliRunner().invoke(app, ["engine", "audit", str(trained), str(engine)])
    assert done.exit_code == 0, done.stderr
    documents, flawed = read_all(engine, engine_digest(engine))
    assert flawed == []
    assert [(each.kind, each.outcome) for each in documents] == [("audit", "holds")]
    figures = {figure.name: figure.value for figure in documents[0].figures}
    assert figures["bf16.tensors"] == len(real_weights.by_role)
    assert figures["bf16.failing"] == 0
    assert {attachment.path.partition("-")[0] for attachment in documents[0].attachments} == {"audit"}


def test_what_cannot_be_audited_is_one_sentence(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path / "engine")
    done = CliRunner().invoke(app, ["engine", "audit", str(tmp_path / "engine"), str(tmp_path / "engine")])
    assert done.exit_code == 1
    assert "holds no weights that can be read" in done.stderr
    assert len(done.stderr.splitlines()) == 1
