# SPDX-License-Identifier: Apache-2.0
"""The client, for programs without an event loop: the async one, run by a thread of its own."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ifabric_client.aio import AsyncClient
from ifabric_client.errors import CallError, ClosedError, closed_meanwhile
from ifabric_client.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence

    from ifabric_client.connection import Tls
    from ifabric_client.retries import RetryPolicy
    from ifabric_client.values import Answer, Engine, Job, Outcome, Piece, Prompt, Request

T = TypeVar("T")


class Client:
    """A connection to one broker, whose calls block; used with `with`, from any thread.

    Arguments, methods and errors are those of `AsyncClient`, with plain iterators in place of async ones. An iterator
    that is left early ends what it stands for.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | Callable[[], str] = "",
        tenant: str = "",
        retries: RetryPolicy | None = None,
    ) -> None:
        options: dict[str, Any] = {"tls": tls, "token": token, "tenant": tenant}
        if retries is not None:
            options["retries"] = retries

        async def open_() -> AsyncClient:
            return AsyncClient(address, **options)

        self._thread = LoopThread()
        try:
            self._client = self._thread.run(open_())
        except BaseException:
            self._thread.end()
            raise
        # Also where nobody closes it: while the interpreter ends, an iterator that was left would wait for a thread
        # that runs no more.
        self._end = weakref.finalize(self, _end, self._thread, self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and every call that is open, with CANCELLED. Closing again changes nothing."""
        self._end()

    def engines(self, *, timeout_s: float = 5.0) -> list[Engine]:
        """See AsyncClient."""
        return self._wait(self._client.engines(timeout_s=timeout_s))

    def generate(
        self, prompt: Prompt | Request, *, max_tokens: int | None = None, engine_id: str = "", timeout_s: float = 600.0
    ) -> Answer:
        """See AsyncClient."""
        return self._wait(
            self._client.generate(prompt, max_tokens=max_tokens, engine_id=engine_id, timeout_s=timeout_s)
        )

    def stream(
        self, prompt: Prompt | Request, *, max_tokens: int | None = None, engine_id: str = "", timeout_s: float = 600.0
    ) -> Iterator[Piece]:
        """See AsyncClient."""
        return self._iterate(
            self._client.stream(prompt, max_tokens=max_tokens, engine_id=engine_id, timeout_s=timeout_s)
        )

    def run(self, requests: Iterable[Request], *, window: int = 512) -> Iterator[Outcome]:
        """See AsyncClient. `requests` are read by the client's own thread."""
        return self._iterate(self._client.run(requests, window=window))

    def mine(self, prompts: Iterable[Prompt], *, engine_id: str = "", window: int = 512) -> Iterator[Outcome]:
        """See AsyncClient. `prompts` are read by the client's own thread."""
        return self._iterate(self._client.mine(prompts, engine_id=engine_id, window=window))

    def bulk(self, job_id: str, rows: Sequence[Request], *, engine_id: str = "") -> Iterator[Outcome]:
        """See AsyncClient."""
        return self._iterate(self._client.bulk(job_id, rows, engine_id=engine_id))

    def submit(self, job_id: str, rows: Sequence[Request], *, engine_id: str = "") -> Job:
        """See AsyncClient."""
        return self._wait(self._client.submit(job_id, rows, engine_id=engine_id))

    def results(self, job_id: str, *, first_row: int = 0) -> Iterator[Outcome]:
        """See AsyncClient."""
        return self._iterate(self._client.results(job_id, first_row=first_row))

    def job(self, job_id: str) -> Job:
        """See AsyncClient."""
        return self._wait(self._client.job(job_id))

    def cancel_job(self, job_id: str) -> Job:
        """See AsyncClient."""
        return self._wait(self._client.cancel_job(job_id))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        # A step that was interrupted has to end before the iterator can be left.
        one_at_a_time = asyncio.Lock()

        async def step() -> tuple[bool, T | None]:
            async with one_at_a_time:
                try:
                    return True, await anext(items)
                except StopAsyncIteration:
                    return False, None

        async def leave() -> None:
            closing: Any = items
            async with one_at_a_time:
                await closing.aclose()

        begun = False
        try:
            while (more := self._wait(step()))[0]:
                begun = True
                yield more[1]  # type: ignore[misc] # an item, where there is one
        except ClosedError:
            # Between two steps nothing of it runs, and still it was open.
            if begun:
                raise closed_meanwhile() from None
            raise
        finally:
            try:
                self._wait(leave())
            except (RuntimeError, CallError):
                if self._end.alive:
                    raise


def _end(thread: LoopThread, client: AsyncClient) -> None:
    thread.end(client.close())
