# SPDX-License-Identifier: Apache-2.0
"""The client, for programs without an event loop: the async one, run by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ifabric_client.aio import AsyncClient

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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ifabric-client", daemon=True)
        self._thread.start()
        options: dict[str, Any] = {"tls": tls, "token": token, "tenant": tenant}
        if retries is not None:
            options["retries"] = retries

        async def open_() -> AsyncClient:
            return AsyncClient(address, **options)

        try:
            self._client = self._wait(open_())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and every call that is open. Closing again changes nothing."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            self._end_loop()

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
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt ends the call, too
            raise

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def step() -> tuple[bool, T | None]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        async def leave() -> None:
            closing: Any = items
            await closing.aclose()

        try:
            while (more := self._wait(step()))[0]:
                yield more[1]  # type: ignore[misc] # an item, where there is one
        finally:
            if not self._loop.is_closed():
                self._wait(leave())

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
