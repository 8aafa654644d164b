# SPDX-License-Identifier: Apache-2.0
"""The one server interceptor: who may call, outcome, error form, trace and log context of every call.

Handlers raise `FabricError`s and never touch the RPC's status. What else they raise is our fault: the client hears
"internal error" with a correlation id, the log has the rest under the same id.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.rpc import code_pb2
from grpc_status import rpc_status
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from services.common import logs, reasons
from services.common.errors import FabricError, InternalError, to_status
from services.common.rpc.options import MESSAGE_S, STRANGERS_MESSAGE_S
from services.common.rpc.requests import Incoming, checked, only, owned, tolerant
from services.common.security.caller import set_caller
from services.common.security.needs import need_of
from services.common.security.tenants import request_count
from services.common.telemetry import names, propagation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from services.common.rpc.underway import Underway
    from services.common.security import Access, Caller
    from services.common.telemetry import Telemetry

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

_log = logs.get("common.rpc")

_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that count as the server's error on a span; the others are the caller's."""


_REFUSALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Wraps all four kinds of RPC."""

    def __init__(self, telemetry: Telemetry, access: Access, underway: Underway) -> None:
        self._underway = underway
        self._tracer = telemetry.tracer
        self._access = access
        self._refused = telemetry.counter(names.CALLS_REFUSED)
        self._duration = telemetry.histogram(names.RPC_SERVER_DURATION)
        self._active = telemetry.up_down(names.RPC_SERVER_ACTIVE)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the handler of a call, wrapped; gRPC answers UNIMPLEMENTED where there is none."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method.lstrip("/")
        unary: Any = handler.unary_unary or handler.stream_unary
        streaming: Any = handler.unary_stream or handler.stream_stream

        takes_many = bool(handler.request_streaming)

        async def answer(messages: AsyncIterator[Any], context: Context) -> Any:
            return await self._run(method, context, messages, takes_many, lambda request: unary(request, context))

        async def stream(messages: AsyncIterator[Any], context: Context) -> None:
            await self._run(
                method, context, messages, takes_many, lambda request: _pump(streaming(request, context), context)
            )

        # All take many: of a handler that takes one, gRPC would read the message before it asks anybody who calls.
        many = bool(handler.response_streaming)
        make: Any = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler
        wrapped = stream if many else answer
        return make(wrapped, tolerant(handler.request_deserializer), handler.response_serializer)  # type: ignore[no-any-return]

    async def _run(
        self,
        method: str,
        context: Context,
        messages: AsyncIterator[Any],
        takes_many: bool,
        call: Callable[[Any], Awaitable[Any]],
    ) -> Any:
        """Runs one call: `call` is given its message, or the iterator over them where it takes many."""
        self._underway.begin(method, context)
        started, code = time.perf_counter(), "OK"
        labels = {"rpc.method": method}
        self._active.add(1, labels)
        parent = propagation.from_metadata(context.invocation_metadata() or ())
        with (
            structlog.contextvars.bound_contextvars(rpc=method),
            self._tracer.start_as_current_span(
                method,
                parent,
                SpanKind.SERVER,
                {"rpc.system.name": "grpc", "rpc.method": method},
                record_exception=False,
                set_status_on_exception=False,
            ) as span,
        ):
            try:
                caller = self._access.admit(method, context)
                if caller is None:
                    within_s = STRANGERS_MESSAGE_S if need_of(method).anybody else MESSAGE_S
                    return await call(Incoming(messages) if takes_many else checked(await only(messages, within_s)))
                return await self._run_as(caller, messages, takes_many, call)
            except asyncio.CancelledError:
                # The client is gone, its deadline has passed, or the server stops; gRPC tells only by the clock.
                remaining: float | None = context.time_remaining()
                code = "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"
                raise
            except grpc.aio.AbortError:
                code = _code_of(context)
                raise
            except Exception as error:
                status = to_status(error if isinstance(error, FabricError) else _internal(error, method))
                code = code_pb2.Code.Name(status.code)
                if isinstance(error, FabricError) and (code in _REFUSALS or error.reason == reasons.QUOTA_EXCEEDED):
                    self._refused.add(1, {"reason": error.reason})
                await context.abort_with_status(rpc_status.to_status(status))
            finally:
                span.set_attribute("rpc.status_code", code)
                if code in _FAULTS:
                    span.set_status(trace.Status(StatusCode.ERROR, code))
                self._active.add(-1, labels)
                self._duration.record(time.perf_counter() - started, {**labels, "rpc.status_code": code})

    async def _run_as(
        self, caller: Caller, messages: AsyncIterator[Any], takes_many: bool, call: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Runs the call of somebody who is known: on their tenant, within their quota."""
        set_caller(caller)
        quotas = self._access.quotas
        with structlog.contextvars.bound_contextvars(caller=caller.name):
            if quotas is None:
                if takes_many:
                    return await call(Incoming(messages, caller))
                return await call(owned(await only(messages, MESSAGE_S), caller))
            with quotas.call(caller.tenant):
                if takes_many:
                    return await call(Incoming(messages, caller, quotas, self._access.check_standing))
                request = await only(messages, MESSAGE_S)
                quotas.take(caller.tenant, request_count(request))
                return await call(owned(request, caller))


async def _pump(made: Any, context: Context) -> None:
    """Sends what a streaming handler yields, and closes it in this very task when the call ends early."""
    if not hasattr(made, "__aiter__"):
        await made  # the handler writes to the context itself
        return
    async with aclosing(made) as responses:
        async for response in responses:
            await context.write(response)


def _internal(error: Exception, method: str) -> InternalError:
    correlation = secrets.token_hex(8)
    _log.error("call.failed", method=method, correlation_id=correlation, exc_info=error)
    return InternalError(f"internal error (correlation id {correlation})", metadata={"correlation_id": correlation})


def _code_of(context: Context) -> str:
    number: Any = context.code()
    return number.name if isinstance(number, grpc.StatusCode) else str(code_pb2.Code.Name(number or 2))
