# SPDX-License-Identifier: Apache-2.0
"""What the shared prompts of a file are worth, asked of the broker before anything is spent, and held to the run."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc
import orjson

from ifabric.broker.v1 import operator_service_pb2 as pb
from ifabric.broker.v1 import operator_service_pb2_grpc
from services.cli.files.formats import rows_of
from services.cli.jobs.upload import job_row
from services.cli.running import CommandError, error_document
from services.common.errors import UnavailableError, from_status
from services.common.rpc import call_error
from services.common.rpc.ending import Ending

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ifabric.broker.v1 import job_service_pb2
    from services.cli.jobs.whole import Input

_ROWS_A_MESSAGE = 256
_BYTES_A_MESSAGE = 1024 * 1024
_COMPARED = ("prompt_tokens_computed", "generated_tokens", "wall_s")
"""What a prediction says and the report has, too."""


async def analyze(to_broker: grpc.aio.Channel, given: Input, *, silence_s: float) -> dict[str, Any]:
    """Sends all rows to be analyzed and returns the answer as a document.

    Args:
        to_broker: The broker.
        given: The file.
        silence_s: Time that the answer may take once all rows are sent, in seconds.

    Raises:
        FabricError: The broker refuses, or did not answer in time.
        CommandError: The file cannot be read to its end.
    """
    call = operator_service_pb2_grpc.OperatorServiceStub(to_broker).AnalyzeRows()
    ending = Ending(call)
    try:
        answer = await asyncio.wait_for(_exchange(call, given), silence_s)
    except grpc.aio.AioRpcError as error:
        raise call_error(await ending.of(error)) from error
    except TimeoutError:
        raise UnavailableError(f"the analysis did not end within {silence_s:g} s") from None
    finally:
        call.cancel()
    return document(given.spec.job_id, answer)


async def _exchange(call: Any, given: Input) -> pb.AnalyzeRowsResponse:
    try:
        await call.write(pb.AnalyzeRowsRequest(spec=given.spec))
        with rows_of(given.source, given.layout, given.chat) as rows:
            while True:
                message = pb.AnalyzeRowsRequest()
                made: list[job_service_pb2.JobRow] = []
                size = 0
                for row in islice(rows, _ROWS_A_MESSAGE):
                    made.append(job_row(row))
                    size += made[-1].ByteSize()
                    if size >= _BYTES_A_MESSAGE:
                        break
                if not made:
                    break
                message.rows.extend(made)
                await call.write(message)
        await call.done_writing()
    except asyncio.InvalidStateError:
        pass  # the call has ended, and its answer says why
    answer: pb.AnalyzeRowsResponse = await call
    return answer


def document(job_id: str, answer: pb.AnalyzeRowsResponse) -> dict[str, Any]:
    """An analysis as `--json` prints it, and as `--prediction` reads it."""
    logical, bound, prediction = answer.prompt_tokens_logical, answer.prompt_tokens_bound, answer.prediction
    return {
        "job_id": job_id,
        "rows": answer.row_count,
        "refused": answer.refused_count,
        "refused_rows": [{"id": row.row_id, "error": error_document(from_status(row.error))} for row in answer.refused],
        "prompt_tokens_logical": logical,
        "prompt_tokens_bound": bound,
        "prefix_saving_most": _saving(bound, logical),
        "generated_tokens_max": answer.generated_tokens_max,
        "heads": [
            {"tokens": head.tokens, "rows": head.row_count, "saved_tokens": head.saved_tokens, "row": head.row_id}
            for head in answer.heads
        ],
        "prediction": {
            "nodes": prediction.node_count,
            "prompt_tokens_computed": prediction.prompt_tokens_computed,
            "prompt_tokens_cut": prediction.prompt_tokens_cut,
            "prefix_saving": _saving(prediction.prompt_tokens_computed, logical),
            "generated_tokens": prediction.generated_tokens,
            "wall_s": prediction.wall_ms / 1000 if prediction.HasField("wall_ms") else None,
        }
        if answer.HasField("prediction")
        else None,
        "engines": [
            {
                "engine_id": engine.engine_id,
                "engine_digest": engine.engine_digest,
                "nodes": list(engine.node_ids),
                "rows": engine.row_count,
                "step_us": _figure(engine, "step_us"),
                "prompt_token_us": _figure(engine, "prompt_token_us"),
                "generated_token_us": _figure(engine, "generated_token_us"),
                "output_share": _figure(engine, "output_share"),
            }
            for engine in answer.engines
        ],
    }


def columns(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """An analysis for people, a line each."""
    logical, bound, prediction = said["prompt_tokens_logical"], said["prompt_tokens_bound"], said["prediction"]
    lines = [
        ("rows", f"{said['rows']:,} ({said['refused']:,} would be refused)"),
        ("prompt tokens as sent", f"{logical:,}"),
        ("  least possible", f"{bound:,} ({_percent(said['prefix_saving_most'])} saved)"),
        ("tokens generated at most", f"{said['generated_tokens_max']:,}"),
    ]
    if prediction is not None:
        nodes = f"{prediction['nodes']} node" + ("" if prediction["nodes"] == 1 else "s")
        wall_s = prediction["wall_s"]
        lines += [
            (f"predicted on {nodes}", ""),
            (
                "  prompt tokens computed",
                f"{prediction['prompt_tokens_computed']:,} ({_percent(prediction['prefix_saving'])} saved)",
            ),
            ("  tokens generated", f"{prediction['generated_tokens']:,}"),
            ("  time", f"{wall_s:,.1f} s" if wall_s is not None else "unknown: no engine has worked enough here yet"),
        ]
    return lines


def head_rows(said: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The biggest heads as lines of a table."""
    rows: list[tuple[str, ...]] = [("saved tokens", "head", "rows", "such as")]
    return rows + [
        (f"{head['saved_tokens']:,}", f"{head['tokens']:,} tokens", f"{head['rows']:,}", head["row"])
        for head in said["heads"]
    ]


def compared(said: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any] | None:
    """A prediction beside what became of it: each figure, and its error, 0.1 where it was a tenth too high."""
    prediction = said["prediction"]
    if prediction is None:
        return None
    made: dict[str, Any] = {}
    for name in _COMPARED:
        made[name] = prediction[name]
        known = prediction[name] is not None and report[name]
        made[f"{name}_error"] = round(prediction[name] / report[name] - 1, 4) if known else None
    return made


def compared_columns(made: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What `compared` made, for people."""
    if made is None:
        return []
    parts = [
        f"{name.replace('_', ' ')} {made[f'{name}_error']:+.1%}"
        for name in _COMPARED
        if made[f"{name}_error"] is not None
    ]
    return [("error of the prediction", ", ".join(parts) or "unknown")]


def check_job(said: Mapping[str, Any], job_id: str) -> None:
    """Checks whose prediction it is.

    Raises:
        CommandError: It is of another job.
    """
    if said["job_id"] != job_id:
        raise CommandError(f"the prediction is of job {said['job_id']}, and this file is job {job_id}")


def _figure(engine: pb.EngineSpeed, name: str) -> float | None:
    return round(float(getattr(engine, name)), 4) if engine.HasField(name) else None  # type: ignore[arg-type]


def _saving(computed: int, logical: int) -> float | None:
    return round(1 - computed / logical, 4) if logical else None


def _percent(part: float | None) -> str:
    return "nothing" if part is None else f"{100 * part:.0f} %"


def parse(text: bytes, where: str) -> dict[str, Any]:
    """Reads what `ifab bulk analyze --json` wrote.

    Raises:
        CommandError: It is something else.
    """
    try:
        said = orjson.loads(text)
        _ = said["job_id"], said["prediction"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise CommandError(f"{where} holds no prediction; `ifab bulk analyze FILE --json` writes one") from error
    prediction = said["prediction"]
    if prediction is not None and not all(isinstance(prediction.get(name), int | float | None) for name in _COMPARED):
        raise CommandError(f"{where} holds no prediction; `ifab bulk analyze FILE --json` writes one")
    return dict(said)
