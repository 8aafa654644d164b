# SPDX-License-Identifier: Apache-2.0
"""A provisioner process that is killed and started again, with workers and a broker that live on."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common.errors import FabricError, NotFoundError, UnavailableError
from services.common.rpc import channel, translated
from tests.provisioner.fake_worker import FakeWorker, fake_worker
from tests.support.processes import ServiceProcess
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import grpc

HEARTBEAT_MS = 300


async def keep_registered(worker: FakeWorker) -> None:
    """What a worker does once it is loaded: heartbeats, and a registration whenever it is not known."""
    while True:
        with suppress(UnavailableError):
            try:
                await worker.heartbeat()
            except NotFoundError:
                await worker.register(loaded=True)
        await asyncio.sleep(HEARTBEAT_MS / 1000)


async def first_snapshot(client: grpc.aio.Channel) -> list[wire.Node]:
    """What a broker hears first after it has connected again."""
    stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(client)
    while True:
        call = stub.WatchNodes(wire.WatchNodesRequest(), timeout=20)
        try:
            with translated():
                async for message in call:
                    assert message.snapshot
                    return list(message.nodes)
        except UnavailableError:
            await asyncio.sleep(0.02)
        finally:
            call.cancel()


async def test_a_restarted_provisioner_knows_all_again_within_a_heartbeat() -> None:
    settings = {"heartbeat_interval_ms": HEARTBEAT_MS}
    with ServiceProcess("services.provisioner", settings) as first:
        address = first.address
        async with (
            fake_worker(address, "a") as a,
            fake_worker(address, "b") as b,
            channel(address) as broker,
        ):
            loops = [asyncio.create_task(keep_registered(worker)) for worker in (a, b)]
            try:
                snapshot = await first_snapshot(broker)
                assert [node.state for node in snapshot] == [wire.NODE_STATE_ACCEPTED] * 2
                first.signal(signal.SIGKILL)
                await asyncio.to_thread(first.wait)
                with await asyncio.to_thread(
                    ServiceProcess,
                    "services.provisioner",
                    {**settings, "listen": address},
                ) as second:
                    started = time.monotonic()
                    hearing = asyncio.create_task(first_snapshot(broker))

                    async def both_accepted() -> bool:
                        with suppress(FabricError):
                            return len(await a.listed(wire.NODE_STATE_ACCEPTED)) == 2
                        return False

                    await wait_until(both_accepted, what="both nodes are known again")
                    took_s = time.monotonic() - started
                    assert [node.state for node in await hearing] == [wire.NODE_STATE_ACCEPTED] * 2
                    assert await asyncio.to_thread(second.stop) == 0
                # One heartbeat, a lost connection that is tried again every half second, and a busy machine.
                assert took_s < HEARTBEAT_MS / 1000 + 2.5
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
