# SPDX-License-Identifier: Apache-2.0
"""A provisioner process that is killed and started again, with workers and a broker that live on."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common.errors import FabricError, NotFoundError, UnavailableError
from services.common.rpc import channel, translated
from tests.provisioner.fake_worker import FakeWorker, fake_worker
from tests.support.processes import ServiceProcess
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    import grpc

HEARTBEAT_MS = 600
"""As the provisioner has it: workers beat three times as often, so that a busy machine costs no node its place in the
first snapshot."""


async def keep_registered(worker: FakeWorker, heard: list[str]) -> None:
    """What a worker does once it is loaded: heartbeats, and a registration whenever it is not known; notes answers."""
    while True:
        with suppress(UnavailableError):
            try:
                await worker.heartbeat()
                heard.append("known")
            except NotFoundError:
                await worker.register(loaded=True)
                heard.append("registered")
        await asyncio.sleep(HEARTBEAT_MS / 3000)


async def first_snapshot(client: grpc.aio.Channel) -> list[wire.Node]:
    """What a broker hears first after it has connected again."""
    stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(client)
    while True:
        call = stub.WatchNodes(wire.WatchNodesRequest(), timeout=PATIENCE_S)
        try:
            with translated():
                async for message in call:
                    assert message.snapshot
                    return list(message.nodes)
        except UnavailableError:
            await asyncio.sleep(0.02)
        finally:
            call.cancel()


async def test_a_restarted_provisioner_knows_all_again_within_a_heartbeat(address: str) -> None:
    settings = {"heartbeat_interval_ms": HEARTBEAT_MS, "listen": address}
    with ServiceProcess("services.provisioner", settings) as first:
        async with (
            fake_worker(address, "a") as a,
            fake_worker(address, "b") as b,
            channel(address) as broker,
        ):
            heard: list[list[str]] = [[], []]
            loops = [asyncio.create_task(keep_registered(*each)) for each in zip((a, b), heard, strict=True)]
            try:
                snapshot = await first_snapshot(broker)
                assert [node.state for node in snapshot] == [wire.NODE_STATE_ACCEPTED] * 2
                first.signal(signal.SIGKILL)
                await asyncio.to_thread(first.wait)
                for each in heard:
                    each.clear()
                with await asyncio.to_thread(ServiceProcess, "services.provisioner", settings) as second:
                    hearing = asyncio.create_task(first_snapshot(broker))

                    async def both_accepted() -> bool:
                        with suppress(FabricError):
                            return len(await a.listed(wire.NODE_STATE_ACCEPTED)) == 2
                        return False

                    await wait_until(both_accepted, what="both nodes are known again")
                    assert [node.state for node in await hearing] == [wire.NODE_STATE_ACCEPTED] * 2
                    assert await asyncio.to_thread(second.stop) == 0
                # The first heartbeat that came through, of each.
                assert [each.count("registered") for each in heard] == [1, 1]
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
