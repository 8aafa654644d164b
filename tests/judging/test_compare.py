# SPDX-License-Identifier: Apache-2.0
"""Two engines of one model, a second one of coarser weights: how far apart, found through real workers."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engines.compare.generation import GenerationComparison
from engines.compare.payloads import PayloadComparison
from engines.compare.report import Bounds, page, summary
from engines.compare.requests import fitting
from engines.evidence import read_all
from engines.simulated import Simulation, write_simulated_engine
from services.common.contract import Contract, engine_digest, from_document
from services.common.errors import FailedPreconditionError
from tests.support import suite

if TYPE_CHECKING:
    from pathlib import Path

    from engines.llama_tool import LlamaTool

PROMPTS = ["The capital of France is", "Water boils at a temperature of", "Once upon a time there was a"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    return path


@pytest.fixture
def coarse(tool: LlamaTool, tmp_path: Path) -> Path:
    """The bundled engine with weights of four bits."""
    directory = tmp_path / "coarse"
    directory.mkdir()
    contract = json.loads((suite.ENGINE / "contract.json").read_text())
    for name in {file["path"] for file in contract["files"]} - {"model.gguf"}:
        shutil.copy(suite.ENGINE / name, directory)
    tool.quantize(suite.ENGINE / "model.gguf", directory / "model.gguf", "q4_1", threads=2)
    contract["engine_id"] += "-coarse"
    contract["model"]["weights_dtype"] = "q4_1"
    for file in contract["files"]:
        data = (directory / file["path"]).read_bytes()
        file["size_bytes"], file["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    (directory / "contract.json").write_text(json.dumps(contract))
    return directory


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(450)
def test_coarser_weights_are_further_away_than_the_same(coarse: Path, prompts: Path, tmp_path: Path) -> None:
    words = ["--prompts", str(prompts), "-n", "6", "--json", "--no-evidence"]
    same = suite.run("engine", "compare", str(suite.ENGINE), str(suite.ENGINE), *words, within_s=200)
    assert same.returncode == 0, same.stderr
    said = json.loads(same.stdout)
    assert said["kl_mean"] == pytest.approx(0.0, abs=1e-9)
    assert (said["top1_agreement"], said["same_greedy_texts"]) == (1.0, 3)
    assert (said["given_tokens"] > 10, said["given_difference_max"]) == (True, 0.0)
    html = tmp_path / "comparison.html"
    words = ["--prompts", str(prompts), "-n", "6", "--json", "--max-kl", "0.0001", "--html", str(html)]
    other = suite.run("engine", "compare", str(suite.ENGINE), str(coarse), *words, within_s=200)
    assert other.returncode == 1, other.stderr
    said = json.loads(other.stdout)
    assert "error" not in said, said
    assert 0.0001 < said["kl_mean"] < 2
    assert said["top1_agreement"] > 0.3
    assert "the mean divergence is" in said["broken"][0]
    mean = np.log(said["perplexity_b"] / said["perplexity_a"])
    assert said["given_difference_mean"] == pytest.approx(mean, abs=1e-6)
    assert 0.01 < said["given_difference_rms"] <= said["given_difference_max"] < 3
    assert html.read_text().count("<svg") == 4
    documents, flawed = read_all(coarse, engine_digest(coarse))
    assert flawed == []
    assert [(each.kind, each.outcome) for each in documents] == [("comparison", "fails")]
    assert documents[0].inputs[0].sha256 == engine_digest(suite.ENGINE)


@pytest.mark.e2e
@pytest.mark.timeout(450)
def test_given_tokens_are_compared_exactly(prompts: Path, tmp_path: Path) -> None:
    engines = [write_simulated_engine(tmp_path / name, engine_id=name, seed=at) for at, name in enumerate("ab", 1)]
    words = ["--prompts", str(prompts), "-n", "2", "--max-difference", "0.001", "--json"]
    done = suite.run("engine", "compare", str(tmp_path / "a"), str(tmp_path / "b"), *words, within_s=200)
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    texts = [list(each.encode()) for each in PROMPTS]
    a, b = (np.concatenate([Simulation(each).prompt_logprobs(ids)[1:] for ids in texts]) for each in engines)
    assert said["given_tokens"] == a.size == sum(len(ids) - 1 for ids in texts)
    assert said["given_difference_mean"] == pytest.approx(np.mean(a - b), abs=1e-5)
    assert said["given_difference_rms"] == pytest.approx(np.sqrt(np.mean((a - b) ** 2)), abs=1e-5)
    assert said["given_difference_max"] == pytest.approx(np.abs(a - b).max(), abs=1e-5)
    assert "99 of 100 given tokens differ by up to" in said["broken"][0]


@pytest.mark.e2e
@pytest.mark.timeout(450)
def test_hidden_states_are_compared_by_their_direction(prompts: Path, tmp_path: Path) -> None:
    options = {"max_output_tokens": 0, "payload_dtype": "float32", "kv_block_tokens": None}
    for name, seed in (("a", 1), ("same", 1), ("other", 2)):
        write_simulated_engine(tmp_path / name, engine_id=name, seed=seed, **options)
    words = ["--prompts", str(prompts), "--min-cosine", "0.999", "--json"]
    same = suite.run("engine", "compare", str(tmp_path / "a"), str(tmp_path / "same"), *words, within_s=200)
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout)["cosine_min"] == pytest.approx(1.0)
    other = suite.run("engine", "compare", str(tmp_path / "a"), str(tmp_path / "other"), *words, within_s=200)
    assert other.returncode == 1, other.stderr
    said = json.loads(other.stdout)
    assert "error" not in said, said
    assert "0.999 is asked for" in said["broken"][0]


def comparison(kl: float = 0.01, top1: float = 0.95, given: tuple[float, ...] = (0.1, -0.3)) -> GenerationComparison:
    return GenerationComparison(
        2, 3, np.full(3, kl), kl, 0.001, np.full(3, top1), (None, 1), (10.0, 11.0), np.array(given)
    )


def test_bounds_say_what_is_not_kept() -> None:
    assert Bounds().broken(comparison()) == []
    assert Bounds(max_kl=0.02, min_top1=0.9).broken(comparison()) == []
    assert len(Bounds(max_kl=0.001, min_top1=0.99).broken(comparison())) == 2
    assert Bounds(max_difference=0.3).broken(comparison()) == []
    assert Bounds(max_difference=0.2).broken(comparison()), "the larger difference is negative"
    assert Bounds(max_difference=1.0).broken(comparison(given=())), "where nothing was scored nothing is kept"
    assert Bounds(max_kl=1.0).broken(comparison(kl=float("nan"))), "what is no number keeps no bound"
    states = PayloadComparison(1, (-1,), np.array([[0.9]]), np.array([[0.1]]), 3)
    assert [each.split()[0] for each in Bounds(min_cosine=0.95).broken(states)] == ["the", "3"]


def test_the_page_shows_every_figure() -> None:
    html = page(comparison(), "a", "b", ["it is too far away"], "ifab engine compare a b").decode()
    assert "Fails: it is too far away." in html
    assert "kl_standard_error" in html
    assert "1 of 2 greedy texts are the same" in summary(comparison())


def test_prompts_must_fit_both_engines(tmp_path: Path) -> None:
    contracts = []
    for name, vocab, most in (("a", 512, 100), ("b", 512, 20), ("c", 600, 100)):
        write_simulated_engine(tmp_path / name, vocab_size=vocab, max_input_tokens=most)
        document = json.loads((tmp_path / name / "contract.json").read_text())
        contracts.append(Contract.from_proto(from_document(document)))
    a, b, c = contracts
    assert fitting([[1] * 10, [1] * 16, []], a, b, 8) == [[1] * 10]
    with pytest.raises(FailedPreconditionError, match="no prompt has at most 12"):
        fitting([[1] * 16], a, b, 8)
    with pytest.raises(FailedPreconditionError, match="mean nothing"):
        fitting([[1]], a, c, 8)
