# SPDX-License-Identifier: Apache-2.0
"""The front door behind a real gRPC server on loopback, over a core and a catalog in memory."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pytest

from ifabric.broker.v1 import broker_service_pb2_grpc
from services.broker.frontdoor.exchange import ExchangeLimits
from services.broker.frontdoor.servicer import FULL_NAME, BrokerServicer, FrontDoorLimits
from services.broker.frontdoor.tokenization import CodecStore
from services.common import logs
from services.common.rpc import Server, channel
from services.common.telemetry import Telemetry
from tests.broker_front.fakes import EchoCore, ShelfCatalog
from tests.broker_front.made import byte_level, contract
from tests.support.servers import LoopbackSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import grpc


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
    live_timeout_s: float = 30,
    prompt_tokens: int = 1_000_000,
    result_bytes: int = 1_000_000,
    room_patience_s: float = 10,
    message_bytes: int = 16 * 1024 * 1024,
    streams_max: int = 100,
    grace_s: float = 2,
) -> AsyncIterator[House]:
    """Runs a front door over one engine, `small`."""
    core, catalog, telemetry = EchoCore(), ShelfCatalog(), Telemetry("broker")
    digest = catalog.put(contract(), byte_level())
    executor = ThreadPoolExecutor(1)
    codecs = CodecStore(catalog, executor, capacity=4, fetch_timeout_s=5)
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


class LogLines:
    """What was logged, as objects."""

    def __init__(self, stream: BytesIO) -> None:
        self._stream = stream

    def text(self) -> str:
        return self._stream.getvalue().decode()

    def of(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text().splitlines()]
        return [line for line in lines if line.get("event") == event]


@pytest.fixture
def log_lines() -> Iterator[LogLines]:
    stream = BytesIO()
    logs.configure("broker", stream=stream)
    yield LogLines(stream)
    logs.configure("broker")
