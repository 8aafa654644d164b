# SPDX-License-Identifier: Apache-2.0
"""What a request may say, whatever engine serves it.

Every rule adds a `Violation` with the field's path, the value found and the limit; a request is told everything that
is wrong with it at once. Prompt text never enters a message.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ifabric.engine.v1 import contract_pb2, generation_pb2
from services.common.errors import Violation

if TYPE_CHECKING:
    from ifabric.broker.v1 import broker_service_pb2
    from services.broker.work import TokenArray

REQUEST_ID_CHARACTERS = 128
TENANT_CHARACTERS = 64
SALT_CHARACTERS = 64
JOB_ID_CHARACTERS = 128
STOPS = 16
STOP_BYTES = 256
STOP_TOKENS = 64
GUIDE_BYTES = 1024 * 1024
PRIORITY_LIMIT = 100
LANE_LIMIT = 2
"""Highest number of the proto's `Lane`."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class _Range:
    """Allowed values of one sampling field."""

    field: str
    low: float
    high: float
    open_low: bool = False

    def admits(self, value: float) -> bool:
        """Whether a value is allowed; NaN never is."""
        return self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        return f"{'above' if self.open_low else 'at least'} {self.low:g} and at most {self.high:g}"


_SAMPLING = (
    _Range("temperature", 0, 100),
    _Range("top_k", 0, 2**31 - 1),
    _Range("top_p", 0, 1, open_low=True),
    _Range("min_p", 0, 1),
    _Range("repetition_penalty", 0, 10, open_low=True),
    _Range("presence_penalty", -2, 2),
    _Range("frequency_penalty", -2, 2),
)


def check_request(request: broker_service_pb2.GenerationRequest, *, id_required: bool) -> list[Violation]:
    """Returns everything that is wrong with a request, its prompt apart."""
    found: list[Violation] = []
    request_id = request.request_id
    if len(request_id) > REQUEST_ID_CHARACTERS or (id_required and not request_id):
        found.append(_length("request_id", request_id, 1 if id_required else 0, REQUEST_ID_CHARACTERS))
    if len(tenant := request.tenant) > TENANT_CHARACTERS:
        found.append(_length("tenant", tenant, 0, TENANT_CHARACTERS))
    if len(salt := request.cache_salt) > SALT_CHARACTERS:
        found.append(_length("cache_salt", salt, 0, SALT_CHARACTERS))
    if not 0 <= (lane := request.lane) <= LANE_LIMIT:
        found.append(Violation("lane", f"{lane} is no lane; lanes are 0 (the default of the call) to {LANE_LIMIT}"))
    if not -PRIORITY_LIMIT <= (priority := request.priority) <= PRIORITY_LIMIT:
        found.append(Violation("priority", f"is {priority}; allowed is -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}"))
    if (traceparent := request.traceparent) and not _TRACEPARENT.fullmatch(traceparent):
        found.append(Violation("traceparent", f"is {traceparent[:64]!r}, which is not the W3C form"))
    if request.HasField("samples") and request.samples < 1:
        found.append(Violation("samples", f"is {request.samples}; at least 1 sample is made"))
    if request.stop:
        _check_stops(request, found)
    if len(request.stop_token_ids) > STOP_TOKENS:
        found.append(Violation("stop_token_ids", f"has {len(request.stop_token_ids)} ids; at most {STOP_TOKENS}"))
    if request.HasField("sampling"):
        found += _sampling_violations(request.sampling.SerializeToString())
    if request.HasField("guide"):
        _check_guide(request.guide, found)
    return found


def read_tokens(prompt: broker_service_pb2.Prompt, form: str | None, found: list[Violation]) -> TokenArray | None:
    """Reads a prompt's token ids.

    Returns:
        The ids, shape [n], int32, not yet compared with any vocabulary; None for a text prompt, which has none yet, and
        where a violation was added.
    """
    if form == "packed_token_ids":
        packed = prompt.packed_token_ids
        if len(packed) % 4:
            found.append(
                Violation(
                    "prompt.packed_token_ids",
                    f"has {len(packed)} bytes, which is no multiple of 4; ids are little-endian int32",
                )
            )
            return None
        tokens = np.frombuffer(packed, dtype="<i4")
        field = "prompt.packed_token_ids"
    elif form == "tokens":
        tokens = np.array(prompt.tokens.ids, dtype=np.int32)
        field = "prompt.tokens.ids"
    else:
        if form is None:
            found.append(Violation("prompt", "is absent; one of text, tokens and packed_token_ids must be set"))
        elif not prompt.text:
            found.append(Violation("prompt.text", "is empty; a prompt has at least 1 token"))
        return None
    if not len(tokens):
        found.append(Violation(field, "has 0 ids; a prompt has at least 1 token"))
        return None
    return tokens


def check_open(job_id: str, lane: int) -> list[Violation]:
    """Returns everything that is wrong with the opening of a stream."""
    found: list[Violation] = []
    if len(job_id) > JOB_ID_CHARACTERS:
        found.append(_length("open.job_id", job_id, 0, JOB_ID_CHARACTERS))
    if not 0 <= lane <= LANE_LIMIT:
        found.append(Violation("open.lane", f"{lane} is no lane; lanes are 0 (BULK) to {LANE_LIMIT}"))
    return found


def _check_stops(request: broker_service_pb2.GenerationRequest, found: list[Violation]) -> None:
    if len(request.stop) > STOPS:
        found.append(Violation("stop", f"has {len(request.stop)} strings; at most {STOPS}"))
        return
    for index, stop in enumerate(request.stop):
        if not 1 <= (size := len(stop.encode())) <= STOP_BYTES:
            found.append(Violation(f"stop[{index}]", f"has {size} bytes of UTF-8; allowed are 1 to {STOP_BYTES}"))


@functools.lru_cache(maxsize=1024)
def _sampling_violations(serialized: bytes) -> tuple[Violation, ...]:
    """Remembered, since a job's rows nearly always sample alike."""
    sampling = generation_pb2.SamplingParameters.FromString(serialized)
    set_fields = {field.name: value for field, value in sampling.ListFields()}
    return tuple(
        Violation(f"sampling.{allowed.field}", f"is {value:g}; allowed is {allowed}")
        for allowed in _SAMPLING
        if (value := set_fields.get(allowed.field)) is not None and not allowed.admits(value)
    )


def _check_guide(guide: generation_pb2.Guide, found: list[Violation]) -> None:
    if guide.kind not in contract_pb2.GuideKind.values() or not guide.kind:
        kinds = ", ".join(f"{number} ({name})" for name, number in contract_pb2.GuideKind.items() if number)
        found.append(Violation("guide.kind", f"is {guide.kind}; kinds are {kinds}"))
    if not 1 <= (size := len(guide.text.encode())) <= GUIDE_BYTES:
        found.append(Violation("guide.text", f"has {size} bytes of UTF-8; allowed are 1 to {GUIDE_BYTES}"))


def _length(field: str, value: str, low: int, high: int) -> Violation:
    return Violation(field, f"has {len(value)} characters; allowed are {low} to {high}")
