# SPDX-License-Identifier: Apache-2.0
"""How the Python client ends: closed with work under way, interrupted, or left alone by a program that ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from ifabric_client import AsyncClient, CallError, Client, Request
from tests.support.processes import ROOT
from tests.support.waiting import block_until, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.door import Door

pytestmark = pytest.mark.timeout(120)


def endless() -> Iterator[Request]:
    """Requests for as long as anybody takes them."""
    for number in itertools.count():
        yield Request("x", 256, id=f"{number}", engine_id="texts")


CALLS: dict[str, Callable[[Client, str], Iterator[Any]]] = {
    "stream": lambda client, _: client.stream("x", max_tokens=256, engine_id="texts"),
    "run": lambda client, _: client.run(endless()),
    "results": lambda client, job: client.results(job),
}


@pytest.fixture
def job(door: Door) -> Iterator[str]:
    """A job that does not end while a test looks at it."""
    name = uuid.uuid4().hex
    with Client(door.suite.broker) as client:
        client.submit(name, [Request("x", 256)] * 3000, engine_id="texts")
        yield name
        client.cancel_job(name)


def test_closing_ends_what_other_threads_wait_for(door: Door, job: str) -> None:
    client = Client(door.suite.broker)
    begun: queue.Queue[str] = queue.Queue()
    ended: dict[str, BaseException] = {}

    def wait(name: str) -> None:
        try:
            items = CALLS[name](client, job)
            next(items)
            begun.put(name)
            list(items)
        except BaseException as error:
            ended[name] = error

    names = ["run", "results"]  # a stream may have ended before the client is closed
    threads = [threading.Thread(target=wait, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    assert {begun.get(timeout=30) for _ in threads} == set(names)
    client.close()
    for thread in threads:
        thread.join(30)
    assert set(ended) == set(names)
    assert all(isinstance(error, CallError) and error.code == "CANCELLED" for error in ended.values()), ended
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.job(job)


@pytest.mark.parametrize("name", CALLS)
def test_an_iterator_that_is_open_ends_with_cancelled_also_between_two_steps(door: Door, job: str, name: str) -> None:
    client = Client(door.suite.broker)
    items = CALLS[name](client, job)
    next(items)
    client.close()
    with pytest.raises(CallError, match="CANCELLED: the client was closed"):
        next(items)
    with pytest.raises(RuntimeError, match="the client is closed"):
        next(CALLS[name](client, job))


async def test_closing_an_async_client_ends_its_calls_and_cancels_no_task(door: Door) -> None:
    client = AsyncClient(door.suite.broker)
    first = asyncio.Event()

    async def read() -> None:
        async for _ in client.run(endless()):
            first.set()

    reading = asyncio.create_task(read())
    await asyncio.wait_for(first.wait(), 20)
    await client.close()
    with pytest.raises(CallError, match="CANCELLED: the client was closed"):
        await reading
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.engines()


async def test_closing_ends_a_call_that_waits_for_its_next_try() -> None:
    tries = asyncio.Semaphore(0)

    def token() -> str:
        tries.release()
        return "t"

    client = AsyncClient("127.0.0.1:1", token=token)
    asking = asyncio.create_task(client.engines())
    await asyncio.wait_for(tries.acquire(), 20)
    await asyncio.wait_for(tries.acquire(), 20)
    await client.close()
    with pytest.raises(CallError, match="CANCELLED: the client was closed"):
        await asking


async def test_a_task_that_is_cancelled_is_cancelled(door: Door) -> None:
    async with AsyncClient(door.suite.broker) as client:
        reading = asyncio.create_task(client.generate("x", max_tokens=256, engine_id="texts"))
        await wait_until(lambda: reading.get_coro().cr_await is not None)  # type: ignore[union-attr]
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as Python has it, also where whoever started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("name", ["stream", "run"])
def test_an_interrupt_is_one_and_the_client_goes_on(door: Door, name: str) -> None:
    with Client(door.suite.broker) as client:
        without_end = itertools.chain.from_iterable(iter(lambda: CALLS[name](client, ""), None))
        next(without_end)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            deque(without_end, maxlen=0)
        assert client.generate("x", max_tokens=1, engine_id="texts").usage.generated_tokens == 1


LEFT = """
import sys
from ifabric_client import Client, Request

client = Client(sys.argv[1])
outcomes = client.run(Request("x", 2, id=f"{number}", engine_id="texts") for number in range(10**6))
print(next(outcomes).id)
"""


def test_a_program_that_leaves_everything_open_ends(door: Door) -> None:
    """The iterator is left while the interpreter ends, when the client's thread runs no more."""
    path = os.pathsep.join(map(str, (ROOT / "clients" / "python", ROOT / "build" / "proto")))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT, door.suite.broker],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().isdecimal()


def test_a_client_that_nobody_holds_ends_its_thread() -> None:
    Client("127.0.0.1:1")
    block_until(lambda: not [each for each in threading.enumerate() if each.name == "ifabric-client"], within_s=10)
