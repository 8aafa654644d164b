# SPDX-License-Identifier: Apache-2.0
"""What goes into the library and what comes out of it, as values without pointers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.errors import InvalidArgumentError, Violation
from services.worker.native._layout import REQUEST


class EventKind(enum.IntEnum):
    """`IFAB_EVENT_*`."""

    TOKENS = 1
    CONTEXT_DONE = 2
    FINISHED = 3
    FAILED = 4


class GuideKind(enum.IntEnum):
    """`IFAB_GUIDE_*`; numbers of `ifabric.engine.v1.GuideKind`."""

    NONE = 0
    JSON_SCHEMA = 1
    REGEX = 2
    GRAMMAR = 3


_IGNORE_END = 0x1
_LOGPROBS = 0x2
_PROMPT_LOGPROBS = 0x4
_NO_PAYLOAD = 0x8


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a request is run, apart from its prompt.

    Requests of one job usually share one: it is turned into the library's form once, when it is made, and a submit
    copies it for each request. Ranges are the library's to check; what does not fit its number types raises
    OverflowError here. Defaults are those of `ifabric.engine.v1.SamplingParameters`; none depends on an engine.
    """

    max_tokens: int
    """For each sample; 0 exactly where the engine generates nothing."""
    samples: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a sample beside the engine's own end tokens."""
    ignore_end: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    payload: bool = True
    """Whether the payload that the engine makes is wanted; nothing to an engine without one."""
    guide_kind: int = GuideKind.NONE
    guide: bytes = b""
    """UTF-8."""
    salt: int = 0
    priority: int = 0
    record: bytes = field(init=False, repr=False, compare=False)
    """`ifab_request_t` with everything but the prompt filled in; points into this object."""
    _pointed_at: tuple[object, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes the library's form."""
        stop_ids = np.array(self.stop_ids, dtype=np.int32)
        guide = np.frombuffer(self.guide, dtype=np.uint8) if self.guide else np.empty(0, np.uint8)
        row = np.zeros(1, dtype=REQUEST)
        if stop_ids.size:
            row["stop_ids"], row["stop_count"] = stop_ids.ctypes.data, stop_ids.size
        if guide.size:
            row["guide"], row["guide_size"] = guide.ctypes.data, guide.size
        row["guide_kind"] = self.guide_kind
        for name in ("max_tokens", "samples", "salt", "priority"):
            row[name] = getattr(self, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
        ):
            row["sampling"][name] = getattr(self, name)
        row["flags"] = (
            (_IGNORE_END if self.ignore_end else 0)
            | (_LOGPROBS if self.logprobs else 0)
            | (_PROMPT_LOGPROBS if self.prompt_logprobs else 0)
            | (0 if self.payload else _NO_PAYLOAD)
        )
        object.__setattr__(self, "record", row.tobytes())
        object.__setattr__(self, "_pointed_at", (stop_ids, guide))


@dataclass(slots=True)
class Request:
    """One request to the engine.

    Raises:
        InvalidArgumentError: `token_ids` is not a whole number of ids.
    """

    id: int
    """Unique among requests of the engine that have not ended; 64 bits."""
    token_ids: bytes
    """The prompt: packed little-endian int32."""
    options: Options
    head_ends: tuple[int, ...] = ()
    """Lengths, ascending, of leading parts of the prompt that others are expected to share."""

    def __post_init__(self) -> None:
        """Sees to it that the library never reads past the last id."""
        if len(self.token_ids) % 4:
            raise InvalidArgumentError.of(
                [Violation("token_ids", f"{len(self.token_ids)} bytes are not a whole number of int32 ids")]
            )


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """One thing wrong with an engine directory."""

    path: str
    found: str
    expected: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the library says of an engine directory without loading it."""

    contract_sha256: str
    """64 lower-case hexadecimal digits, of the bytes of contract.json."""
    configuration_file: str
    """The file by which a backend knew the directory; empty where none or several did."""
    findings: tuple[EngineFinding, ...]
    """Everything that `Engine.create` would refuse without loading."""


@dataclass(frozen=True, slots=True)
class PollMinimum:
    """The smallest buffers that a poll of an engine may use."""

    events: int
    tokens: int
    payload_bytes: int
    text_bytes: int


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What a loaded engine says of itself."""

    contract_sha256: str
    vocab_size: int
    hidden_size: int
    layers: int
    kv_pool_blocks: int
    """0 without a cache."""
    load_ms: int
    limits: dict[str, Any]
    """The limits in force, in the JSON form of the contract."""
    capabilities: dict[str, Any]
    """The capabilities in force, in the JSON form of the contract."""
    poll: PollMinimum


@dataclass(frozen=True, slots=True)
class Stats:
    """A reading of an engine's counters; meanings are those of `ifab_stats_t`. Counters only grow."""

    progress_tick: int
    steps: int
    progress_only_steps: int
    admission_retries: int
    leader_waits: int
    requests_submitted: int
    requests_refused: int
    requests_finished: int
    requests_failed: int
    requests_cancelled: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    generated_tokens: int
    payload_bytes: int
    payload_failures: int
    queued: int
    active: int
    kv_blocks_used: int
    kv_blocks_total: int
    payload_slots_used: int
    payload_slots_total: int
    events_pending: int
    held_back: bool
    engine_failed: bool
    busy_us: int
    idle_us: int
    uptime_us: int
    step_us: tuple[int, ...]
    """24 buckets: bucket i counts steps of [2^i, 2^(i+1)) microseconds; the last also longer ones."""
    step_fill: tuple[int, ...]
    """24 buckets: bucket i counts steps that used [i/24, (i+1)/24) of the token budget; a full one is in the last."""
