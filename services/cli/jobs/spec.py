# SPDX-License-Identifier: Apache-2.0
"""What a job is: its spec from a command's options, and its name from what its file holds.

The same file with the same options is the same job, on any machine and at any time. That is all the state that a
command which was killed needs to go on.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.files.rows import SETTERS
from services.cli.running import CommandError

if TYPE_CHECKING:
    from services.cli.files.formats import Layout
    from services.cli.files.opening import Source, Survey

_STEM_CHARACTERS = 80
_DIGEST_CHARACTERS = 16
_NOT_DEFAULTS = frozenset({"prompt", "token_ids", "tenant", "priority", "engine_id", "engine_digest"})


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a command says of a job."""

    job_id: str = ""
    """Its name; made from the file where empty."""
    tenant: str = ""
    priority: int | None = None
    deadline_s: float | None = None
    """Time from now after which it is given up, in seconds."""
    engine_id: str = ""
    engine_digest: str = ""
    any_digest: bool = False
    defaults: str = ""
    """JSON object with fields of rows that set none."""


def spec_of(wishes: Wishes, source: Source, survey: Survey, form: Layout) -> pb.JobSpec:
    """The spec of the job that runs a file.

    Raises:
        CommandError: The defaults are not what they should be.
    """
    spec = pb.JobSpec(tenant=wishes.tenant, any_digest=wishes.any_digest)
    spec.engine.engine_id, spec.engine.engine_digest = wishes.engine_id, wishes.engine_digest
    _put_defaults(spec, wishes.defaults)
    if wishes.job_id:
        spec.job_id = wishes.job_id
    else:
        digest = hashlib.sha256(f"{survey.sha256} {form.format.value} ".encode())
        digest.update(spec.SerializeToString(deterministic=True))
        spec.job_id = f"{source.stem[:_STEM_CHARACTERS]}-{digest.hexdigest()[:_DIGEST_CHARACTERS]}"
    if wishes.priority is not None:
        spec.priority = wishes.priority
    if wishes.deadline_s is not None:
        spec.deadline_time.FromNanoseconds(int((time.time() + wishes.deadline_s) * 1e9))
    return spec


def _put_defaults(spec: pb.JobSpec, defaults: str) -> None:
    if not defaults:
        return
    try:
        fields = orjson.loads(defaults)
    except orjson.JSONDecodeError as error:
        raise CommandError(f"--defaults is not JSON: {error.msg}") from None
    if not isinstance(fields, dict):
        raise CommandError("--defaults is no JSON object")
    for name, value in fields.items():
        setter = SETTERS.get(name)
        if setter is None or name in _NOT_DEFAULTS:
            raise CommandError(f"--defaults has {name}, which is not a field that rows can leave to the job")
        try:
            setter(spec.defaults, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise CommandError(f"--defaults: {name} {error}") from None
