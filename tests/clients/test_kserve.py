# SPDX-License-Identifier: Apache-2.0
"""The KServe protocol of a real suite, spoken by the public tritonclient, unmodified, in an environment of its own."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ifabric.broker.v1 import broker_service_pb2
from ifabric.kserve.v2 import inference_pb2
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.support.door import Door

pytestmark = pytest.mark.e2e

PYTHON = ROOT / ".tools" / "tritonclient" / "bin" / "python"
SESSION = Path(__file__).with_name("triton_session.py")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def said(door: Door) -> dict[str, Any]:
    """What the client got."""
    if not PYTHON.exists():
        pytest.fail("the client's environment is not there: run scripts/tritonclient first")
    command = [str(PYTHON), str(SESSION), door.suite.broker]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def messages(found: Any, prefix: str = "") -> dict[str, dict[str, list[int]]]:
    """Number and type of each field, by message, as the session prints them."""
    listed: dict[str, dict[str, list[int]]] = {}
    for message in found:
        listed[prefix + message.name] = {field.name: [field.number, field.type] for field in message.fields}
        listed |= messages(message.nested_types, f"{prefix}{message.name}.")
    return listed


async def ours(door: Door, prompt: str | list[int], most: int, *, states: bool = False) -> Any:
    """The same request by our own protocol."""
    request = door.request("", prompt, most=most, states=states)
    async with door.broker() as broker:
        reply = await broker.Generate(broker_service_pb2.GenerateRequest(request=request), timeout=PATIENCE_S)
    return reply.result


def test_messages_are_the_protocols(said: dict[str, Any]) -> None:
    ours_ = messages(inference_pb2.DESCRIPTOR.message_types_by_name.values())
    assert len(ours_) > 15
    assert {name: said["messages"].get(name) for name in ours_} == ours_


def test_server_and_models_are_ready(said: dict[str, Any]) -> None:
    assert (said["live"], said["ready"], said["server"]) == (True, True, "inference-fabric")
    assert said["models"] == [True, True, False]


def test_metadata_tell_inputs_and_outputs(said: dict[str, Any], door: Door) -> None:
    metadata = said["metadata"]
    assert metadata["platform"] == "simulated"
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["text_input", "input_ids"]
    form = door.states["capabilities"]["payload"]
    assert metadata["outputs"] == [
        {"name": "hidden_states", "datatype": "FP16", "shape": [str(extent) for extent in form["shape"]]}
    ]


async def test_text_in_gives_the_text_that_our_own_protocol_gives(said: dict[str, Any], door: Door) -> None:
    result = await ours(door, "The capital of", 12)
    whole = said["whole"]
    assert (whole["id"], whole["model"], whole["version"]) == ("w1", "texts", result.engine_digest)
    assert whole["outputs"] == ["output_ids", "text_output"]
    assert whole["text"] == result.samples[0].text
    assert whole["ids"] == list(result.samples[0].token_ids) != []
    cost = whole["parameters"]
    assert cost["finish_reason"] in ("stop", "length")
    assert (cost["prompt_tokens"], cost["generated_tokens"]) == (
        result.usage.prompt_tokens, result.usage.generated_tokens,
    )  # fmt: skip


async def test_token_ids_in_either_width_and_shape(said: dict[str, Any], door: Door) -> None:
    result = await ours(door, IDS, 6)
    assert [made["ids"] for made in said["by_ids"]] == [list(result.samples[0].token_ids)] * 3
    assert {made["parameters"]["prompt_tokens"] for made in said["by_ids"]} == {len(IDS)}


async def test_hidden_states_out_bit_for_bit(said: dict[str, Any], door: Door) -> None:
    result = await ours(door, IDS, 0, states=True)
    hidden = said["hidden"]
    assert (hidden["dtype"], hidden["shape"]) == ("float16", list(result.payload.shape))
    assert bytes.fromhex(hidden["hex"]) == result.payload.data
    assert any(result.payload.data)


async def test_streams_run_side_by_side_and_a_bad_request_harms_no_other(said: dict[str, Any], door: Door) -> None:
    result = await ours(door, "One head, two tails", 12)
    for name in ("a", "b"):
        pieces = said["stream"][name]
        assert "".join(piece["text"] or "" for piece in pieces) == result.samples[0].text
        ids = [token for piece in pieces for token in piece["ids"] or []]
        assert ids == list(result.samples[0].token_ids)
        assert [piece["parameters"]["triton_final_response"] for piece in pieces] == [False] * (len(pieces) - 1) + [
            True
        ]
        assert pieces[-1]["parameters"]["generated_tokens"] == result.usage.generated_tokens
    [error] = said["stream"]["errors"]
    assert error["message"] == (
        "request 'c': NOT_FOUND: model_name: no accepted node serves 'nobody'; served are: states, texts"
    )


def test_refusals_speak_the_clients_words(said: dict[str, Any]) -> None:
    assert said["no_limit"]["status"] == "StatusCode.INVALID_ARGUMENT"
    assert said["no_limit"]["message"].startswith("parameters.max_tokens:")
    assert said["unknown_model"]["status"] == "StatusCode.NOT_FOUND"
    assert said["unknown_model"]["message"].startswith("model_name: no accepted node serves 'nobody'")
    assert said["unknown_version"]["message"].startswith("model_version: no accepted node serves '7' of 'texts'")
    assert said["unknown_id"]["message"].startswith("inputs.input_ids[1]: is -1")
    assert said["unknown_parameter"]["status"] == "StatusCode.UNIMPLEMENTED"
    assert said["unknown_parameter"]["message"].startswith("parameters.beam_width: not served")
    assert "parameters.max_tokens: is no whole number" in said["not_a_number"]["message"]
    assert "(and 1 more)" in said["not_a_number"]["message"]
    assert "inputs.input_ids.shape: is [2, 4]" in said["batch"]["message"]


def test_an_output_that_the_model_does_not_make_is_refused(said: dict[str, Any]) -> None:
    assert said["other_outputs"]["status"] == "StatusCode.INVALID_ARGUMENT"
    assert said["other_outputs"]["message"] == (
        "outputs.hidden_states: is not made by 'texts', which makes text_output, output_ids, output_logprobs"
    )


def test_a_refusal_of_very_much_reaches_a_client_that_takes_little_metadata(said: dict[str, Any]) -> None:
    assert said["too_many_parameters"]["status"] == "StatusCode.UNIMPLEMENTED"
    assert "and 484 more: not served" in said["too_many_parameters"]["message"]


def test_the_client_for_event_loops_streams_cancels_and_is_out_of_time(said: dict[str, Any]) -> None:
    answered = said["async"]
    name, error = answered["first"]
    assert (name in ("a", "b"), error) == (True, None)
    assert answered["late"] == "StatusCode.DEADLINE_EXCEEDED"
    assert answered["again"]["parameters"]["generated_tokens"] == 2


def test_the_pages_example_runs_as_it_stands(door: Door) -> None:
    example, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kserve.md").read_text(), flags=re.DOTALL)
    example = example.replace("127.0.0.1:7600", door.suite.broker).replace("smollm2-135m-instruct-q8_0-cpu", "texts")
    done = subprocess.run(
        [str(PYTHON), "-c", example], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
