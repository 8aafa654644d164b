# SPDX-License-Identifier: Apache-2.0
"""How the Python client ends: closed with work under way, interrupted, or left alone by a program that ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ifabric_client import AsyncClient, CallError, Client, Request
from tests.support.processes import ROOT
from tests.support.waiting import block_until, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.door import Door

pytestmark = pytest.mark.timeout(60)


def endless() -> Iterator[Request]:
    """Requests for as long as anybody takes them."""
    for number in itertools.count():
        yield Request("x", 256, id=f"{number}", engine_id="texts")


CALLS: dict[str, Callable[[Client], Any]] = {
    "stream": lambda client: list(client.stream("x", max_tokens=256, engine_id="texts")),
    "run": lambda client: list(
        client.run(Request("x", 256, id=f"{number}", engine_id="texts") for number in range(10**6))
    ),
    "results": lambda client: list(client.results("waits")),
}


def test_closing_ends_what_other_threads_wait_for(door: Door) -> None:
    client = Client(door.suite.broker)
    client.submit("waits", [Request("x", 256)] * 3000, engine_id="texts")
    ended: dict[str, BaseException] = {}

    def wait(name: str) -> None:
        try:
            CALLS[name](client)
        except BaseException as error:
            ended[name] = error

    threads = [threading.Thread(target=wait, args=(name,)) for name in CALLS]
    for thread in threads:
        thread.start()
    client.engines()  # the others were handed over before it
    client.close()
    for thread in threads:
        thread.join(10)
    assert set(ended) == set(CALLS)
    assert all(isinstance(error, CallError) and error.code == "CANCELLED" for error in ended.values()), ended
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.job("waits")
    with Client(door.suite.broker) as again:
        again.cancel_job("waits")


async def test_closing_an_async_client_ends_its_calls_and_cancels_no_task(door: Door) -> None:
    client = AsyncClient(door.suite.broker)
    first = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("x", max_tokens=256, engine_id="texts"):
            first.set()

    reading = asyncio.create_task(read())
    await asyncio.wait_for(first.wait(), 20)
    await client.close()
    with pytest.raises(CallError, match="CANCELLED: the client was closed"):
        await reading
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.engines()


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
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(iter(lambda: CALLS[name](client), None))
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
