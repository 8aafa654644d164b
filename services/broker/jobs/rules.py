# SPDX-License-Identifier: Apache-2.0
"""What a job and its rows may say before any engine is asked.

The row's request meets the rest of the rules, and its engine's contract, when its turn comes: a row at fault is one
typed error in its place and stops nobody.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2, job_service_pb2
from services.broker.frontdoor.rules import PRIORITY_LIMIT, TENANT_CHARACTERS, check_request
from services.broker.journal.order import sort_key
from services.broker.journal.values import Result, Row
from services.common import reasons
from services.common.errors import AlreadyExistsError, FabricError, InvalidArgumentError, Violation, to_status

if TYPE_CHECKING:
    from google.protobuf import timestamp_pb2
    from google.rpc import status_pb2

ROW_ID_BYTES = 512
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OF_THE_JOB = ("request_id", "tenant", "lane", "engine")
"""Fields of a request that belong to its job."""
_NOT_BY_DEFAULT = ("prompt", "traceparent", *_OF_THE_JOB)


def check_job_id(job_id: str, tenant: str) -> None:
    """Checks what names a job in every call.

    Raises:
        InvalidArgumentError: it is not the form of an id.
    """
    violations = _names(job_id, tenant, "")
    if violations:
        raise InvalidArgumentError.of(violations)


def check_spec(spec: job_service_pb2.JobSpec) -> None:
    """Checks what a client wants of a job.

    Raises:
        InvalidArgumentError: names every field at fault.
    """
    violations = _names(spec.job_id, spec.tenant, "spec.")
    violations += check_changes(spec, "spec.")
    violations += [
        Violation(f"spec.defaults.{name}", "is set; it belongs to a row or to the job itself")
        for name in _set_fields(spec.defaults, _NOT_BY_DEFAULT)
    ]
    violations += [
        Violation(f"spec.defaults.{found.field}", found.description)
        for found in check_request(spec.defaults, id_required=False)
        if found.field not in _NOT_BY_DEFAULT
    ]
    if violations:
        raise InvalidArgumentError.of(violations)


def check_changes(
    changes: job_service_pb2.JobSpec | job_service_pb2.UpdateJobRequest, prefix: str = ""
) -> list[Violation]:
    """Returns what is wrong with a priority and a deadline."""
    found: list[Violation] = []
    if not -PRIORITY_LIMIT <= changes.priority <= PRIORITY_LIMIT:
        limits = f"-{PRIORITY_LIMIT} to {PRIORITY_LIMIT}"
        found.append(Violation(f"{prefix}priority", f"is {changes.priority}; allowed is {limits}"))
    if changes.HasField("deadline_time") and not _is_time(changes.deadline_time):
        found.append(Violation(f"{prefix}deadline_time", "is no time from the year 1 to the year 9999"))
    return found


def deadline_of(changes: job_service_pb2.JobSpec | job_service_pb2.UpdateJobRequest) -> float | None:
    """The deadline in seconds since the epoch; None where there is none."""
    if not changes.HasField("deadline_time"):
        return None
    return changes.deadline_time.seconds + changes.deadline_time.nanos * 1e-9


def taken(sent: job_service_pb2.JobRow, number: int) -> Row:
    """Turns a row as it was sent into what the journal keeps; one at fault is kept with its error."""
    row_id = sent.row_id.encode()
    error = fault(sent, row_id)
    kept_id = row_id[:ROW_ID_BYTES]
    if error is None:
        request = sent.request
        return Row(kept_id, request.SerializeToString(deterministic=True), sort_key(request.prompt), b"")
    status = to_status(error) if isinstance(error, FabricError) else error
    failure = job_service_pb2.RowResult(row=number, row_id=kept_id.decode("utf-8", "ignore"), failed=status)
    return Row(kept_id, sent.request.SerializeToString(deterministic=True), b"", failure.SerializeToString())


def row_request(
    defaults: broker_service_pb2.GenerationRequest, sent: broker_service_pb2.GenerationRequest
) -> broker_service_pb2.GenerationRequest:
    """A row's request with the job's defaults where it says nothing; what is the job's is still to be set."""
    made = broker_service_pb2.GenerationRequest()
    made.CopyFrom(defaults)
    if sent.stop:
        del made.stop[:]
    if sent.stop_token_ids:
        del made.stop_token_ids[:]
    if sent.HasField("guide"):
        made.ClearField("guide")
    made.MergeFrom(sent)
    return made


def repeated(row: int, row_id: bytes) -> Result:
    """The result of a row whose id an earlier row of the job has."""
    error = AlreadyExistsError(f"row_id: an earlier row of the job has the id of row {row}", reason=reasons.ID_IN_USE)
    return failure(row, row_id, error)


def failure(row: int, row_id: bytes, error: FabricError) -> Result:
    """The result of a row that failed."""
    made = job_service_pb2.RowResult(row=row, row_id=row_id.decode("utf-8", "ignore"), failed=to_status(error))
    return Result(row, made.SerializeToString(), failed=True)


def fault(sent: job_service_pb2.JobRow, row_id: bytes) -> FabricError | status_pb2.Status | None:
    """What keeps a row from ever running: the client's own error, or ours; None where nothing does."""
    request = sent.request
    if (
        1 <= len(row_id) <= ROW_ID_BYTES
        and sent.HasField("request")
        and not (request.request_id or request.tenant or request.lane or request.HasField("engine"))
        and not sent.HasField("unreadable")
    ):
        return None  # nearly every row; what follows costs several times as much
    if sent.HasField("unreadable") and sent.unreadable.code:
        unreadable: status_pb2.Status = sent.unreadable
        return unreadable
    violations: list[Violation] = []
    if not 1 <= len(row_id) <= ROW_ID_BYTES:
        violations.append(Violation("row_id", f"has {len(row_id)} bytes of UTF-8; allowed are 1 to {ROW_ID_BYTES}"))
    if sent.HasField("unreadable"):
        violations.append(Violation("unreadable.code", "is 0, which is no error"))
    elif not sent.HasField("request"):
        violations.append(Violation("request", "is absent; a row carries request or unreadable"))
    else:
        violations += [
            Violation(f"request.{name}", "is set; it is the job's") for name in _set_fields(sent.request, _OF_THE_JOB)
        ]
    return InvalidArgumentError.of(violations) if violations else None


def _names(job_id: str, tenant: str, prefix: str) -> list[Violation]:
    found: list[Violation] = []
    if not _JOB_ID.fullmatch(job_id):
        found.append(
            Violation(
                f"{prefix}job_id",
                f"is {job_id[:64]!r}; allowed are 1 to 128 characters of letters, digits, `.`, `_` and `-`",
            )
        )
    if len(tenant) > TENANT_CHARACTERS or not tenant.isprintable():
        found.append(
            Violation(
                f"{prefix}tenant",
                f"has {len(tenant)} characters; allowed are 0 to {TENANT_CHARACTERS}, all of them printable",
            )
        )
    return found


def _set_fields(request: broker_service_pb2.GenerationRequest, names: tuple[str, ...]) -> list[str]:
    set_ones = {field.name for field, _ in request.ListFields()}
    return [name for name in names if name in set_ones]


def _is_time(time: timestamp_pb2.Timestamp) -> bool:
    return -62_135_596_800 <= time.seconds <= 253_402_300_799 and 0 <= time.nanos < 1_000_000_000
