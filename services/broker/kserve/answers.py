# SPDX-License-Identifier: Apache-2.0
"""What the front door answers, as tensors of the KServe protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifabric.engine.v1 import generation_pb2
from ifabric.kserve.v2 import inference_pb2
from services.broker.kserve.tensors import (
    DATATYPES,
    HIDDEN_STATES,
    LOGPROBS,
    OUTPUT_IDS,
    TEXT_OUTPUT,
    Output,
    id_output,
    logprob_output,
    text_output,
    write,
)
from services.common.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ifabric.broker.v1 import broker_service_pb2
    from services.broker.kserve.calls import Call
    from services.broker.work import CatalogEngine

FINAL = "triton_final_response"
"""Parameter of a stream's responses: whether a request ends with this one."""
_REASON_PREFIX = "FINISH_REASON_"


def whole(call: Call, result: broker_service_pb2.GenerationResult) -> inference_pb2.ModelInferResponse:
    """Makes the response of ModelInfer.

    Raises:
        InternalError: the engine made no hidden states although the request completed.
    """
    response = _response(call, result.request_id, result.engine_digest)
    outputs = [] if not result.samples else [*_generated(call, result.samples[0])]
    write([*outputs, *_payload(call, result)], response)
    _tell_cost(result, response)
    return response


def piece(
    call: Call, started: broker_service_pb2.Started, delta: broker_service_pb2.Delta
) -> inference_pb2.ModelInferResponse:
    """Makes a response of a stream that carries new output."""
    response = _response(call, started.request_id, started.engine_digest)
    write(_generated(call, delta), response)
    response.parameters[FINAL].bool_param = False
    return response


def last(call: Call, result: broker_service_pb2.GenerationResult) -> inference_pb2.ModelInferResponse:
    """Makes the last response of a request on a stream: how it ended, what it cost, and its hidden states.

    Raises:
        InternalError: the engine made no hidden states although the request completed.
    """
    response = _response(call, result.request_id, result.engine_digest)
    write(_payload(call, result), response)
    _tell_cost(result, response)
    response.parameters[FINAL].bool_param = True
    return response


def describe(engines: list[CatalogEngine]) -> inference_pb2.ModelMetadataResponse:
    """Describes a model: engines of one id; at least one."""
    contract = engines[0].contract
    described = inference_pb2.ModelMetadataResponse(
        name=contract.engine_id, versions=sorted(engine.digest for engine in engines), platform=contract.runtime.name
    )
    described.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    described.inputs.add(name="input_ids", datatype="INT32", shape=[-1])
    if contract.limits.max_output_tokens:
        described.outputs.add(name=TEXT_OUTPUT, datatype="BYTES", shape=[1])
        described.outputs.add(name=OUTPUT_IDS, datatype="INT32", shape=[-1])
        described.outputs.add(name=LOGPROBS, datatype="FP32", shape=[-1])
    payload = contract.capabilities.payload
    if payload.WhichOneof("kind") == "value":
        form = payload.value
        described.outputs.add(name=HIDDEN_STATES, datatype=DATATYPES[form.dtype], shape=form.shape)
    return described


def _response(call: Call, request_id: str, digest: str) -> inference_pb2.ModelInferResponse:
    return inference_pb2.ModelInferResponse(
        model_name=call.request.engine.engine_id, model_version=digest, id=request_id
    )


def _generated(call: Call, made: broker_service_pb2.Sample | broker_service_pb2.Delta) -> Iterator[Output]:
    if TEXT_OUTPUT in call.outputs:
        yield text_output(made.text)
    if OUTPUT_IDS in call.outputs:
        yield id_output(made.token_ids)
    if LOGPROBS in call.outputs:
        yield logprob_output(made.logprobs)


def _payload(call: Call, result: broker_service_pb2.GenerationResult) -> Iterator[Output]:
    if HIDDEN_STATES not in call.outputs or not result.HasField("payload"):
        return
    payload = result.payload
    if payload.failure:
        raise InternalError(f"the engine made no hidden states: {payload.failure[:512]}")
    yield Output(HIDDEN_STATES, DATATYPES[payload.dtype], tuple(payload.shape), payload.data)


def _tell_cost(result: broker_service_pb2.GenerationResult, response: inference_pb2.ModelInferResponse) -> None:
    usage = result.usage
    for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens"):
        response.parameters[name].int64_param = getattr(usage, name)
    reason = result.samples[0].finish_reason if result.samples else generation_pb2.FINISH_REASON_COMPLETE
    word = generation_pb2.FinishReason.Name(reason).removeprefix(_REASON_PREFIX).lower()
    response.parameters["finish_reason"].string_param = word
