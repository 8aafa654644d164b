# SPDX-License-Identifier: Apache-2.0
"""The RPCs of `inference.GRPCInferenceService`. Errors are raised; the server's interceptor gives them their form."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from google.rpc import code_pb2

from ifabric.broker.v1 import broker_service_pb2
from ifabric.kserve.v2 import inference_pb2, inference_pb2_grpc
from services.broker.kserve.answers import describe, last, piece, whole
from services.broker.kserve.calls import Call, in_their_words, read
from services.common import logs, reasons
from services.common.errors import FabricError, InvalidArgumentError, NotFoundError, Violation
from services.common.security import current_caller

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    import grpc

    from services.broker.frontdoor.live import LiveCall
    from services.broker.work import Catalog, CatalogEngine

    Context = grpc.aio.ServicerContext[Any, Any]

    class Live(Protocol):
        """How live calls are run: the front door's own way."""

        def __call__(
            self, request: broker_service_pb2.GenerationRequest, *, stream: bool
        ) -> AbstractAsyncContextManager[LiveCall]:
            """See `BrokerServicer.live`."""


FULL_NAME = "inference.GRPCInferenceService"
AT_ONCE = 256
"""Requests of one stream that run at the same time; a stream that brings more is read as they end."""
_RESPONSES_WAITING = 64
"""Responses that a stream's client has not taken; beyond them nothing further is asked of its calls."""
_NAME = "inference-fabric"
_log = logs.get("broker.kserve")


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """KServe's protocol.

    Args:
        live: Runs live calls.
        catalog: Engines on accepted nodes.
    """

    def __init__(self, live: Live, catalog: Catalog) -> None:
        self._live = live
        self._catalog = catalog
        self._draining = asyncio.Event()

    async def drain(self) -> None:
        """Streams are not read any further; what they brought ends."""
        self._draining.set()

    async def ServerLive(
        self, request: inference_pb2.ServerLiveRequest, context: Context
    ) -> inference_pb2.ServerLiveResponse:
        """See the proto."""
        return inference_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: inference_pb2.ServerReadyRequest, context: Context
    ) -> inference_pb2.ServerReadyResponse:
        """See the proto."""
        serving = any(engine.node_ids for engine in self._catalog.engines())
        return inference_pb2.ServerReadyResponse(ready=serving and not self._draining.is_set())

    async def ModelReady(
        self, request: inference_pb2.ModelReadyRequest, context: Context
    ) -> inference_pb2.ModelReadyResponse:
        """See the proto."""
        serving = bool(self._engines(request.name, request.version))
        return inference_pb2.ModelReadyResponse(ready=serving and not self._draining.is_set())

    async def ServerMetadata(
        self, request: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        """See the proto."""
        return inference_pb2.ServerMetadataResponse(name=_NAME, version=metadata.version(_NAME))

    async def ModelMetadata(
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        """See the proto."""
        engines = self._engines(request.name, request.version)
        if not engines:
            raise self._unknown(request.name, request.version)
        return describe(engines)

    async def ModelInfer(
        self, request: inference_pb2.ModelInferRequest, context: Context
    ) -> inference_pb2.ModelInferResponse:
        """See the proto."""
        try:
            call = self._read(request)
            async with self._live(call.request, stream=False) as live:
                return whole(call, await live.result())
        except FabricError as error:
            raise self._told(request, error) from error

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[inference_pb2.ModelInferRequest], context: Context
    ) -> AsyncIterator[inference_pb2.ModelStreamInferResponse]:
        """See the proto."""
        stream = _Stream(self._live, self._draining, self._read, self._told)
        async with aclosing(stream.responses(request_iterator)) as responses:
            async for response in responses:
                yield response

    def _read(self, request: inference_pb2.ModelInferRequest) -> Call:
        """Turns a call into a request, of outputs that its model makes.

        Raises:
            FabricError: see `read`.
            InvalidArgumentError: the call names outputs that the model does not make.
        """
        call = read(request, _tenant())
        engines = self._engines(request.model_name, request.model_version)
        if engines and call.asked:
            made = [output.name for output in describe(engines).outputs]
            lacking = [name for name in call.asked if name not in made]
            if lacking:
                why = f"is not made by {request.model_name[:128]!r}, which makes {', '.join(made)}"
                raise InvalidArgumentError.of([Violation(f"outputs.{name}", why) for name in lacking])
        return call

    def _told(self, request: inference_pb2.ModelInferRequest, error: FabricError) -> FabricError:
        """The same error in the words of the protocol."""
        if error.reason == reasons.ENGINE_UNKNOWN:
            return self._unknown(request.model_name, request.model_version, "model_")
        return in_their_words(error)

    def _unknown(self, name: str, version: str, prefix: str = "") -> NotFoundError:
        """The refusal of a model, or version of one, that nobody serves; `prefix` is that of the message's fields."""
        served = [engine for engine in self._catalog.engines() if engine.node_ids]
        versions = sorted(engine.digest for engine in served if engine.contract.engine_id == name)
        if versions:
            why = f"{prefix}version: no accepted node serves {version[:128]!r} of {name[:128]!r}; served are: "
            return NotFoundError(why + ", ".join(versions[:16]), reason=reasons.ENGINE_UNKNOWN)
        names = ", ".join(sorted({engine.contract.engine_id for engine in served})[:16]) or "none"
        return NotFoundError(
            f"{prefix}name: no accepted node serves {name[:128]!r}; served are: {names}", reason=reasons.ENGINE_UNKNOWN
        )

    def _engines(self, name: str, version: str) -> list[CatalogEngine]:
        return [
            engine
            for engine in self._catalog.engines()
            if engine.node_ids and engine.contract.engine_id == name and version in ("", engine.digest)
        ]


class _Stream:
    """One ModelStreamInfer: a reader that starts a task a request, and a bounded queue of what they answer.

    Args:
        live: Runs live calls.
        draining: Ends the reading.
        read_call: Turns a message into a request.
        told: Turns an error of a message into the protocol's words.
    """

    def __init__(
        self,
        live: Live,
        draining: asyncio.Event,
        read_call: Callable[[inference_pb2.ModelInferRequest], Call],
        told: Callable[[inference_pb2.ModelInferRequest, FabricError], FabricError],
    ) -> None:
        self._live = live
        self._draining = draining
        self._read_call = read_call
        self._told = told
        self._places = asyncio.Semaphore(AT_ONCE)
        self._answers: asyncio.Queue[inference_pb2.ModelStreamInferResponse | None] = asyncio.Queue(_RESPONSES_WAITING)
        self._calls: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None

    async def responses(
        self, requests: AsyncIterator[inference_pb2.ModelInferRequest]
    ) -> AsyncGenerator[inference_pb2.ModelStreamInferResponse]:
        """Yields what the requests answer, until the client has half-closed and all have ended.

        Raises:
            FabricError: a message could not be read, or speaks for another tenant; the whole stream ends.
        """
        reader = asyncio.create_task(self._read_all(requests))
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
            if self._failure is not None:
                raise self._failure
        finally:
            await _end(reader, *self._calls)

    async def _read_all(self, requests: AsyncIterator[inference_pb2.ModelInferRequest]) -> None:
        try:
            while (request := await self._next(requests)) is not None:
                await self._places.acquire()
                call = asyncio.create_task(self._run(request))
                self._calls.add(call)
                call.add_done_callback(self._ended)
            while self._calls:
                await asyncio.wait(set(self._calls))
        except Exception as error:  # whoever takes the answers raises it, behind those that are there
            self._failure = error
        await self._answers.put(None)

    async def _next(
        self, requests: AsyncIterator[inference_pb2.ModelInferRequest]
    ) -> inference_pb2.ModelInferRequest | None:
        """The next request; None at the end of the stream, or once the broker drains."""
        coming = asyncio.create_task(_take(requests))
        ending = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else None
        finally:
            await _end(coming, ending)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._places.release()

    async def _run(self, request: inference_pb2.ModelInferRequest) -> None:
        """Runs one request; its failure is its own answer."""
        try:
            call = self._read_call(request)
            async with self._live(call.request, stream=True) as live, aclosing(live.events()) as events:
                await self._pass_on(call, events)
        except FabricError as error:
            told = self._told(request, error)
            await self._tell(request, f"{code_pb2.Code.Name(code_pb2.Code.ValueType(told.code))}: {told.message}")
        except Exception:
            # What is not an error of ours must not end the stream's other requests, nor tell what it found.
            _log.exception("request.failed", request_id=request.id[:128])
            await self._tell(request, "INTERNAL: internal error")

    async def _pass_on(self, call: Call, events: AsyncIterator[broker_service_pb2.GenerateStreamResponse]) -> None:
        started = broker_service_pb2.Started()
        async for event in events:
            kind = event.WhichOneof("event")
            if kind == "started":
                started = event.started
                continue
            made = piece(call, started, event.delta) if kind == "delta" else last(call, event.finished)
            await self._answers.put(inference_pb2.ModelStreamInferResponse(infer_response=made))

    async def _tell(self, request: inference_pb2.ModelInferRequest, why: str) -> None:
        # tritonclient hands on the message alone: it says which of the stream's requests failed.
        whose = f"request {request.id[:128]!r}: " if request.id else ""
        answer = inference_pb2.ModelStreamInferResponse(error_message=whose + why)
        answer.infer_response.id = request.id
        answer.infer_response.model_name = request.model_name
        await self._answers.put(answer)


async def _take(requests: AsyncIterator[inference_pb2.ModelInferRequest]) -> inference_pb2.ModelInferRequest | None:
    return await anext(requests, None)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _tenant() -> str:
    """Whom the caller speaks for; everybody is one tenant where callers are not known."""
    caller = current_caller()
    return "" if caller is None else caller.tenant
