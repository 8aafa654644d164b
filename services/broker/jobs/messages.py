# SPDX-License-Identifier: Apache-2.0
"""Jobs and results in their wire form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf import timestamp_pb2

from ifabric.broker.v1 import broker_service_pb2, job_service_pb2
from services.broker.costs import tell_use
from services.broker.journal.values import ENDED, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from services.broker.costs import JobCosts
    from services.broker.journal.values import JobRecord, Share

_STATES = {state: job_service_pb2.JobState.ValueType(int(state)) for state in State}


def job_message(
    job: JobRecord,
    shares: Mapping[str, Share],
    costs: JobCosts,
    *,
    stalled: str,
    now: float,
) -> job_service_pb2.Job:
    """A job as its clients see it.

    Args:
        job: As the journal has it.
        shares: What each node did for it.
        costs: What it has cost beyond tokens, wherever it ran.
        stalled: Why this broker cannot go on with it; empty where it can.
        now: Seconds since the epoch.
    """
    spec = job_service_pb2.JobSpec.FromString(job.spec)
    if job.priority or spec.HasField("priority"):
        spec.priority = job.priority
    if job.deadline is not None:
        spec.deadline_time.CopyFrom(_time(job.deadline))
    state, reason = _STATES[job.state], job.state_reason
    if stalled and job.state in (State.RUNNING, State.UPLOADING):
        state, reason = job_service_pb2.JOB_STATE_STALLED, stalled
    message = job_service_pb2.Job(
        spec=spec,
        state=state,
        state_reason=reason,
        durable_rows=job.rows,
        finished_rows=job.finished,
        failed_rows=job.failed,
        engine_digest=job.engine_digest,
        create_time=_time(job.created),
        report=_report(job, shares, costs, now),
    )
    if job.ended is not None:
        message.end_time.CopyFrom(_time(job.ended))
    return message


def results_message(bodies: Iterable[bytes], next_row: int) -> job_service_pb2.FetchResultsResponse:
    """Puts serialized results into one message without taking each apart: a list of messages is what they are."""
    message = job_service_pb2.FetchResultsResponse.FromString(
        b"".join(b"\x0a" + _varint(len(body)) + body for body in bodies)
    )
    message.next_row = next_row
    return message


def _report(job: JobRecord, shares: Mapping[str, Share], costs: JobCosts, now: float) -> broker_service_pb2.JobReport:
    spent = job.spent
    until = job.ended if job.state in ENDED and job.ended is not None else now
    report = broker_service_pb2.JobReport(
        job_id=job.job_id,
        requests=job.rows,
        failed=job.failed,
        prompt_tokens_logical=spent.prompt_tokens,
        prompt_tokens_computed=spent.computed_tokens,
        prompt_tokens_bound=max(job.bound_tokens, 0),
        prompt_tokens_cached=spent.cached_tokens,
        generated_tokens=spent.generated_tokens,
        wall_ms=max(round(1000 * (until - job.created)), 0),
        reattempts=spent.reattempts,
        shares=[
            broker_service_pb2.NodeShare(
                node_id=node_id,
                requests=share.rows,
                prompt_tokens_computed=share.computed_tokens,
                generated_tokens=share.generated_tokens,
            )
            for node_id, share in sorted(shares.items())
        ],
    )
    if costs.ended >= job.finished:
        _add(report, costs)  # else some of it ran under a version that kept none of this
    return report


def _add(report: broker_service_pb2.JobReport, costs: JobCosts) -> None:
    """Adds what a job has cost beyond its tokens."""
    report.prompt_tokens_cut = costs.cut_tokens
    report.head_prefills = costs.head_prefills
    report.heads_held = costs.heads_held
    report.waiting_ms = costs.waiting_ms
    report.running_ms = costs.running_ms
    for share in report.shares:
        use = costs.engines.get(share.node_id)
        if use is not None:
            tell_use(share, use)


def _time(seconds: float) -> timestamp_pb2.Timestamp:
    whole = int(seconds // 1)
    return timestamp_pb2.Timestamp(seconds=whole, nanos=min(round((seconds - whole) * 1e9), 999_999_999))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
