# SPDX-License-Identifier: Apache-2.0
"""Results as JSON documents: rows of `results.jsonl`, answers of `ifab generate --json`, and job reports."""

from __future__ import annotations

import base64
from math import isnan
from typing import TYPE_CHECKING, Any

from ifabric.engine.v1 import contract_pb2, generation_pb2
from services.cli.running import error_document

if TYPE_CHECKING:
    from ifabric.broker.v1 import broker_service_pb2
    from services.cli.job import JobOutcome
    from services.common.errors import FabricError


def finished_row(result: broker_service_pb2.GenerationResult) -> dict[str, Any]:
    """A request that ended well: `id`, `text`, `finish_reason`, `usage`, and what else was asked for.

    With several samples, `text` and `finish_reason` are the first one's and `samples` holds all.
    """
    document: dict[str, Any] = {"id": result.request_id}
    samples = [_sample(sample) for sample in result.samples]
    if samples:
        document |= samples[0]
    if len(samples) > 1:
        document["samples"] = samples
    document["usage"] = {
        "prompt_tokens": result.usage.prompt_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "computed_tokens": result.usage.computed_tokens,
        "generated_tokens": result.usage.generated_tokens,
    }
    if result.HasField("payload"):
        document["payload"] = _payload(result.payload)
    if result.prompt_logprobs:
        # JSON has no NaN: the first token has no probability given those before it.
        document["prompt_logprobs"] = [None if isnan(value) else value for value in result.prompt_logprobs]
    document["engine_digest"] = result.engine_digest
    return document


def failed_row(row_id: str, line: int | None, error: FabricError) -> dict[str, Any]:
    """A row that ended with an error: `id`, `line` in the input file where that is known, `error`."""
    place = {} if line is None else {"line": line}
    return {"id": row_id, **place, "error": error_document(error)}


def report_document(job_id: str, outcome: JobOutcome) -> dict[str, Any]:
    """The report of a job. Its first eight keys are the same in every command that runs one."""
    report = outcome.report
    if report is None:
        raise ValueError("a job whose stream broke has no report")
    sent = report.requests
    return {
        "requests": outcome.rows,
        "failed": outcome.failed,
        "prompt_tokens_logical": report.prompt_tokens_logical,
        "prompt_tokens_computed": report.prompt_tokens_computed,
        "prompt_tokens_bound": report.prompt_tokens_bound,
        "generated_tokens": report.generated_tokens,
        "wall_s": round(outcome.wall_s, 3),
        "tokens_per_s": round(report.generated_tokens / outcome.wall_s, 1) if outcome.wall_s else 0.0,
        "prompt_tokens_cached": report.prompt_tokens_cached,
        "prompt_tokens_per_s": round(report.prompt_tokens_logical / outcome.wall_s, 1) if outcome.wall_s else 0.0,
        "reattempts": report.reattempts,
        "prompt_tokens_cut": _known(report, "prompt_tokens_cut"),
        "head_prefills": _known(report, "head_prefills"),
        "heads_held": _known(report, "heads_held"),
        "waiting_s": _seconds(report, "waiting_ms"),
        "running_s": _seconds(report, "running_ms"),
        "rows_refused_unsent": outcome.rows - sent,
        "job_id": job_id,
        "shares": [
            {
                "node_id": share.node_id,
                "requests": share.requests,
                "prompt_tokens_computed": share.prompt_tokens_computed,
                "generated_tokens": share.generated_tokens,
                "engine_steps": _known(share, "engine_steps"),
                "step_fill": _known(share, "step_fill"),
                "idle_fraction": _known(share, "idle_fraction"),
            }
            for share in report.shares
        ],
    }


def _known(message: broker_service_pb2.JobReport | broker_service_pb2.NodeShare, name: str) -> int | float | None:
    """A figure of a report, to four places; None where it is not known."""
    value = getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]
    return round(value, 4) if isinstance(value, float) else value


def _seconds(report: broker_service_pb2.JobReport, name: str) -> float | None:
    value = _known(report, name)
    return None if value is None else round(value / 1000, 3)


def finish_reason(reason: generation_pb2.FinishReason.ValueType) -> str:
    """The lower-case word of a finish reason: `stop`, `length`, `cancelled`, `complete`."""
    return generation_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def _sample(sample: broker_service_pb2.Sample) -> dict[str, Any]:
    document: dict[str, Any] = {"text": sample.text, "finish_reason": finish_reason(sample.finish_reason)}
    if sample.stop:
        document["stop"] = sample.stop
    if sample.token_ids:
        document["token_ids"] = list(sample.token_ids)
    if sample.logprobs:
        document["logprobs"] = list(sample.logprobs)
    return document


def _payload(payload: generation_pb2.Payload) -> dict[str, Any]:
    return {
        "base64": base64.b64encode(payload.data).decode("ascii"),
        "dtype": contract_pb2.PayloadDtype.Name(payload.dtype).removeprefix("PAYLOAD_DTYPE_").lower(),
        "shape": list(payload.shape),
        "layers": list(payload.layers),
        "position": payload.position,
        "crc32": payload.crc32,
        "failure": payload.failure,
    }
