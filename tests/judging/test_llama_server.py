# SPDX-License-Identifier: Apache-2.0
"""The ladder against a real server of others, llama.cpp's own, on the weights of the bundled engine."""

from __future__ import annotations

import json

import pytest

from benchmarks.llama_server import LlamaServerError, install, running
from tests.support import suite


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ladder_climbs_a_real_foreign_server() -> None:
    try:
        install()
    except LlamaServerError as error:
        pytest.skip(str(error))
    with running(suite.ENGINE / "model.gguf", slots=4, sequence_tokens=512) as url:
        words = ["--openai", url, "--rungs", "1,4", "--rung-s", "20", "--warmup-s", "1", "-n", "4", "--json"]
        done = suite.run("engine", "ladder", *words, within_s=300)
    assert done.returncode == 0, done.stderr
    ladder = json.loads(done.stdout)["alone"]
    assert ladder["target"] == f"OpenAI-compatible server at {url.removeprefix('http://')}"
    assert ladder["ended"] == ""
    for rung in ladder["rungs"]:
        assert rung["finished"] > 0
        assert (rung["errors"], rung["cut"]) == ({}, 0)
        assert rung["tokens_per_s"] == pytest.approx(rung["requests_per_s"] * 4, rel=0.5), "four tokens an answer"
