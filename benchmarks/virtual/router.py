# SPDX-License-Identifier: Apache-2.0
"""A real HTTP router as a dispatch policy: its decisions, our virtual cards.

The router runs as its users run it, as a process with one URL for each worker. Behind every URL stands a loopback
server that answers what the router asks about a worker, and holds each request open until its card has ended it in
virtual time; so the router sees loads as it would see them, and time stands still while it decides. Requests go in one
after the other, in order of arrival, as many at once as the cards together have slots.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Self, TypeVar

import xxhash

from benchmarks.virtual.policies import jobs_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from benchmarks.virtual.engine import Card, Job
    from benchmarks.virtual.workloads import Workload

BLOCK_CHARACTERS = 16
"""Characters that stand for the tokens of one block: routers of this kind compare text."""
ANSWER_WITHIN_S = 30.0
"""How long the router may take for one request before the benchmark gives up."""

T = TypeVar("T")

_HTTP2 = b"PRI * HTTP/2.0"
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class RouterError(Exception):
    """The router could not be driven; says what stopped it."""


def text_of(job: Job, block_tokens: int) -> str:
    """A prompt as text: equal blocks are equal characters, and a block that is cut short has fewer of them."""
    text = "".join(f"{xxhash.xxh3_64_intdigest(str(block).encode()):016x}" for block in job.blocks)
    return text[: max(1, job.prompt_tokens * BLOCK_CHARACTERS // block_tokens)]


class HttpRouter:
    """One router process and the workers that it believes in.

    Args:
        workers: How many.
        command: Makes the command line from two free ports, the first of which the router serves on, and the workers'
            URLs.

    Raises:
        RouterError: it does not start, or does not answer.
    """

    def __init__(self, workers: int, command: Callable[[Sequence[int], Sequence[str]], Sequence[str]]) -> None:
        self._workers = workers
        self._command = command
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[asyncio.Server] = []
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the router
        self._arrived: asyncio.Queue[tuple[int, asyncio.Future[None]]] = asyncio.Queue()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._open: dict[Job, tuple[asyncio.Future[None], asyncio.Task[int]]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._do(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def route(self, job: Job, text: str) -> int:
        """Sends a request in and returns the worker that the router picked for it."""
        return self._do(self._route(job, text))

    def end(self, job: Job) -> None:
        """Its card has ended a request: the router hears of it, and has passed the answer on when this returns."""
        self._do(self._end(job))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10 * ANSWER_WITHIN_S)

    async def _start(self) -> None:
        for worker in range(self._workers):
            self._servers.append(await asyncio.start_server(self._serve(worker), "127.0.0.1", 0, limit=1 << 22))
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in self._servers]
        ports = _free_ports(2)
        self._port = ports[0]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(ports, urls), stdout=self._said, stderr=self._said
            )
        except OSError as error:
            raise RouterError(f"the router cannot be started: {error}") from error
        deadline = self._loop.time() + ANSWER_WITHIN_S
        status = 0
        while status != 200:
            if self._process.returncode is not None:
                self._said.seek(0)
                last = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
                raise RouterError(f"the router ended with status {self._process.returncode}: {''.join(last)}")
            if self._loop.time() > deadline:
                raise RouterError(f"the router has not found its workers within {ANSWER_WITHIN_S:g} s")
            await asyncio.sleep(0.2)
            status = await self._warm_up()

    async def _warm_up(self) -> int:
        """One request through the router; returns its status, 0 where it does not listen yet."""
        try:
            sent = asyncio.ensure_future(self._post("warm up"))
            arrived = asyncio.ensure_future(self._arrived.get())
            await asyncio.wait({sent, arrived}, timeout=ANSWER_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            if arrived.done():
                arrived.result()[1].set_result(None)
            else:
                arrived.cancel()
            return await asyncio.wait_for(sent, ANSWER_WITHIN_S)
        except OSError:
            return 0

    async def _stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        for _, task in self._open.values():
            task.cancel()
        for _, writer in self._idle:
            writer.close()
        for server in self._servers:
            server.close()
        self._said.close()

    async def _route(self, job: Job, text: str) -> int:
        sent = asyncio.ensure_future(self._post(text))
        arrived = asyncio.ensure_future(self._arrived.get())
        await asyncio.wait({sent, arrived}, timeout=ANSWER_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        if not arrived.done():
            arrived.cancel()
            why = f"status {sent.result()}" if sent.done() else f"no decision within {ANSWER_WITHIN_S:g} s"
            raise RouterError(f"the router took no request: {why}")
        worker, answer = arrived.result()
        self._open[job] = answer, sent
        return worker

    async def _end(self, job: Job) -> None:
        answer, sent = self._open.pop(job)
        answer.set_result(None)
        status = await asyncio.wait_for(sent, ANSWER_WITHIN_S)
        if status != 200:
            raise RouterError(f"the router answered {status}")

    async def _post(self, text: str) -> int:
        """Sends one request to the router and returns the status of its answer."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = json.dumps({"text": text, "sampling_params": {"max_new_tokens": 1}}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        answer, _ = await _message(reader)
        self._idle.append((reader, writer))
        return int(answer.split(b" ", 2)[1])

    def _serve(self, worker: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    head, _ = await _message(reader)
                    if head.startswith(_HTTP2):
                        return  # asks whether this speaks gRPC
                    if head.startswith(b"POST /generate "):
                        answer: asyncio.Future[None] = self._loop.create_future()
                        self._arrived.put_nowait((worker, answer))
                        await answer
                    writer.write(_ANSWER)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            finally:
                writer.close()

        return serve


class Routed:
    """The router's decisions, as a policy of the fleet."""

    def __init__(self, workload: Workload, cards: Sequence[Card], router: HttpRouter) -> None:
        self._router = router
        self._block_tokens = cards[0].block_tokens
        self._waiting = deque(jobs_of(workload))
        self._room = sum(card.slots for card in cards)

    def computed(self, worker: int, job: Job, now_us: float) -> None:
        """See Policy."""

    def ended(self, worker: int, job: Job, now_us: float) -> None:
        """See Policy."""
        self._router.end(job)
        self._room += 1

    def wake_us(self) -> float | None:
        """See Policy."""
        return None

    def give(self, now_us: float) -> list[tuple[int, Job]]:
        """See Policy."""
        given = []
        while self._waiting and self._room:
            job = self._waiting.popleft()
            given.append((self._router.route(job, text_of(job, self._block_tokens)), job))
            self._room -= 1
        return given


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now: the router does not say which one it took."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(it.getsockname()[1]) for it in sockets]
    for it in sockets:
        it.close()
    return ports


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Reads the head and the body of one HTTP message."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            size = int(value)
    return head, await reader.readexactly(size)
