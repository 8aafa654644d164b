# SPDX-License-Identifier: Apache-2.0
"""The RPCs of `ifabric.broker.v1.BrokerService`. Errors are raised; the server's interceptor gives them their form."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.broker.frontdoor.exchange import ExchangeLimits, ExchangeStream, draining
from services.broker.frontdoor.intake import Intake
from services.broker.frontdoor.live import LiveCall
from services.broker.frontdoor.records import Records
from services.broker.frontdoor.selection import EngineDirectory
from services.common.errors import (
    DeadlineExceededError,
    FabricError,
    InvalidArgumentError,
    ResourceExhaustedError,
    Violation,
)
from services.common.telemetry import propagation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from services.broker.frontdoor.tokenization import CodecStore
    from services.broker.work import Catalog, Core
    from services.common.telemetry import Telemetry

    Context = grpc.aio.ServicerContext[Any, Any]

FULL_NAME = "ifabric.broker.v1.BrokerService"
OPEN_TIMEOUT_S = 30.0
"""Longest wait for the first message of a stream, in seconds."""
_RETRY_S = 1.0
CANCEL_IDS = 100_000
"""Most ids in one CancelRequests."""


@dataclass(frozen=True, slots=True)
class FrontDoorLimits:
    """Bounds of the front door."""

    live_timeout_s: float
    """Longest time that a live call may take, in seconds, whatever its client's deadline."""
    streams_max: int
    """Most batched streams at a time."""
    exchange: ExchangeLimits
    """Bounds of each batched stream."""


class BrokerServicer(broker_service_pb2_grpc.BrokerServiceServicer):
    """The front door.

    Args:
        core: Runs the work.
        catalog: Engines on accepted nodes.
        codecs: Their tokenizers.
        telemetry: For counts and times.
        limits: Bounds.
    """

    def __init__(
        self, core: Core, catalog: Catalog, codecs: CodecStore, telemetry: Telemetry, limits: FrontDoorLimits
    ) -> None:
        self._core = core
        self._catalog = catalog
        self._intake = Intake(EngineDirectory(catalog), codecs)
        self._records = Records(telemetry)
        self._limits = limits
        self._streams: set[ExchangeStream] = set()
        self._places_taken = 0
        self._draining = False

    async def drain(self) -> None:
        """Refuses new work from now on; streams end once what they brought has."""
        self._draining = True
        for stream in self._streams:
            stream.drain()

    async def Generate(
        self, request: broker_service_pb2.GenerateRequest, context: Context
    ) -> broker_service_pb2.GenerateResponse:
        """See the proto."""
        async with self.live(request.request, stream=False) as call:
            return broker_service_pb2.GenerateResponse(result=await call.result())

    async def GenerateStream(
        self, request: broker_service_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[broker_service_pb2.GenerateStreamResponse]:
        """See the proto."""
        async with self.live(request.request, stream=True) as call, aclosing(call.events()) as events:
            async for event in events:
                yield event

    async def Exchange(
        self, request_iterator: AsyncIterator[broker_service_pb2.ExchangeRequest], context: Context
    ) -> AsyncIterator[broker_service_pb2.ExchangeResponse]:
        """See the proto."""
        async with self._place():
            first = await _first(request_iterator)
            if self._draining:
                raise draining()
            if first is None or not first.HasField("open"):
                raise InvalidArgumentError.of([Violation("open", "is absent; a stream's first message carries it")])
            stream = ExchangeStream(
                first.open, core=self._core, intake=self._intake, records=self._records, limits=self._limits.exchange
            )
            self._streams.add(stream)
            try:
                async with aclosing(stream.responses(request_iterator, first)) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._streams.discard(stream)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places for streams, from the call's arrival."""
        if self._places_taken >= self._limits.streams_max:
            raise ResourceExhaustedError(
                f"{self._places_taken} streams are open, the most that this broker serves", retry_after_s=_RETRY_S
            )
        self._places_taken += 1
        try:
            yield
        finally:
            self._places_taken -= 1

    async def CancelRequests(
        self, request: broker_service_pb2.CancelRequestsRequest, context: Context
    ) -> broker_service_pb2.CancelRequestsResponse:
        """See the proto."""
        if (count := len(request.request_ids)) > CANCEL_IDS:
            raise InvalidArgumentError.of([Violation("request_ids", f"has {count} ids; at most {CANCEL_IDS}")])
        keys = [(request.tenant, request_id) for request_id in request.request_ids]
        return broker_service_pb2.CancelRequestsResponse(cancelled_count=self._core.cancel(keys))

    async def ListEngines(
        self, request: broker_service_pb2.ListEnginesRequest, context: Context
    ) -> broker_service_pb2.ListEnginesResponse:
        """See the proto."""
        return broker_service_pb2.ListEnginesResponse(
            engines=[
                broker_service_pb2.Engine(
                    engine_digest=engine.digest, contract=engine.contract, node_ids=engine.node_ids
                )
                for engine in self._catalog.engines()
                if engine.node_ids
            ]
        )

    @asynccontextmanager
    async def live(self, request: broker_service_pb2.GenerationRequest, *, stream: bool) -> AsyncIterator[LiveCall]:
        """Runs a live call from its acceptance to its end; leaving ends the work, whatever the reason.

        Args:
            request: What is wanted.
            stream: Whether its output is wanted as it comes.

        Raises:
            FabricError: it is refused, or did not end within the longest time that a live call may take.
        """
        call = await self._accept(request, stream=stream)
        try:
            async with asyncio.timeout(self._limits.live_timeout_s):
                yield call
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request did not end within {self._limits.live_timeout_s:g} s, the longest that a call may take"
            ) from None
        finally:
            call.leave()

    async def _accept(self, request: broker_service_pb2.GenerationRequest, *, stream: bool) -> LiveCall:
        try:
            if self._draining:
                raise draining()
            (plan,) = await self._intake.plan([request], id_required=False)
            if isinstance(plan, FabricError):
                raise plan
            call = LiveCall(plan, self._core, self._records)
            call.submit(stream=stream, traceparent=propagation.traceparent())
        except FabricError as error:
            self._records.live_refused(request, error)
            raise
        return call


async def _first(
    messages: AsyncIterator[broker_service_pb2.ExchangeRequest],
) -> broker_service_pb2.ExchangeRequest | None:
    """Waits for the message that opens a stream; None where the client has nothing to say."""
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            return await anext(messages, None)
    except TimeoutError:
        raise DeadlineExceededError(f"the stream was not opened within {OPEN_TIMEOUT_S:g} s") from None
