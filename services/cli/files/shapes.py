# SPDX-License-Identifier: Apache-2.0
"""Shapes of results: the suite's own, and that of OpenAI batch output files."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from google.rpc import code_pb2

from ifabric.engine.v1 import contract_pb2, generation_pb2
from services.cli.files.openai import CHAT, EMBEDDINGS
from services.cli.results import failed_row, finish_reason, finished_row
from services.common.errors import FabricError, InternalError

if TYPE_CHECKING:
    from ifabric.broker.v1 import broker_service_pb2

_HTTP = {
    code_pb2.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    code_pb2.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    code_pb2.NOT_FOUND: HTTPStatus.NOT_FOUND,
    code_pb2.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    code_pb2.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    code_pb2.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    code_pb2.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}
_NEVER_RAN = {code_pb2.DEADLINE_EXCEEDED: "batch_expired", code_pb2.CANCELLED: "batch_cancelled"}


class Shape(Protocol):
    """How results are written. A shape has no state: the same result is always the same document."""

    @property
    def id_key(self) -> str:
        """Key of a document under which the row's id stands."""
        ...

    def finished(self, row_id: str, result: broker_service_pb2.GenerationResult) -> dict[str, Any]:
        """The document of a row that ended well."""
        ...

    def failed(self, row_id: str, line: int | None, error: FabricError) -> dict[str, Any]:
        """The document of a row that ended with an error; `line` is absent where the file is not at hand."""
        ...


class RowShape:
    """The suite's own shape; docs/bulk.md has its fields."""

    id_key = "id"

    def finished(self, row_id: str, result: broker_service_pb2.GenerationResult) -> dict[str, Any]:
        """See Shape."""
        return finished_row(result) | {"id": row_id}

    def failed(self, row_id: str, line: int | None, error: FabricError) -> dict[str, Any]:
        """See Shape."""
        return failed_row(row_id, line, error)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The lines of OpenAI batch output and error files."""

    endpoint: str
    model: str
    created: int
    """When the job was made, in seconds since 1970."""
    id_key: str = "custom_id"

    def finished(self, row_id: str, result: broker_service_pb2.GenerationResult) -> dict[str, Any]:
        """See Shape."""
        if self.endpoint == EMBEDDINGS and not result.payload.data:
            return self.failed(row_id, None, InternalError(result.payload.failure or "the engine made no embedding"))
        body = self._embedding(result) if self.endpoint == EMBEDDINGS else self._answer(row_id, result)
        return self._line(row_id, {"status_code": HTTPStatus.OK, "request_id": row_id, "body": body}, None)

    def failed(self, row_id: str, line: int | None, error: FabricError) -> dict[str, Any]:
        """See Shape."""
        if error.code in _NEVER_RAN:
            return self._line(row_id, None, {"code": _NEVER_RAN[error.code], "message": error.message})
        status = _HTTP.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
        described = {
            "message": error.message,
            "type": "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error",
            "param": error.violations[0].field if error.violations else None,
            "code": error.reason,
        }
        return self._line(row_id, {"status_code": status, "request_id": row_id, "body": {"error": described}}, None)

    def _line(self, row_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
        return {"id": f"batch_req_{row_id}", "custom_id": row_id, "response": response, "error": error}

    def _answer(self, row_id: str, result: broker_service_pb2.GenerationResult) -> dict[str, Any]:
        chat = self.endpoint == CHAT
        choices = []
        for index, sample in enumerate(result.samples):
            said: dict[str, Any] = {"text": sample.text}
            if chat:
                said = {"message": {"role": "assistant", "content": sample.text}}
            logprobs = _chat_logprobs(sample) if chat else _logprobs(sample)
            choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": _reason(sample)})
        usage = result.usage
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{row_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.generated_tokens,
                "total_tokens": usage.prompt_tokens + usage.generated_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
            "system_fingerprint": result.engine_digest,
        }

    def _embedding(self, result: broker_service_pb2.GenerationResult) -> dict[str, Any]:
        values = payload_values(result.payload).tolist()
        tokens = result.usage.prompt_tokens
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": values}],
            "model": self.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def payload_values(payload: generation_pb2.Payload) -> np.ndarray[Any, np.dtype[np.float32]]:
    """All values of a payload, in order, as float32; exact whatever their number format."""
    match payload.dtype:
        case contract_pb2.PAYLOAD_DTYPE_FLOAT16:
            return np.frombuffer(payload.data, dtype="<f2").astype(np.float32)
        case contract_pb2.PAYLOAD_DTYPE_BFLOAT16:
            return (np.frombuffer(payload.data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        case _:
            return np.frombuffer(payload.data, dtype="<f4")


def _reason(sample: broker_service_pb2.Sample) -> str:
    reason = finish_reason(sample.finish_reason)
    return reason if reason in {"stop", "length"} else "stop"


def _logprobs(sample: broker_service_pb2.Sample) -> dict[str, Any] | None:
    if not sample.logprobs:
        return None
    tokens = [f"token_id:{token}" for token in sample.token_ids]
    return {"tokens": tokens, "token_logprobs": list(sample.logprobs), "top_logprobs": None, "text_offset": []}


def _chat_logprobs(sample: broker_service_pb2.Sample) -> dict[str, Any] | None:
    if not sample.logprobs:
        return None
    pairs = zip(sample.token_ids, sample.logprobs, strict=False)
    return {"content": [{"token": f"token_id:{it}", "logprob": value, "top_logprobs": []} for it, value in pairs]}
