# SPDX-License-Identifier: Apache-2.0
"""The client, for programs that run an event loop."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import grpc

from ifabric.broker.v1 import broker_service_pb2 as pb
from ifabric.broker.v1 import broker_service_pb2_grpc, job_service_pb2_grpc
from ifabric_client import wire
from ifabric_client.connection import Tls, open_channel
from ifabric_client.errors import CallError, ClosedError, closed_meanwhile, of_call
from ifabric_client.jobs import Jobs
from ifabric_client.retries import Patience, RetryPolicy
from ifabric_client.streams import Run
from ifabric_client.values import Piece, Request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence

    from ifabric_client.values import Answer, Engine, Job, Outcome, Prompt

_PATIENT = RetryPolicy()


class AsyncClient:
    """A connection to one broker; used with `async with`, from one event loop.

    Args:
        address: `host:port`.
        tls: None for a connection in the clear.
        token: Sent with every call; a function is asked each time, so that tokens may be renewed.
        tenant: Owner of requests; leave it empty where a token says it.
        retries: How long to put up with a broker that is away or has no room.

    Raises:
        ValueError: a token would go to another machine in the clear; of calls, where it holds a line's end or the like.
        RuntimeError: of calls, after `close`.
        OSError: a file of `tls` cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | Callable[[], str] = "",
        tenant: str = "",
        retries: RetryPolicy = _PATIENT,
    ) -> None:
        self._token = token
        self._tenant = tenant
        self._retries = retries
        self._closed = False
        self._channel = open_channel(address, tls, has_token=bool(token))
        self._broker = broker_service_pb2_grpc.BrokerServiceStub(self._channel)
        self._jobs = Jobs(job_service_pb2_grpc.JobServiceStub(self._channel), self._metadata, tenant, retries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and every call that is open, with CANCELLED. Closing again changes nothing."""
        self._closed = True
        await self._channel.close()

    async def engines(self, *, timeout_s: float = 5.0) -> list[Engine]:
        """Lists the engines that serve.

        Raises:
            CallError: the broker refuses, or was away for too long.
        """
        reply = await self._again(
            lambda _: self._broker.ListEngines(pb.ListEnginesRequest(), timeout=timeout_s, metadata=self._metadata())
        )
        return [wire.engine(each) for each in reply.engines]

    async def generate(
        self, prompt: Prompt | Request, *, max_tokens: int | None = None, engine_id: str = "", timeout_s: float = 600.0
    ) -> Answer:
        """Generates one answer and returns it whole.

        Args:
            prompt: Text or token ids, or a Request, which then says everything.
            max_tokens: As in Request; only where `prompt` is none.
            engine_id: As in Request; only where `prompt` is none.
            timeout_s: Longest time that one try may take, in seconds.

        Raises:
            ValueError: `max_tokens` or `engine_id` beside a Request.
            CallError: it was refused, or did not end in time. UNAVAILABLE and RESOURCE_EXHAUSTED with a delay are tried
                again with the same id, as `retries` says.
        """
        message = self._message(prompt, max_tokens, engine_id)

        async def call(tries: int) -> pb.GenerateResponse:
            request = pb.GenerateRequest(request=message)
            return await self._broker.Generate(request, timeout=timeout_s, metadata=self._metadata())

        reply: pb.GenerateResponse = await self._again(call, own_id=True)
        return wire.answer(reply.result, message.request_id)

    async def stream(
        self, prompt: Prompt | Request, *, max_tokens: int | None = None, engine_id: str = "", timeout_s: float = 600.0
    ) -> AsyncIterator[Piece]:
        """Generates one answer and yields it as it comes; the last piece has the whole answer.

        Arguments and errors are those of `generate`; after the first piece nothing is tried again.
        """
        message = self._message(prompt, max_tokens, engine_id)
        patience, tried = Patience(self._retries), False
        with self._until_closed():
            while True:
                call = self._broker.GenerateStream(
                    pb.GenerateStreamRequest(request=message), timeout=timeout_s, metadata=self._metadata()
                )
                text, begun = "", False
                ids: tuple[int, ...] = ()
                try:
                    async for event in call:
                        if event.HasField("delta"):
                            begun, text, new = True, text + event.delta.text, tuple(event.delta.token_ids)
                            ids += new
                            yield Piece(event.delta.text, new)
                        elif event.HasField("finished"):
                            whole = wire.answer(event.finished, message.request_id, text=text, token_ids=ids)
                            yield Piece(whole.text[len(text) :], whole.token_ids[len(ids) :], whole)
                    return
                except grpc.aio.AioRpcError as error:
                    told = of_call(error)
                    if begun or not _worth_another(told, tried):
                        raise told from error
                    tried = True
                    await patience.wait(told, told.retry_after_s)
                finally:
                    call.cancel()

    def run(self, requests: Iterable[Request], *, window: int = 512) -> AsyncIterator[Outcome]:
        """Runs many requests over one stream and yields one outcome each, in the order in which they end.

        The broker keeps nothing of it: this process has to stay. For work that outlives processes see `bulk`.

        Args:
            requests: Read as the broker takes them.
            window: Most requests sent and not ended; at least 1.

        Raises:
            CallError: the broker was away, or had no room, for longer than `retries` allows.
            TypeError: what comes is no Request.
            ValueError: two requests that are open have one id, or the window takes none.
        """

        def open_stream() -> Any:
            return self._broker.Exchange(metadata=self._metadata())

        run = Run(open_stream, self._tenant, window, self._retries)
        return self._passed_on(run.outcomes(requests))

    def mine(self, prompts: Iterable[Prompt], *, engine_id: str = "", window: int = 512) -> AsyncIterator[Outcome]:
        """Computes the hidden state of each prompt; ids of outcomes are positions, from "0".

        Arguments and errors are those of `run`.
        """
        requests = (Request(prompt, engine_id=engine_id) for prompt in prompts)
        return self.run(requests, window=window)

    async def bulk(self, job_id: str, rows: Sequence[Request], *, engine_id: str = "") -> AsyncIterator[Outcome]:
        """Runs rows as a job that the broker keeps, and yields how each ended, in their order.

        Called again with the same arguments, by whichever process, it goes on where it was.

        Args:
            job_id: 1 to 128 letters, digits, `.`, `_`, `-`; unique for the tenant.
            rows: The rows; ids are unique in the job.
            engine_id: Engine for the whole job; empty for any that can.

        Raises:
            CallError: ALREADY_EXISTS where a job of this id has other rows; other refusals of the broker; UNAVAILABLE
                where it was away for too long.
            TypeError: `rows` is no sequence of Requests; nothing was sent.
        """
        await self.submit(job_id, rows, engine_id=engine_id)
        async with aclosing(self._passed_on(self._jobs.results(job_id))) as outcomes:
            async for outcome in outcomes:
                yield outcome

    async def submit(self, job_id: str, rows: Sequence[Request], *, engine_id: str = "") -> Job:
        """As `bulk`, without waiting for results."""
        with self._until_closed():
            return await self._jobs.submit(job_id, rows, engine_id)

    def results(self, job_id: str, *, first_row: int = 0) -> AsyncIterator[Outcome]:
        """Yields how the rows of a job ended, in their order, from a row on; waits for those that have not.

        Raises:
            CallError: NOT_FOUND where there is no such job.
        """
        return self._passed_on(self._jobs.results(job_id, first_row=first_row))

    async def job(self, job_id: str) -> Job:
        """Returns a job as it is.

        Raises:
            CallError: NOT_FOUND where there is none.
        """
        with self._until_closed():
            return await self._jobs.get(job_id)

    async def cancel_job(self, job_id: str) -> Job:
        """Ends a job; results that are there stay.

        Raises:
            CallError: NOT_FOUND where there is none.
        """
        with self._until_closed():
            return await self._jobs.cancel(job_id)

    def _message(self, prompt: Prompt | Request, max_tokens: int | None, engine_id: str) -> pb.GenerationRequest:
        if isinstance(prompt, Request):
            if max_tokens is not None or engine_id:
                raise ValueError(
                    "max_tokens and engine_id stand in the Request; what is said beside it would be left out"
                )
            request = prompt
        else:
            request = Request(prompt, max_tokens, engine_id=engine_id)
        named = request if request.id else replace(request, id=uuid.uuid4().hex)
        return wire.request_message(named, named.id, self._tenant)

    async def _again(self, call: Callable[[int], Any], *, own_id: bool = False) -> Any:
        patience, tries = Patience(self._retries), 0
        with self._until_closed():
            while True:
                try:
                    return await call(tries)
                except grpc.aio.AioRpcError as error:
                    told: CallError = of_call(error)
                    if not _worth_another(told, own_id and tries > 0):
                        raise told from error
                    tries += 1
                    await patience.wait(told, told.retry_after_s)

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Tells a call that ended because the client was closed from one whose task was cancelled.

        Raises:
            ClosedError: the client had been closed before.
        """
        self._check_open()
        try:
            yield
        except ClosedError:
            raise closed_meanwhile() from None  # it was to be tried again
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise closed_meanwhile() from None
            raise

    async def _passed_on(self, outcomes: AsyncGenerator[Outcome]) -> AsyncGenerator[Outcome]:
        """The same outcomes, ended with them."""
        with self._until_closed():
            async with aclosing(outcomes):
                async for outcome in outcomes:
                    yield outcome

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError

    def _current_token(self) -> str:
        return self._token if isinstance(self._token, str) else self._token()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        self._check_open()
        token = self._current_token()
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the token holds a character that no header carries, such as the end of a file's line")
        return (("authorization", f"Bearer {token}"),) if token else ()


def _worth_another(error: CallError, tried: bool) -> bool:
    """Whether to try again. After a break the broker may still be ending the first try, under the same id."""
    return error.passing or (tried and error.reason == "ID_IN_FLIGHT")
