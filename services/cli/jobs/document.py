# SPDX-License-Identifier: Apache-2.0
"""Jobs as JSON documents and as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.job import JobOutcome
from services.cli.results import report_document

if TYPE_CHECKING:
    from google.protobuf import timestamp_pb2

COLUMNS = ("job", "state", "rows", "failed", "tokens generated", "made")


def job_report(job: pb.Job) -> dict[str, Any]:
    """The report of a job, in the form that every command has that runs one."""
    rows = job.durable_rows
    outcome = JobOutcome(rows, job.failed_rows, wall_s=job.report.wall_ms / 1000, report=job.report)
    return report_document(job.spec.job_id, outcome)


def job_document(job: pb.Job) -> dict[str, Any]:
    """A job, all of it."""
    spec = job.spec
    return {
        "job_id": spec.job_id,
        "tenant": spec.tenant,
        "state": state_of(job),
        "state_reason": job.state_reason,
        "priority": spec.priority,
        "deadline_time": _time(spec.deadline_time) if spec.HasField("deadline_time") else None,
        "rows": job.durable_rows,
        "finished": job.finished_rows,
        "failed": job.failed_rows,
        "engine_id": spec.engine.engine_id,
        "engine_digest": job.engine_digest,
        "create_time": _time(job.create_time),
        "end_time": _time(job.end_time) if job.HasField("end_time") else None,
        "report": job_report(job),
    }


def job_columns(job: pb.Job) -> list[tuple[str, str]]:
    """A job for people, a line each."""
    done, report = job.finished_rows + job.failed_rows, job.report
    saved = 1 - report.prompt_tokens_computed / report.prompt_tokens_logical if report.prompt_tokens_logical else 0.0
    reason = f" ({job.state_reason})" if job.state_reason else ""
    return [
        ("job", job.spec.job_id),
        ("state", state_of(job) + reason),
        ("rows", f"{done:,} of {job.durable_rows:,} ({job.failed_rows:,} failed)"),
        ("priority", str(job.spec.priority)),
        ("engine", job.engine_digest or "none yet"),
        ("prompt tokens as sent", f"{report.prompt_tokens_logical:,}"),
        ("prompt tokens computed", f"{report.prompt_tokens_computed:,} ({100 * max(saved, 0.0):.0f} % saved)"),
        ("tokens generated", f"{report.generated_tokens:,}"),
        ("made", _time(job.create_time)),
        *([("ended", _time(job.end_time))] if job.HasField("end_time") else []),
    ]


def job_row(job: pb.Job) -> tuple[str, ...]:
    """A job as a line under COLUMNS."""
    done = job.finished_rows + job.failed_rows
    return (
        job.spec.job_id,
        state_of(job),
        f"{done:,}/{job.durable_rows:,}",
        f"{job.failed_rows:,}",
        f"{job.report.generated_tokens:,}",
        _time(job.create_time),
    )


def state_of(job: pb.Job) -> str:
    """The lower-case word of a job's state."""
    return pb.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()


def _time(time: timestamp_pb2.Timestamp) -> str:
    return time.ToJsonString()
