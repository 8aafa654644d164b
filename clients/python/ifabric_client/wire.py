# SPDX-License-Identifier: Apache-2.0
"""Values to messages and back."""

from __future__ import annotations

import zlib
from dataclasses import fields
from typing import Any

import numpy as np
from google.rpc import code_pb2, error_details_pb2

from ifabric.broker.v1 import broker_service_pb2 as pb
from ifabric.broker.v1 import job_service_pb2
from ifabric.engine.v1 import contract_pb2, generation_pb2
from ifabric_client.connection import MESSAGE_BYTES_MAX
from ifabric_client.errors import CallError, Violation, of_status
from ifabric_client.values import Answer, Engine, HiddenState, Job, Outcome, Request, Sampling, Usage

_DTYPES: dict[int, str] = {
    contract_pb2.PAYLOAD_DTYPE_FLOAT32: "<f4",
    contract_pb2.PAYLOAD_DTYPE_FLOAT16: "<f2",
    contract_pb2.PAYLOAD_DTYPE_BFLOAT16: "<u2",
}
_REQUEST_BYTES_MAX = MESSAGE_BYTES_MAX - 2 * 1024 * 1024
"""Longest request, in bytes: others that share its message are shorter than the rest."""
_SAMPLING = tuple(field.name for field in fields(Sampling))


def request_message(request: Request, request_id: str, tenant: str) -> pb.GenerationRequest:
    """Makes the message of a request.

    Raises:
        CallError: INVALID_ARGUMENT where a value does not go into the message, or the message is too long to be sent.
    """
    made = pb.GenerationRequest(request_id=request_id, tenant=tenant, return_token_ids=request.return_token_ids)
    if isinstance(request.prompt, str):
        try:
            made.prompt.text = request.prompt
        except ValueError as error:
            raise _refused("prompt", "holds half of a surrogate pair, which is no Unicode text") from error
    else:
        made.prompt.packed_token_ids = _packed(request.prompt)
    if request.engine_id:
        made.engine.engine_id = request.engine_id
    values: list[tuple[Any, str, Any]] = [(made, "max_tokens", request.max_tokens)]
    values += [(made.sampling, name, getattr(request.sampling, name)) for name in _SAMPLING]
    for message, name, value in values:
        if value is not None:
            try:
                setattr(message, name, value)
            except (TypeError, ValueError) as error:
                raise _refused(name, f"is {value!r}, which no field of its type holds") from error
    stop: Any = request.stop
    if isinstance(stop, str):
        raise _refused("stop", "is one text, of which each character would be a stop; a tuple of texts is wanted")
    try:
        made.stop.extend(stop)
    except (TypeError, ValueError) as error:
        raise _refused("stop", "holds something else than Unicode texts") from error
    if (size := made.ByteSize()) > _REQUEST_BYTES_MAX:
        raise _refused("prompt", f"makes a request of {size:,} bytes; allowed are {_REQUEST_BYTES_MAX:,}")
    return made


def check_row(row: object, position: int) -> None:
    """Looks whether a row is one, before anything of it is sent.

    Raises:
        TypeError: it is something else, such as a bare prompt.
    """
    if not isinstance(row, Request):
        raise TypeError(f"row {position} is a {type(row).__name__}; rows are Requests")


def _packed(prompt: Any) -> bytes:
    """Token ids as the protocol packs them: 32 bits each, little end first.

    Raises:
        CallError: INVALID_ARGUMENT: it is no flat sequence of 32-bit integers.
    """
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # sequences of different lengths
        raise _refused("prompt", "is no text and no flat sequence of integers") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise _refused("prompt", "is no text and no flat sequence of integers")
    if ids.size and (ids.min() < -(2**31) or ids.max() >= 2**31):
        raise _refused("prompt", "holds a value that is no 32-bit number")
    return ids.astype("<i4").tobytes()


def _refused(name: str, why: str) -> CallError:
    return CallError("INVALID_ARGUMENT", f"{name}: {why}", reason="INVALID_FIELDS", violations=(Violation(name, why),))


def job_row(row: Request, position: int) -> job_service_pb2.JobRow:
    """Makes a row of a job. One that cannot be sent ends with its error, in its place."""
    made = job_service_pb2.JobRow(row_id=row.id or str(position))
    try:
        made.request.CopyFrom(request_message(row, "", ""))
    except CallError as error:
        made.unreadable.code, made.unreadable.message = code_pb2.INVALID_ARGUMENT, error.message
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=each.field, description=each.description)
            for each in error.violations
        ]
        made.unreadable.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="ifabric"))
        made.unreadable.details.add().Pack(error_details_pb2.BadRequest(field_violations=violations))
    return made


def answer(result: pb.GenerationResult, request_id: str, *, text: str = "", token_ids: tuple[int, ...] = ()) -> Answer:
    """Reads a result; `text` and `token_ids` are what a stream brought before it.

    Raises:
        CallError: hidden states were extracted badly, or damaged on their way.
    """
    sample = result.samples[0] if result.samples else pb.Sample()
    reason = sample.finish_reason or generation_pb2.FINISH_REASON_COMPLETE
    usage = result.usage
    return Answer(
        id=request_id,
        text=text + sample.text,
        token_ids=token_ids + tuple(sample.token_ids),
        finish_reason=generation_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower(),
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.generated_tokens),
        engine_digest=result.engine_digest,
        hidden_state=_hidden_state(result.payload, request_id) if result.HasField("payload") else None,
    )


def outcome(request_id: str, message: pb.RequestOutcome | job_service_pb2.RowResult) -> Outcome:
    """Reads how a row ended."""
    if message.HasField("failed"):
        return Outcome(request_id, error=of_status(message.failed))
    try:
        return Outcome(request_id, answer=answer(message.finished, request_id))
    except CallError as error:
        return Outcome(request_id, error=error)


def job(message: job_service_pb2.Job) -> Job:
    """Reads a job."""
    report = message.report
    return Job(
        id=message.spec.job_id,
        state=job_service_pb2.JobState.Name(message.state).removeprefix("JOB_STATE_").lower(),
        state_reason=message.state_reason,
        durable_rows=message.durable_rows,
        finished_rows=message.finished_rows,
        failed_rows=message.failed_rows,
        engine_digest=message.engine_digest,
        prompt_tokens_sent=report.prompt_tokens_logical,
        prompt_tokens_computed=report.prompt_tokens_computed,
        prompt_tokens_bound=report.prompt_tokens_bound,
    )


def engine(message: pb.Engine) -> Engine:
    """Reads an engine."""
    limits, payload = message.contract.limits, message.contract.capabilities.payload
    return Engine(
        id=message.contract.engine_id,
        digest=message.engine_digest,
        node_ids=tuple(message.node_ids),
        max_input_tokens=limits.max_input_tokens,
        max_output_tokens=limits.max_output_tokens,
        hidden_shape=tuple(payload.value.shape) if payload.WhichOneof("kind") == "value" else None,
    )


def _hidden_state(payload: generation_pb2.Payload, request_id: str) -> HiddenState:
    if payload.failure:
        raise CallError("INTERNAL", f"request {request_id!r}: no hidden state was extracted: {payload.failure}")
    if zlib.crc32(payload.data) != payload.crc32:
        raise CallError("DATA_LOSS", f"request {request_id!r}: its hidden state was damaged on its way")
    values: np.ndarray[Any, Any] = np.frombuffer(payload.data, _DTYPES[payload.dtype]).reshape(tuple(payload.shape))
    if payload.dtype == contract_pb2.PAYLOAD_DTYPE_BFLOAT16:
        # The upper half of a float32: the other half is zeros.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return HiddenState(values, tuple(payload.layers), payload.position)
