# SPDX-License-Identifier: Apache-2.0
"""The seam inside the broker: what the front door hands to the core, and what comes back.

The front door (`frontdoor/`) turns wire messages into `Work` and results into wire messages: validation, tokenization,
detokenization, stop strings. The core (`core/`) decides what runs next and where: tree, order, credits, dispatch,
loss, accounting. Neither sees the other's insides.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from ifabric.engine.v1 import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ifabric.broker.v1 import broker_service_pb2
    from ifabric.engine.v1 import contract_pb2
    from services.broker.costs import JobCosts
    from services.common.errors import FabricError

TokenArray = npt.NDArray[np.int32]
"""Token ids, shape [n], dtype int32, little-endian, C-contiguous, never written to once made."""


class Lane(enum.IntEnum):
    """How urgently work is served; numbers of the proto."""

    INTERACTIVE = 1
    BULK = 2


LANE_NAMES: Final = {Lane.INTERACTIVE: "interactive", Lane.BULK: "bulk"}
"""What metrics, spans and logs call them."""


@dataclass(slots=True, eq=False)
class Work:
    """One valid request. Nothing behind the front door checks it again."""

    key: tuple[str, str]
    """(tenant, request_id): unique among work in flight."""
    tokens: TokenArray
    """The prompt; at least one id. The core takes it over: once the work is accepted this is empty, so that the ids of
    a prompt that waits lie in memory once, packed."""
    max_tokens: int
    """For each sample; 0 for engines that generate nothing."""
    engine_digests: frozenset[str]
    """Engines that may serve it, as known when it was accepted; never empty."""
    sink: Sink
    """Who hears what becomes of it."""
    lane: Lane = Lane.BULK
    priority: int = 0
    samples: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    sampling: generation_pb2.SamplingParameters = field(default_factory=generation_pb2.SamplingParameters)
    logprobs: bool = False
    prompt_logprobs: bool = False
    guide: generation_pb2.Guide | None = None
    salt: int = 0
    """Cached heads are shared within one salt only; 0 is the common one."""
    stream_tokens: bool = False
    """Whether tokens are wanted as they come."""
    payload_bytes: int = 0
    """Bytes of payload that its end will bring; 0 for none."""
    job: str = ""
    """Job that it belongs to; empty for single calls."""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """How one sample ended."""

    tokens: TokenArray
    """All of the sample's tokens where the work did not stream; those not yet delivered otherwise."""
    logprobs: npt.NDArray[np.float32] | None
    finish_reason: int
    """`generation_pb2.FinishReason`."""
    stop_token_id: int
    """-1 where no stop token ended it."""


@dataclass(frozen=True, slots=True)
class WorkEnd:
    """How work ended well."""

    samples: Sequence[SampleEnd]
    usage: generation_pb2.Usage
    """Summed over attempts: what a lost attempt computed was computed."""
    engine_digest: str
    node_id: str
    payload: generation_pb2.Payload | None
    prompt_logprobs: npt.NDArray[np.float32] | None
    attempts: int


class Sink(Protocol):
    """Hears what becomes of one piece of work. Called on the event loop; must not block and must not raise.

    Exactly one of `finished` and `failed` is called, last.
    """

    def started(self, work: Work, engine_digest: str) -> None:
        """The first attempt was dispatched. Called at most once."""

    def tokens(self, work: Work, sample: int, tokens: TokenArray, logprobs: npt.NDArray[np.float32] | None) -> None:
        """New tokens of a sample; only for work with `stream_tokens`."""

    def restarted(self, work: Work) -> bool:
        """The attempt whose tokens were delivered is lost with its worker.

        True: none of them has left the house, they are forgotten, and the work starts anew (stop strings of a row that
        does not stream). False: somebody has read them, and the work ends UNAVAILABLE. Asked only after `tokens`.
        """

    def finished(self, work: Work, end: WorkEnd) -> None:
        """It ended well."""

    def failed(self, work: Work, error: FabricError) -> None:
        """It ended with an error."""


class Core(Protocol):
    """What the front door asks of the core. All methods run on the event loop and return at once."""

    def submit(self, works: Sequence[Work]) -> list[FabricError | None]:
        """Takes work in. Each piece is accepted (None) or refused by itself.

        Refusals: AlreadyExistsError (the key is in flight), ResourceExhaustedError (the bound on waiting work, with
        retry_after_s), UnavailableError (draining).
        """

    def cancel(self, keys: Sequence[tuple[str, str]]) -> int:
        """Ends work; each piece still hears its end (`FINISH_REASON_CANCELLED`). Returns how many were in flight."""

    def finish_early(self, work: Work) -> None:
        """The front door has all it wants of streamed work (a stop string matched): the engine need not go on.

        The sink hears `finished` as after a cancel.
        """

    def nodes_taking(self, engine_digest: str) -> int:
        """How many nodes that serve an engine are connected and get work now."""

    def pause_job(self, job: str, paused: bool) -> None:
        """Dispatches nothing more of a job until it is called again: its reader is slow, or somebody wants it so.

        What was dispatched goes on. Unknown jobs are ignored.
        """

    def job_costs(self, job: str) -> JobCosts:
        """What a job has cost up to now, beyond its tokens; nothing where no work of that name was accepted."""

    def end_job(self, job: str) -> broker_service_pb2.JobReport:
        """Ends the accounting of a job and returns it; an empty report where no work of that name was accepted.

        Filled in: everything that the engines and the tree know. The front door adds what only it knows: `job_id` as
        the client wrote it, `requests`, `failed`, `wall_ms`. Called once, when every work of the job has ended.
        """


@dataclass(frozen=True, slots=True)
class CatalogEngine:
    """An engine that serves, or did lately."""

    digest: str
    contract: contract_pb2.EngineContract
    """Complete: the provisioner accepted it. Never changes for one digest."""
    node_ids: tuple[str, ...]
    """Accepted nodes that serve it now, in order; empty where the last one left lately. Work for it is taken all the
    same: the core waits for a node, or fails the work UNAVAILABLE."""


class Catalog(Protocol):
    """Engines on accepted nodes, as the core learns them from the provisioner. Read on the event loop."""

    @property
    def revision(self) -> int:
        """Grows whenever `engines` would answer differently from before."""

    @property
    def synced(self) -> bool:
        """Whether the provisioner has been heard since the start; before that nobody knows which engines there are."""

    def engines(self) -> Sequence[CatalogEngine]:
        """All engines, in order of engine_id, then digest."""

    async def fetch_file(self, engine_digest: str, path: str) -> bytes:
        """Brings one file of an engine directory from a worker that serves it, verified against the contract's digest.

        Raises:
            NotFoundError: no such engine, or the contract lists no such file.
            UnavailableError: no worker can send it now.
        """
