# SPDX-License-Identifier: Apache-2.0
"""What a KServe call may say: both forms of values, and every way to say them wrong, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ifabric.kserve.v2 import inference_pb2
from services.broker.kserve.calls import in_their_words, read
from services.common.errors import InvalidArgumentError, UnimplementedError, Violation

if TYPE_CHECKING:
    from collections.abc import Callable

Call = inference_pb2.ModelInferRequest
LISTS = "inputs.input_ids.contents"


def ids_call(**tensor: Any) -> Call:
    """A call with token ids in legible form."""
    call = Call(model_name="texts")
    call.inputs.add(name="input_ids", **{"datatype": "INT32", "shape": [3], **tensor})
    return call


def raw(name: str, datatype: str, shape: list[int], data: bytes) -> Call:
    """A call with its values as bytes."""
    call = Call(model_name="texts", raw_input_contents=[data])
    call.inputs.add(name=name, datatype=datatype, shape=shape)
    return call


@pytest.mark.parametrize(
    "call",
    [
        ids_call(contents={"int_contents": [7, 8, 9]}),
        ids_call(datatype="INT64", contents={"int64_contents": [7, 8, 9]}),
        raw("input_ids", "INT32", [3], np.array([7, 8, 9], "<i4").tobytes()),
        raw("input_ids", "INT64", [1, 3], np.array([7, 8, 9], "<i8").tobytes()),
    ],
    ids=["int32", "int64", "raw int32", "raw int64, two dimensions"],
)
def test_ids_come_out_packed(call: Call) -> None:
    made = read(call, "a-tenant").request
    assert np.frombuffer(made.prompt.packed_token_ids, "<i4").tolist() == [7, 8, 9]
    assert (made.engine.engine_id, made.tenant, made.return_token_ids) == ("texts", "a-tenant", True)


def test_parameters_land_in_their_fields() -> None:
    call = raw("text_input", "BYTES", [1], b"\x02\x00\x00\x00\xc3\xa9")
    call.parameters["max_tokens"].uint64_param = 5
    call.parameters["temperature"].double_param = 0.5
    call.parameters["seed"].int64_param = 11
    call.parameters["stop"].string_param = "."
    call.parameters["ignore_end"].bool_param = True
    call.outputs.add(name="output_logprobs")
    made = read(call, "").request
    assert made.prompt.text == "é"
    assert (made.max_tokens, made.sampling.temperature, made.sampling.seed) == (5, 0.5, 11)
    assert (list(made.stop), made.ignore_end, made.logprobs, made.return_token_ids) == (["."], True, True, False)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (Call(model_name="texts"), "inputs"),
        (raw("prompt", "BYTES", [1], b""), "inputs"),
        (raw("text_input", "FP32", [1], b"abcd"), "inputs.text_input.datatype"),
        (raw("text_input", "BYTES", [2], b""), "inputs.text_input.shape"),
        (raw("text_input", "BYTES", [1], b"\x05\x00\x00\x00ab"), "inputs.text_input"),
        (raw("text_input", "BYTES", [1], b"\x05\x00"), "inputs.text_input"),
        (raw("text_input", "BYTES", [1], b"\x01\x00\x00\x00\xff"), "inputs.text_input"),
        (raw("text_input", "BYTES", [1], b""), "inputs.text_input"),
        (raw("input_ids", "FP32", [1], b"abcd"), "inputs.input_ids.datatype"),
        (raw("input_ids", "INT32", [2, 2], bytes(16)), "inputs.input_ids.shape"),
        (raw("input_ids", "INT32", [-1], bytes(4)), "inputs.input_ids.shape"),
        (raw("input_ids", "INT32", [1], bytes(5)), "inputs.input_ids"),
        (raw("input_ids", "INT32", [3], bytes(8)), "inputs.input_ids"),
        (raw("input_ids", "INT64", [1], np.array([2**40], "<i8").tobytes()), "inputs.input_ids"),
        (ids_call(contents={"int_contents": [7, 8]}), "inputs.input_ids"),
        (ids_call(contents={"int64_contents": [7, 8, 9]}), f"{LISTS}.int64_contents"),
        (
            ids_call(contents={"int_contents": [7, 8, 9], "fp32_contents": [1]}),
            "inputs.input_ids.contents.fp32_contents",
        ),
    ],
)
def test_bad_inputs_are_named(call: Call, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as told:
        read(call, "")
    assert [violation.field for violation in told.value.violations] == [field]


def doubled(call: Call) -> None:
    call.raw_input_contents.append(b"")


def both_forms(call: Call) -> None:
    call.inputs[0].contents.int_contents.append(1)


def nameless(call: Call) -> None:
    call.model_name = ""


@pytest.mark.parametrize(
    ("change", "field"),
    [(doubled, "raw_input_contents"), (both_forms, "inputs.input_ids.contents"), (nameless, "model_name")],
)
def test_contradictions_are_named(change: Callable[[Call], None], field: str) -> None:
    call = raw("input_ids", "INT32", [1], bytes(4))
    change(call)
    with pytest.raises(InvalidArgumentError) as told:
        read(call, "")
    assert [violation.field for violation in told.value.violations] == [field]


def test_what_is_not_served_is_refused_by_name_all_at_once() -> None:
    call = ids_call(contents={"int_contents": [7, 8, 9]})
    call.parameters["priority"].int64_param = 1
    call.parameters["timeout"].int64_param = 1
    call.outputs.add(name="attention")
    call.inputs[0].parameters["shared_memory_region"].string_param = "x"
    with pytest.raises(UnimplementedError) as told:
        read(call, "")
    assert [violation.field for violation in told.value.violations] == [
        "parameters.priority", "parameters.timeout", "outputs.attention", "inputs.input_ids.parameters",
    ]  # fmt: skip


def test_refusals_of_the_front_door_are_told_in_the_calls_words() -> None:
    theirs = {
        "sampling.top_p": "parameters.top_p", "prompt.text": "inputs.text_input", "x": "x", "x[1]": "x[1]",
        "prompt.packed_token_ids[7]": "inputs.input_ids[7]", "stop[0]": "parameters.stop", "sampling": "parameters",
    }  # fmt: skip
    told = in_their_words(InvalidArgumentError.of([Violation(field, "is 3") for field in theirs]))
    assert [each.field for each in told.violations] == list(theirs.values())
    assert told.message.startswith("parameters.top_p: is 3")
