# SPDX-License-Identifier: Apache-2.0
"""The front door behind a real gRPC server on loopback, over a core and a catalog in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ifabric.broker.v1 import broker_service_pb2_grpc
from services.broker.frontdoor.exchange import ExchangeLimits
from services.broker.frontdoor.servicer import FULL_NAME, BrokerServicer, FrontDoorLimits
from services.broker.frontdoor.tokenization import CodecStore
from services.common.rpc import Server, channel
from services.common.telemetry import Telemetry
from tests.broker_front.fakes import EchoCore, ShelfCatalog
from tests.broker_front.made import byte_level, contract
from tests.support.logged import captured_logs
from tests.support.servers import LoopbackSettings
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import grpc

    from tests.support.logged import LogLines


@dataclass(slots=True)
class House:
    """A running front door and what stands behind it."""

    core: EchoCore
    catalog: ShelfCatalog
    digest: str
    server: Server
    servicer: BrokerServicer
    telemetry: Telemetry
    stub: broker_service_pb2_grpc.BrokerServiceAsyncStub
    connect: Callable[[], grpc.aio.Channel]


@asynccontextmanager
async def house(
    *,
    live_timeout_s: float = 3 * PATIENCE_S,
    prompt_tokens: int = 1_000_000,
    result_bytes: int = 1_000_000,
    room_patience_s: float = PATIENCE_S,
    message_bytes: int = 16 * 1024 * 1024,
    streams_max: int = 100,
    grace_s: float = 2,
) -> AsyncIterator[House]:
    """Runs a front door over one engine, `small`."""
    core, catalog, telemetry = EchoCore(), ShelfCatalog(), Telemetry("broker")
    digest = catalog.put(contract(), byte_level())
    executor = ThreadPoolExecutor(1)
    codecs = CodecStore(catalog, executor, capacity=4, fetch_timeout_s=PATIENCE_S)
    limits = FrontDoorLimits(
        live_timeout_s=live_timeout_s,
        exchange=ExchangeLimits(
            prompt_tokens=prompt_tokens,
            message_bytes=message_bytes,
            result_bytes=result_bytes,
            room_patience_s=room_patience_s,
        ),
        streams_max=streams_max,
    )
    servicer = BrokerServicer(core, catalog, codecs, telemetry, limits)
    server = Server(LoopbackSettings(drain_grace_s=grace_s), telemetry)
    server.add(broker_service_pb2_grpc.add_BrokerServiceServicer_to_server, servicer, FULL_NAME)
    server.on_drain("front door", servicer.drain)
    channels: list[grpc.aio.Channel] = []

    def connect() -> grpc.aio.Channel:
        channels.append(channel(server.address))
        return channels[-1]

    await server.start()
    await server.ready()
    try:
        yield House(
            core,
            catalog,
            digest,
            server,
            servicer,
            telemetry,
            broker_service_pb2_grpc.BrokerServiceStub(connect()),
            connect,
        )
    finally:
        for opened in channels:
            await opened.close()
        await server.close()
        await core.close()
        await codecs.close()
        executor.shutdown()
        telemetry.close()


@pytest.fixture
def log_lines() -> Iterator[LogLines]:
    """What is logged meanwhile."""
    with captured_logs("broker") as lines:
        yield lines
