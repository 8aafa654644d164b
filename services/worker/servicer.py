# SPDX-License-Identifier: Apache-2.0
"""The RPCs of `ifabric.worker.v1.WorkerService`."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ifabric.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.common import logs, reasons
from services.common.errors import FabricError, FailedPreconditionError, ResourceExhaustedError, UnavailableError
from services.worker.description import report_message, stats_message
from services.worker.files import EngineFiles
from services.worker.probe import run_probe
from services.worker.streams import ExecuteStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    import grpc
    from opentelemetry.trace import Tracer

    from ifabric.engine.v1 import contract_pb2, node_pb2
    from services.worker.credit import CreditBook
    from services.worker.engine_host import EngineHost
    from services.worker.metrics import EngineMetrics
    from services.worker.native import Stats

    Context = grpc.aio.ServicerContext[Any, Any]

STREAMS_MAX = 64
"""Brokers that may be connected at once; each may send at least the largest item that the engine takes."""

_log = logs.get("worker.servicer")


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """One engine, as brokers and the provisioner see it. What is not loaded yet is FAILED_PRECONDITION."""

    def __init__(self, directory: Path, host: EngineHost, metrics: EngineMetrics, tracer: Tracer) -> None:
        self._host = host
        self._metrics = metrics
        self._tracer = tracer
        self._files = EngineFiles(directory)
        self._node: node_pb2.NodeDescription | None = None
        self._book: CreditBook | None = None
        self._streams: set[ExecuteStream] = set()
        self._probing = asyncio.Lock()
        self._refusal: FabricError | None = None

    def describe_as(self, node: node_pb2.NodeDescription) -> None:
        """Takes the node's description, as registered."""
        self._node = node

    def open(self, book: CreditBook) -> None:
        """Begins to take work: the engine is loaded."""
        self._book = book

    def refresh(self, stats: Stats) -> None:
        """Tells every broker the engine's counters, and its credit where that has changed."""
        if self._book is None:
            return
        self._book.measure(stats.prompt_tokens_computed, stats.prompt_tokens_cached)
        message = stats_message(stats)
        for stream in self._streams:
            stream.refresh(message)

    def refuse_new(self, error: FabricError) -> None:
        """From now on refuses new work, and new streams, with `error`; what is in flight goes on. The first counts."""
        self._refusal = self._refusal or error
        for stream in self._streams:
            stream.refuse_new(self._refusal)

    async def drain(self, within_s: float) -> None:
        """Takes nothing new, lets what is in flight end within the time, hands the rest back, and ends all streams."""
        going = UnavailableError("this worker is going away", reason=reasons.DRAINING, retry_after_s=0.0)
        self.refuse_new(going)
        try:
            async with asyncio.timeout(within_s):
                for stream in tuple(self._streams):
                    await stream.idle.wait()
        except TimeoutError:
            _log.warning("drain.handed_back", in_flight=sum(stream.in_flight for stream in self._streams))
        for stream in self._streams:
            stream.end(self._refusal or going)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_service_pb2.ExecuteRequest], context: Context
    ) -> AsyncGenerator[worker_service_pb2.ExecuteResponse]:
        """See the proto."""
        node, book = self._loaded()
        if self._refusal is not None:
            raise self._refusal
        if len(self._streams) >= STREAMS_MAX:
            raise ResourceExhaustedError(f"{STREAMS_MAX} brokers are connected already", retry_after_s=1.0)
        stream = ExecuteStream(self._host, book, self._tracer, node, _payload_form(node))
        self._streams.add(stream)
        self._metrics.streams.add(1)
        try:
            async with aclosing(stream.run(request_iterator)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._streams.discard(stream)
            self._metrics.streams.add(-1)

    async def Describe(
        self, request: worker_service_pb2.DescribeRequest, context: Context
    ) -> worker_service_pb2.DescribeResponse:
        """See the proto."""
        node, _ = self._loaded()
        return worker_service_pb2.DescribeResponse(
            node=node, report=report_message(self._host.description), stats=stats_message(self._host.stats())
        )

    async def Probe(
        self, request: worker_service_pb2.ProbeRequest, context: Context
    ) -> worker_service_pb2.ProbeResponse:
        """See the proto."""
        node, book = self._loaded()
        async with self._probing:
            began_s = time.monotonic()
            probed = await run_probe(self._host, tuple(request.token_ids))
            elapsed_ms = int((time.monotonic() - began_s) * 1000)
        return worker_service_pb2.ProbeResponse(
            report=report_message(self._host.description),
            usage=probed.usage,
            payload=probed.payload_form(_payload_form(node), book.capacity.payload_bytes),
            payload_bytes=probed.payload_bytes,
            elapsed_ms=elapsed_ms,
        )

    async def FetchFile(
        self, request: worker_service_pb2.FetchFileRequest, context: Context
    ) -> AsyncGenerator[worker_service_pb2.FetchFileResponse]:
        """See the proto."""
        if self._node is None:
            raise FailedPreconditionError(
                "the engine directory has not been read yet", reason=reasons.ENGINE_NOT_LOADED
            )
        if request.engine_digest != self._node.engine_digest:
            raise FailedPreconditionError(
                f"this worker has engine {self._node.engine_digest}, not {request.engine_digest!r}",
                reason=reasons.ENGINE_DIFFERS,
            )
        async with aclosing(self._files.send(self._node.contract, request.path)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _loaded(self) -> tuple[node_pb2.NodeDescription, CreditBook]:
        if self._node is None or self._book is None:
            raise FailedPreconditionError("no engine is loaded here", reason=reasons.ENGINE_NOT_LOADED)
        return self._node, self._book


def _payload_form(node: node_pb2.NodeDescription) -> contract_pb2.PayloadForm | None:
    payload = node.contract.capabilities.payload
    return payload.value if payload.WhichOneof("kind") == "value" else None
