# SPDX-License-Identifier: Apache-2.0
"""Where a row of a job is: in the core, in the journal and why it stays there, or ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from google.rpc import code_pb2

from ifabric.broker.v1 import job_service_pb2
from services.broker.jobs.feed import core_id
from services.broker.journal.values import State
from services.broker.operating import Place, Whereabouts
from services.common import reasons
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from ifabric.broker.v1 import operator_service_pb2
    from services.broker.jobs import Jobs
    from services.broker.journal.lookup import RowPlace
    from services.broker.journal.values import JobRecord
    from services.broker.operating import Operable


async def row(core: Operable, jobs: Jobs | None, asked: operator_service_pb2.ExplainRequestRequest) -> Whereabouts:
    """Says where a row is.

    Raises:
        FailedPreconditionError: this broker keeps no jobs.
        NotFoundError: the tenant has no such job, or the job no such row.
    """
    if jobs is None:
        raise FailedPreconditionError("this broker keeps no jobs: its setting `journal` is empty")
    job = await jobs.journal.job(asked.tenant, asked.job_id)
    place = await jobs.journal.find_row(job.number, asked.request_id.encode())
    if place is None:
        raise NotFoundError(
            f"job {asked.job_id!r} has no row {asked.request_id!r} among its {job.rows:,}",
            reason=reasons.REQUEST_UNKNOWN,
        )
    if place.result is not None:
        return _ended(place.result)
    found = core.explain((job.tenant, core_id(job.number, place.number)))
    if found is not None:
        return replace(found, sentences=(*found.sentences, f"It is row {place.number:,} of job {job.job_id}."))
    return Whereabouts(Place.JOURNAL, tuple(_kept(job, place, jobs.runner.stalled(job.number))))


def _ended(result: bytes) -> Whereabouts:
    message = job_service_pb2.RowResult.FromString(result)
    if message.WhichOneof("outcome") == "failed":
        code = code_pb2.Code.Name(message.failed.code)
        return Whereabouts(Place.ENDED, (f"It has ended with an error, {code}: {message.failed.message}",))
    usage = message.finished.usage
    return Whereabouts(
        Place.ENDED,
        (
            f"It has ended well: {usage.generated_tokens:,} tokens generated, {usage.computed_tokens:,} of "
            f"{usage.prompt_tokens:,} prompt tokens computed.",
        ),
    )


def _kept(job: JobRecord, place: RowPlace, stalled: str) -> list[str]:
    here = f"It is row {place.number:,} of job {job.job_id}, in the journal."
    if job.state is State.UPLOADING:
        return ["Its job still takes rows; it runs once the client has said that it has all of them.", here]
    if job.state is State.PAUSED:
        return ["Its job is paused.", here]
    if stalled:
        return [f"Its job cannot go on now: {stalled}.", here]
    if place.owner:
        return [f"The broker {place.owner} has its group, and gives it out, or tries it again, shortly.", here]
    before = f" {place.groups_before:,} groups of rows of its job come first." if place.groups_before else ""
    return [f"No broker has come to it yet.{before}", here]
