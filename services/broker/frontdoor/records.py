# SPDX-License-Identifier: Apache-2.0
"""What the front door writes down: canonical log lines, counts and times. Never prompt text, never output text."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from google.rpc import code_pb2

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.broker.ended_jobs import ended_jobs
from services.broker.failures import request_failures
from services.broker.work import LANE_NAMES, Lane
from services.common import logs
from services.common.errors import FabricError
from services.common.telemetry import names, propagation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from services.broker.frontdoor.intake import Plan
    from services.broker.work import WorkEnd
    from services.common.telemetry import Telemetry

_log = logs.get("broker.frontdoor")


class Records:
    """Counts and lines of one front door.

    Counts of rows are kept here and read when somebody looks: ten thousand rows a second must not pay for an
    instrument each. Only live calls are timed one by one.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._ended: Counter[tuple[str, str]] = Counter()
        self._duration = telemetry.histogram(names.BROKER_REQUEST_DURATION)
        self._first_token = telemetry.histogram(names.BROKER_FIRST_TOKEN)
        self._job_ended = ended_jobs(telemetry)
        self._failed = request_failures(telemetry)
        telemetry.observe(names.BROKER_REQUESTS, self._read)

    def row_finished(self, lane: Lane, end: WorkEnd, *, early: bool) -> None:
        """A row of a stream ended well."""
        self._ended[LANE_NAMES[lane], outcome(end, early=early)] += 1

    def row_failed(
        self, lane: Lane, job_id: str, request_id: str, tenant: str, error: FabricError, *, traceparent: str = ""
    ) -> None:
        """A row of a stream ended with an error: one line, in the row's own trace where it has one."""
        self._ended[LANE_NAMES[lane], "failed"] += 1
        self._failed(lane, error)
        _log.info(
            "row.failed", job_id=job_id, request_id=request_id, tenant=tenant, **_told(error), message=error.message,
            **propagation.log_ids(traceparent),
        )  # fmt: skip

    def live_refused(self, request: broker_service_pb2.GenerationRequest, error: FabricError) -> None:
        """A live request was not taken: its one line."""
        lane = Lane.BULK if request.lane == broker_service_pb2.LANE_BULK else Lane.INTERACTIVE
        self._ended[LANE_NAMES[lane], "failed"] += 1
        self._failed(lane, error)
        _log.info(
            "request.refused", request_id=request.request_id[:128], tenant=request.tenant[:64], **_told(error),
            message=error.message,
        )  # fmt: skip

    def live_ended(
        self,
        clock: Clock,
        plan: Plan,
        lane: Lane,
        end: WorkEnd | FabricError,
        *,
        gone: bool,
        early: bool,
        traceparent: str = "",
    ) -> None:
        """A live request that was taken has ended: its one line."""
        how = "gone" if gone else "failed" if isinstance(end, FabricError) else outcome(end, early=early)
        labels = {"lane": LANE_NAMES[lane], "outcome": how}
        self._ended[labels["lane"], how] += 1
        if how == "failed" and isinstance(end, FabricError):
            self._failed(lane, end)
        self._duration.record(clock.duration_s, labels)
        if clock.first_output_s is not None:
            self._first_token.record(clock.first_output_s, {"lane": labels["lane"]})
        _log.info(
            "request.ended", request_id=plan.request_id, tenant=plan.tenant, lane=labels["lane"], outcome=how,
            prompt_token_count=plan.prompt_tokens, max_tokens=plan.max_tokens, samples=plan.samples,
            duration_ms=_ms(clock.duration_s), queue_ms=_ms(clock.started_s), first_output_ms=_ms(clock.first_output_s),
            **(_told(end) if isinstance(end, FabricError) else _cost(end)), **propagation.log_ids(traceparent),
        )  # fmt: skip

    def job_ended(self, report: broker_service_pb2.JobReport, *, complete: bool) -> None:
        """A stream has ended: its one line."""
        if complete:
            self._job_ended(report.prompt_tokens_logical, report.prompt_tokens_computed, report.prompt_tokens_bound)
        _log.info(
            "job.ended", job_id=report.job_id, complete=complete, requests=report.requests, failed=report.failed,
            prompt_tokens_logical=report.prompt_tokens_logical, prompt_tokens_computed=report.prompt_tokens_computed,
            prompt_tokens_bound=report.prompt_tokens_bound, prompt_tokens_cached=report.prompt_tokens_cached,
            generated_tokens=report.generated_tokens, wall_ms=report.wall_ms, reattempts=report.reattempts,
            nodes=[share.node_id for share in report.shares],
        )  # fmt: skip

    def _read(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        return [(count, {"lane": lane, "outcome": how}) for (lane, how), count in list(self._ended.items())]


class Clock:
    """Times of one live request, in seconds from its acceptance."""

    def __init__(self) -> None:
        self._accepted = time.monotonic()
        self.started_s: float | None = None
        """When it was dispatched."""
        self.first_output_s: float | None = None
        """When its first text or token was there to be sent; None for calls that are not streamed."""

    @property
    def duration_s(self) -> float:
        """Time since acceptance."""
        return time.monotonic() - self._accepted

    def mark_started(self) -> None:
        """It was dispatched."""
        self.started_s = self.duration_s

    def mark_output(self) -> None:
        """There is output; only the first call counts."""
        if self.first_output_s is None:
            self.first_output_s = self.duration_s


def outcome(end: WorkEnd, *, early: bool) -> str:
    """One word for how work ended well: `finished`, or `cancelled` where somebody cancelled any of its samples.

    `early` says that stop strings ended all of them: to the engine that looks like a cancel.
    """
    cancelled = not early and any(
        sample.finish_reason == generation_pb2.FINISH_REASON_CANCELLED for sample in end.samples
    )
    return "cancelled" if cancelled else "finished"


def _told(error: FabricError) -> dict[str, Any]:
    return {"code": code_pb2.Code.Name(code_pb2.Code.ValueType(error.code)), "reason": error.reason}


def _cost(end: WorkEnd) -> dict[str, Any]:
    return {
        "code": "OK", "engine_digest": end.engine_digest, "node_id": end.node_id, "attempts": end.attempts,
        "cached_token_count": end.usage.cached_tokens, "computed_token_count": end.usage.computed_tokens,
        "generated_token_count": end.usage.generated_tokens,
    }  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
