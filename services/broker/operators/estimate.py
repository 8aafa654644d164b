# SPDX-License-Identifier: Apache-2.0
"""Analyses the rows of a job before it runs: plans them as the job would, looks at what they share, predicts a run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ifabric.broker.v1 import job_service_pb2
from ifabric.broker.v1 import operator_service_pb2 as pb
from services.broker.frontdoor.intake import Plan
from services.broker.frontdoor.selection import Candidates, EngineProfile
from services.broker.jobs import pinning, rules
from services.broker.operators.analysis import Analysis
from services.broker.operators.prediction import Seat, predict
from services.common.errors import (
    DeadlineExceededError,
    FabricError,
    InvalidArgumentError,
    UnavailableError,
    Violation,
    to_status,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from google.rpc import status_pb2

    from ifabric.broker.v1 import broker_service_pb2
    from services.broker.frontdoor.intake import Intake
    from services.broker.operating import Operable
    from services.broker.operators.analysis import Worth
    from services.broker.work import Catalog, CatalogEngine

ROWS_MAX = 2_000_000
REFUSED_TOLD = 10
_SILENCE_S = 60.0
"""How long a client may send nothing."""
_WAIT_S = 600.0
"""How long rows may be waited for in all: one analysis runs at a time, and who dawdles holds up the others."""
_UNNAMED = "analysis"


@dataclass(slots=True)
class _Seen:
    """What came of the rows so far."""

    rows: int = 0
    refused: int = 0
    told: list[pb.RefusedRow] = field(default_factory=list)
    engines: Counter[frozenset[str]] = field(default_factory=Counter)
    """Rows by the engines that may serve them."""
    analysis: Analysis | None = None
    """Of the rows that would run; None before the first."""
    held_to: str = ""
    """Digest of the build that the rows are held to; empty for none."""

    def refuse(self, row_id: str, error: FabricError | status_pb2.Status) -> None:
        self.refused += 1
        if len(self.told) < REFUSED_TOLD:
            status = to_status(error) if isinstance(error, FabricError) else error
            self.told.append(pb.RefusedRow(row_id=row_id, error=status))


class Estimator:
    """Looks at rows before they run.

    Args:
        intake: Plans requests.
        catalog: The engines.
        core: Knows which nodes get work, and how fast engines are.
        decode_weight: Prompt tokens that one generated token counts for when work is divided between nodes.
    """

    def __init__(self, intake: Intake, catalog: Catalog, core: Operable, *, decode_weight: float) -> None:
        self._intake = intake
        self._catalog = catalog
        self._core = core
        self._decode_weight = decode_weight

    async def estimate(self, messages: AsyncIterator[pb.AnalyzeRowsRequest]) -> pb.AnalyzeRowsResponse:
        """Takes all rows in and says what they are worth; see the proto.

        Raises:
            FabricError: the spec is at fault, no engine serves, or there are more rows than an analysis takes.
        """
        spec: job_service_pb2.JobSpec | None = None
        seen = _Seen()
        first: list[job_service_pb2.JobRow] | None = []
        waits = Waits()
        while (message := await waits.next(messages)) is not None:
            if spec is None:
                spec = _spec_of(message)
            elif message.HasField("spec"):
                raise InvalidArgumentError.of([Violation("spec", "is in a later message; the first one carries it")])
            if first is None:
                await self._take(spec, message.rows, seen)
                continue
            first += message.rows
            if len(first) >= pinning.ROWS:
                await self._hold(spec, first[: pinning.ROWS], seen)
                await self._take(spec, first, seen)
                first = None
        if spec is None:
            raise InvalidArgumentError.of([Violation("spec", "is absent; the first message carries it")])
        if first:
            await self._hold(spec, first, seen)
            await self._take(spec, first, seen)
        worth = await asyncio.to_thread((seen.analysis or Analysis(0)).worth)
        return self._response(seen, worth)

    async def _hold(self, spec: job_service_pb2.JobSpec, rows: Sequence[job_service_pb2.JobRow], seen: _Seen) -> None:
        """Holds the rows to the build of their engine that a job of them would be held to."""
        if spec.any_digest or spec.engine.engine_digest:
            return
        engines = [
            each
            for each in self._catalog.engines()
            if each.node_ids and spec.engine.engine_id in ("", each.contract.engine_id)
        ]
        requests = [_request(spec, row) for row in rows if rules.fault(row, row.row_id.encode()) is None]
        if engines and Candidates.of([EngineProfile.of(each) for each in engines]).one_model:
            best = await pinning.choose(self._intake, engines, requests, self._core.nodes_taking)
            seen.held_to = best.digest

    async def _take(self, spec: job_service_pb2.JobSpec, rows: Sequence[job_service_pb2.JobRow], seen: _Seen) -> None:
        seen.rows += len(rows)
        if seen.rows > ROWS_MAX:
            raise InvalidArgumentError.of([Violation("rows", f"are more than {ROWS_MAX:,}; analyze a part of them")])
        requests: list[broker_service_pb2.GenerationRequest] = []
        for row in rows:
            error = rules.fault(row, row.row_id.encode())
            if error is not None:
                seen.refuse(row.row_id, error)
                continue
            made = _request(spec, row)
            made.engine.engine_digest = seen.held_to or made.engine.engine_digest
            requests.append(made)
        plans = await self._intake.plan(requests)
        if seen.held_to:
            plans = await pinning.told(self._intake, requests, plans, spec.engine)
        for request, plan in zip(requests, plans, strict=True):
            if isinstance(plan, Plan):
                seen.engines[plan.engine_digests] += 1
                if seen.analysis is None:
                    seen.analysis = Analysis(self._block_tokens(plan.engine_digests))
                seen.analysis.add(request.request_id, plan.tokens, plan.salt, plan.samples * plan.max_tokens)
            elif pinning.passes(plan):
                raise plan
            else:
                seen.refuse(request.request_id, plan)

    def _block_tokens(self, digests: frozenset[str]) -> int:
        """The finest blocks of engines, as the core's trees have them; 0 where they share nothing."""
        blocks = [
            engine.contract.limits.kv_block_tokens.value
            for engine in self._catalog.engines()
            if engine.digest in digests
        ]
        return min((size for size in blocks if size), default=0)

    def _response(self, seen: _Seen, worth: Worth) -> pb.AnalyzeRowsResponse:
        digests = frozenset[str]().union(*seen.engines)
        engines = [engine for engine in self._catalog.engines() if engine.digest in digests]
        working = {node.node_id for node in self._core.node_work() if node.connected and not node.cordoned}
        response = pb.AnalyzeRowsResponse(
            row_count=seen.rows,
            refused_count=seen.refused,
            refused=seen.told,
            prompt_tokens_logical=worth.logical_tokens,
            prompt_tokens_bound=worth.bound_tokens,
            generated_tokens_max=worth.generated_tokens_max,
            heads=[
                pb.SharedHead(
                    tokens=head.tokens, row_count=head.rows, saved_tokens=head.saved_tokens, row_id=head.row_id
                )
                for head in worth.heads
            ],
            engines=[self._engine(engine, seen, working) for engine in engines],
        )
        if worth.rows:
            response.prediction.CopyFrom(self._prediction(engines, response.engines, worth))
        return response

    def _engine(self, engine: CatalogEngine, seen: _Seen, working: set[str]) -> pb.EngineSpeed:
        pace, share = self._core.pace(engine.digest), self._core.output_share(engine.digest)
        return pb.EngineSpeed(
            engine_digest=engine.digest,
            engine_id=engine.contract.engine_id,
            node_ids=[node_id for node_id in engine.node_ids if node_id in working],
            row_count=sum(rows for digests, rows in seen.engines.items() if engine.digest in digests),
            step_us=None if pace is None else pace.step_us,
            prompt_token_us=None if pace is None else pace.prompt_token_us,
            generated_token_us=None if pace is None else pace.generated_token_us,
            output_share=share,
        )

    def _prediction(
        self, engines: Sequence[CatalogEngine], speeds: Sequence[pb.EngineSpeed], worth: Worth
    ) -> pb.JobPrediction:
        seats = [
            Seat(self._core.pace(engine.digest), engine.contract.limits.slots, engine.contract.limits.step_token_budget)
            for engine, speed in zip(engines, speeds, strict=True)
            for _ in speed.node_ids
        ]
        if not seats:
            raise UnavailableError("no node that serves an engine of these rows gets work now: see `ifab nodes`")
        known = [(speed.output_share, speed.row_count) for speed in speeds if speed.HasField("output_share")]
        rows = sum(count for _, count in known)
        share = sum(share * count for share, count in known) / rows if rows else None
        made = predict(worth, seats, output_share=share, decode_weight=self._decode_weight)
        return pb.JobPrediction(
            node_count=len(seats),
            prompt_tokens_computed=made.computed_tokens,
            prompt_tokens_cut=made.cut_tokens,
            generated_tokens=made.generated_tokens,
            wall_ms=None if made.wall_s is None else round(1000 * made.wall_s),
        )


def _request(spec: job_service_pb2.JobSpec, row: job_service_pb2.JobRow) -> broker_service_pb2.GenerationRequest:
    made = rules.row_request(spec.defaults, row.request)
    made.request_id = row.row_id[:128]
    made.tenant = spec.tenant
    made.engine.CopyFrom(spec.engine)
    return made


def _spec_of(message: pb.AnalyzeRowsRequest) -> job_service_pb2.JobSpec:
    if not message.HasField("spec"):
        raise InvalidArgumentError.of([Violation("spec", "is absent; the first message carries it")])
    spec = message.spec
    spec.job_id = spec.job_id or _UNNAMED
    rules.check_spec(spec)
    return spec


class Waits:
    """The waits for a client's messages: each has a limit, and all together have one.

    Args:
        silence_s: Longest wait for one message.
        all_s: Longest time for all of them.
    """

    def __init__(self, silence_s: float = _SILENCE_S, all_s: float = _WAIT_S) -> None:
        self._silence_s = silence_s
        self._all_s = all_s
        self._left_s = all_s

    async def next(self, messages: AsyncIterator[pb.AnalyzeRowsRequest]) -> pb.AnalyzeRowsRequest | None:
        """The next message; None once the client has sent all.

        Raises:
            DeadlineExceededError: a limit is over.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(min(self._silence_s, self._left_s)):
                return await anext(messages, None)
        except TimeoutError:
            if self._silence_s <= self._left_s:
                raise DeadlineExceededError(f"no rows came for {self._silence_s:g} s") from None
            raise DeadlineExceededError(
                f"rows were waited for {self._all_s:g} s in all, the most that one analysis may: send them faster, or "
                "analyze a part of them"
            ) from None
        finally:
            self._left_s -= time.monotonic() - began
