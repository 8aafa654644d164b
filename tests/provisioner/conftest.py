# SPDX-License-Identifier: Apache-2.0
"""A provisioner in the test's event loop, on a free port."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from services.common.process import Process
from services.common.telemetry import Telemetry
from services.provisioner.main import serve
from services.provisioner.settings import ProvisionerSettings
from tests.support.ports import held_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


HEARTBEAT_MS = 1000


class Running(Process):
    """The process around a provisioner, which tells its address to the test instead of the world."""

    def __init__(self) -> None:
        self.telemetry = Telemetry("provisioner")
        self.metrics = self.telemetry.serve_metrics("127.0.0.1:0")
        super().__init__("provisioner", self.telemetry, self.metrics)
        self.listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.address = ""

    def announce(self, address: str, *, health: str = "") -> None:
        self.listening.set_result(address)


@asynccontextmanager
async def running_provisioner(**settings: Any) -> AsyncIterator[Running]:
    """Runs a provisioner until the block is left.

    A lease is three intervals: that of a node that a test registers once has to last as long as the test.
    """
    told = {"heartbeat_interval_ms": HEARTBEAT_MS, "drain_grace_s": 5.0, **settings}
    process = Running()
    served = asyncio.create_task(serve(ProvisionerSettings(**told), process))
    served.add_done_callback(lambda ended: process.listening.done() or process.listening.cancel())
    try:
        process.address = await process.listening
        yield process
    finally:
        process.stop.request("the test is over")
        await served
        await process.tasks.close()
        process.telemetry.close()


@pytest.fixture
def address() -> Iterator[str]:
    """Where a provisioner listens that is started again."""
    with held_port() as held:
        yield held


@pytest.fixture
async def provisioner() -> AsyncIterator[Running]:
    async with running_provisioner() as running:
        yield running
