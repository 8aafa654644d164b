# SPDX-License-Identifier: Apache-2.0
"""The lines that `ifab up` prints work as printed, with the real grpcurl."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import ROOT

if TYPE_CHECKING:
    from tests.support.suite import RunningSuite

TOOLS = ROOT / ".tools" / "bin"


@pytest.fixture(scope="session")
def answers(suite: RunningSuite) -> dict[str, str]:
    """What each line prints, by what it is said to show."""
    if not (TOOLS / "grpcurl").exists():
        pytest.fail("grpcurl is not there: run scripts/grpcurl first")
    environment = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
    printed = {}
    for line in suite.said["grpcurl"]:
        done = subprocess.run(
            ["bash", "-c", line["command"]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line['command']}: {done.stderr}"
        printed[line["shows"]] = done.stdout
    return printed


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that follow each other in `text`."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
        found.append(value)
    return found


def test_list_and_describe(answers: dict[str, str]) -> None:
    assert "ifabric.broker.v1.BrokerService" in answers["what the broker serves"].split()
    assert "message GenerationRequest {" in answers["a message"]
    [method] = [text for shows, text in answers.items() if shows.startswith("a method")]
    assert "rpc Generate ( .ifabric.broker.v1.GenerateRequest )" in method
    assert "Retry after UNAVAILABLE" in method, "the protoset carries the comments"


def test_generation_whole_and_streamed_agree(answers: dict[str, str]) -> None:
    [whole] = objects(answers["one answer"])
    streamed = objects(answers["one answer, streamed"])
    assert "started" in streamed[0]
    assert "finished" in streamed[-1]
    text = "".join(message["delta"].get("text", "") for message in streamed[1:-1])
    assert text == whole["result"]["samples"][0]["text"]
    assert "Paris" in text


def test_nodes_and_contracts(answers: dict[str, str], suite: RunningSuite) -> None:
    [nodes] = objects(answers["the nodes"])
    assert [node["state"] for node in nodes["nodes"]] == ["NODE_STATE_ACCEPTED"]
    [engines] = objects(answers["the contracts of the engines that serve"])
    [engine] = engines["engines"]
    assert engine["contract"]["engine_id"] == suite.said["workers"][0]["engine_id"]
    assert engine["contract"]["limits"]["step_token_budget"] > 0


def test_every_named_service_is_healthy(answers: dict[str, str], suite: RunningSuite) -> None:
    health = {shows: objects(text) for shows, text in answers.items() if shows.startswith("health of")}
    assert all(status == [{"status": "SERVING"}] for status in health.values()), health
    names = {shows.partition(", ")[2] for shows in health}
    assert {"", "liveness", f"engine/{suite.said['workers'][0]['engine_id']}"} < names
    assert {name.rpartition(".")[2] for name in names if name.endswith("Service")} == {
        "BrokerService", "JobService", "OperatorService", "GRPCInferenceService", "ProvisionerService", "WorkerService",
    }  # fmt: skip
