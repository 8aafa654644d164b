# SPDX-License-Identifier: Apache-2.0
"""Many requests over one stream, each with one outcome, whatever breaks in between.

A window of requests is open at any time, so that neither side holds a large input. When the stream breaks, what has no
outcome goes again over a new one.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import grpc

from ifabric.broker.v1 import broker_service_pb2 as pb
from ifabric_client import wire
from ifabric_client.ending import Ending
from ifabric_client.errors import CallError
from ifabric_client.retries import Patience
from ifabric_client.values import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

    from ifabric_client.retries import RetryPolicy
    from ifabric_client.values import Request

_REQUESTS_A_MESSAGE = 64
_BYTES_A_MESSAGE = 1024 * 1024


class Run:
    """One run over as many streams as it takes.

    Args:
        open_stream: Makes a call of Exchange.
        tenant: Owner of the requests; empty for the caller's own.
        window: Most requests sent and not ended.
        policy: How long to put up with breaks.

    Raises:
        ValueError: the window takes no request.
    """

    def __init__(self, open_stream: Callable[[], Any], tenant: str, window: int, policy: RetryPolicy) -> None:
        if window < 1:
            raise ValueError(f"the window is {window}; it is at least 1")
        self._open_stream = open_stream
        self._tenant = tenant
        self._window = window
        self._patience = Patience(policy)
        self._open: dict[str, pb.GenerationRequest] = {}
        self._again: list[pb.GenerationRequest] = []
        self._prefix = f"{uuid.uuid4().hex[:16]}-"
        """Before positions that stand for ids: other runs of the tenant have the same positions."""
        self._resent: set[str] = set()
        """Open requests that went over an earlier stream, which the broker may still be ending."""
        self._unsendable: dict[str, CallError] = {}
        """Why open requests went without what they hold: the broker refuses them in their place."""
        self._room = asyncio.Condition()
        self._full = False
        """Whether the broker has put a request off: the stream brings no further ones, and a later one begins anew."""

    async def outcomes(self, requests: Iterable[Request]) -> AsyncGenerator[Outcome]:
        """Yields one outcome a request, in the order in which they end.

        Raises:
            CallError: the broker was away, or had no room, for longer than the policy allows.
            TypeError: what comes is no Request.
            ValueError: two requests that are open have one id.
        """
        rows = self._messages(requests)
        while True:
            call = self._open_stream()
            ending = Ending(call)
            sender = asyncio.create_task(self._send(call, rows))
            put_off: CallError | None = None
            self._full = False
            try:
                async for message in call:
                    for each in message.outcomes:
                        own = self._unsendable.pop(each.request_id, None)
                        shown = each.request_id.removeprefix(self._prefix)
                        outcome = Outcome(shown, error=own) if own else wire.outcome(shown, each)
                        if outcome.error is not None and self._is_put_off(each.request_id, outcome.error):
                            put_off = outcome.error  # nothing is wrong with the request
                            self._full = True
                        else:
                            self._patience.progress()
                            self._open.pop(each.request_id)
                            self._resent.discard(each.request_id)
                            yield outcome
                    async with self._room:
                        self._room.notify_all()
                await sender
            except asyncio.CancelledError:
                # The sender ends the call where the input fails, and whoever reads it hears of a cancel only.
                _raise_failure(sender)
                raise
            except grpc.aio.AioRpcError as error:
                put_off = await ending.error(error)
                if not put_off.passing:
                    raise put_off from error
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
                call.cancel()
            self._again = list(self._open.values())
            self._resent.update(self._open)
            if put_off is None:
                return
            await self._patience.wait(put_off, put_off.retry_after_s)

    def _is_put_off(self, request_id: str, error: CallError) -> bool:
        return error.passing or (error.reason == "ID_IN_FLIGHT" and request_id in self._resent)

    def _messages(self, requests: Iterable[Request]) -> Iterator[pb.GenerationRequest]:
        for position, request in enumerate(requests):
            wire.check_row(request, position)
            request_id = request.id or f"{self._prefix}{position}"
            try:
                message = wire.request_message(request, request_id, self._tenant)
            except CallError as error:
                self._unsendable[request_id] = error
                message = pb.GenerationRequest(request_id=request_id, tenant=self._tenant)
            yield message

    def _next(self, rows: Iterator[pb.GenerationRequest]) -> pb.GenerationRequest | None:
        if self._again:
            return self._again.pop()
        row = next(rows, None)
        if row is not None and row.request_id in self._open:
            raise ValueError(f"two requests have the id {row.request_id!r}")
        return row

    async def _send(self, call: Any, rows: Iterator[pb.GenerationRequest]) -> None:
        try:
            await call.write(pb.ExchangeRequest(open=pb.ExchangeOpen(lane=pb.LANE_BULK)))
            while True:
                message, size = pb.ExchangeRequest(), 0
                async with self._room:
                    await self._room.wait_for(self._may_send)
                while self._takes_more(len(message.requests), size):
                    row = self._next(rows)
                    if row is None:
                        break
                    self._open[row.request_id] = row
                    message.requests.append(row)
                    size += row.ByteSize()
                if not message.requests:
                    break
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended; whoever reads it hears why
        except BaseException:
            call.cancel()  # the input failed: nobody waits for a stream that will not go on
            raise

    def _takes_more(self, count: int, size: int) -> bool:
        """Whether a message of so many requests and bytes takes another one, of whatever length."""
        return not self._full and count < _REQUESTS_A_MESSAGE and size < _BYTES_A_MESSAGE and self._may_send()

    def _may_send(self) -> bool:
        """Whether there is something to do: room, or nothing more to send. What goes again is in the window already."""
        return self._full or bool(self._again) or len(self._open) < self._window


def _raise_failure(task: asyncio.Task[None]) -> None:
    """Raises what a task failed with; returns where it has not failed."""
    failure = task.exception() if task.done() and not task.cancelled() else None
    if failure is not None:
        raise failure from None
