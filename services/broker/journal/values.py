# SPDX-License-Identifier: Apache-2.0
"""What a journal keeps, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Mapping


class JournalFullError(ResourceExhaustedError):
    """There is no room for more: nothing of what the call brought was kept, everything committed before is there."""


class State(enum.IntEnum):
    """Where a job stands, as kept; numbers of the proto's `JobState`.

    STALLED is never kept: a broker that cannot go on says so while that is true, and forgets it with its process.
    """

    UPLOADING = 1
    RUNNING = 2
    PAUSED = 3
    COMPLETED = 5
    CANCELLED = 6


ENDED = (State.COMPLETED, State.CANCELLED)
"""States that a job never leaves."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What rows have cost; sums of the engines' own counts."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reattempts: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one node did for a job."""

    rows: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job."""

    number: int
    """Its key in the journal; never used again."""
    tenant: str
    job_id: str
    spec: bytes
    """Serialized `JobSpec` as the client sent it, priority and deadline apart."""
    priority: int
    deadline: float | None
    """Seconds since the epoch."""
    state: State
    state_reason: str
    rows: int
    """Durable rows."""
    finished: int
    failed: int
    size: int
    """Bytes of rows, results and payloads."""
    engine_digest: str
    created: float
    ended: float | None
    end_code: int
    """`google.rpc.Code` of rows without a result, once the job was cancelled."""
    bound_tokens: int
    """What `JobReport.prompt_tokens_bound` says, of the groups that were given out; negative where it is unknown: rows
    were given out by an earlier version, which did not keep it."""
    spent: Spent = field(default_factory=Spent)


class Row(NamedTuple):
    """One row as the client sent it."""

    row_id: bytes
    body: bytes
    """Serialized `GenerationRequest`; empty where the row came with an error."""
    sort_key: bytes
    """Compared as bytes it puts rows that share heads next to each other."""
    failure: bytes
    """Serialized `RowResult` of a row that never was one; empty otherwise."""


class StoredRow(NamedTuple):
    """One row on its way to an engine."""

    row: int
    row_id: bytes
    body: bytes


class Payload(NamedTuple):
    """Where the payload of a result lies."""

    shard: str
    offset: int
    size: int
    crc32: int


class Result(NamedTuple):
    """How one row ended."""

    row: int
    body: bytes
    """Serialized `RowResult`, payload data left out where `payload` says where it is."""
    failed: bool
    payload: Payload | None = None


class Group(NamedTuple):
    """Consecutive rows of a job's order."""

    number: int
    first: int
    """Position in the order, from 0."""
    last: int
    """Inclusive."""
    reach: int | None = None
    """Bytes of sort key that it has in common with a neighbour, at most; None where keys do not tell: they are equal as
    far as they go, or prompts of the job are of several forms."""
    counted: bool = False
    """Whether the bound of the job has it in."""


class Bound(NamedTuple):
    """What a group adds to the bound of its job; see `services.broker.jobs.bound`."""

    tokens: int
    """For what no other group can share."""
    block_tokens: int
    """For each block of `blocks` that no earlier group has brought."""
    blocks: tuple[int, ...]
    """Blocks that others may share, by their chains, signed 64-bit."""
    ends: tuple[int, ...]
    """Ends of prompts without a tail that others may share; each new one takes a token off."""


class Costs(NamedTuple):
    """What one stretch of work on a job has cost; later ones of the same stretch take its place."""

    stretch: str
    """Names it: no two brokers, and no two times that one broker worked on the job, have the same."""
    body: bytes
    """`services.broker.costs.JobCosts`, as it is kept."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Results of one job that are committed together."""

    job: int
    results: tuple[Result, ...]
    groups: tuple[int, ...] = ()
    """Numbers of groups that end with it."""
    spent: Spent = field(default_factory=Spent)
    shares: Mapping[str, Share] = field(default_factory=dict)
    """By node."""
    bounds: tuple[tuple[int, Bound], ...] = ()
    """Groups that were given out, by number, before any of their rows had a result."""
    costs: Costs | None = None
    """What the job has cost here up to now; None where that is not known."""


@dataclass(slots=True)
class Counts:
    """What a process has committed since its start; written by the journal's own thread."""

    commits: int = 0
    accepted: int = 0
    """Rows taken in."""
    finished: int = 0
    """Rows whose result was kept."""
    failed: int = 0
    """Rows whose error was kept."""
    full: int = 0
    """Transactions that failed for lack of room."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of a batch."""

    ended: bool
    """Whether its job has ended, now or before."""
    finished: int = 0
    """Rows of which a result was kept; the others had one."""
    failed: int = 0
    """Rows of which an error was kept."""


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What a tenant has in the journal."""

    open_jobs: int
    """Jobs that have not ended."""
    rows: int
    size: int
    """Bytes of rows, results and payloads."""
