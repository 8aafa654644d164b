# SPDX-License-Identifier: Apache-2.0
"""Health against watchers that leave, come, and do not take what they are told."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.rpc import Server, channel
from services.common.rpc.health import HealthServicer
from services.common.telemetry import Telemetry
from tests.common.behaviour import FULL_NAME, Behaviour, register
from tests.support.servers import LoopbackSettings
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def watch_and_take_nothing(address: str) -> socket.socket:
    """Opens a watch over HTTP/2 with a window of 0 bytes, and returns once the server has answered with its headers."""

    def literal(name: str, value: str) -> bytes:
        return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    headers = {
        ":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "x",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    no_window = frame(4, 0, 0, struct.pack(">HI", 4, 0))
    block = b"".join(literal(name, value) for name, value in headers.items())
    call = frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))  # one empty message
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + no_window + call)
    heard = b""
    while b"application/grpc" not in heard:
        more = connection.recv(4096)
        assert more, "the server closed the connection"
        heard += more
    return connection


async def states(read: Callable[[], Any], count: int) -> list[int]:
    return [(await asyncio.wait_for(read(), PATIENCE_S)).status for _ in range(count)]


async def test_a_watcher_that_takes_nothing_holds_up_neither_states_nor_the_drain() -> None:
    telemetry = Telemetry("test")
    server = Server(LoopbackSettings(drain_grace_s=0.5, health_listen="127.0.0.1:0"), telemetry)
    address = await server.start()
    greedy = [await asyncio.to_thread(watch_and_take_nothing, each) for each in (address, server.health_address)]
    async with channel(address) as client:
        stub: Any = health_pb2_grpc.HealthStub(client)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=3 * PATIENCE_S)
        assert await states(watch.read, 1) == [NOT_SERVING]
        await asyncio.wait_for(server.ready(), PATIENCE_S)
        assert await states(watch.read, 1) == [SERVING]
        closing = asyncio.create_task(server.close())
        assert await states(watch.read, 1) == [NOT_SERVING]
        await asyncio.wait_for(closing, PATIENCE_S)
    for connection in greedy:
        connection.close()
    telemetry.close()


async def test_one_watcher_leaves_and_the_others_hear_on() -> None:
    servicer, server = HealthServicer(), grpc.aio.server()
    servicer.publish({"": True})
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with channel(f"127.0.0.1:{port}") as client:
        stub: Any = health_pb2_grpc.HealthStub(client)
        first, second, later = (
            stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=3 * PATIENCE_S)
            for name in ("", "", "engine/x")
        )
        assert await states(first.read, 1) == await states(second.read, 1) == [SERVING]
        assert await states(later.read, 1) == [UNKNOWN]
        first.cancel()
        servicer.publish({"": False, "engine/x": True})
        assert await states(second.read, 1) == [NOT_SERVING]
        assert await states(later.read, 1) == [SERVING]
        await servicer.end_watches()
        assert await second.read() is grpc.aio.EOF
    await server.stop(None)


async def test_a_drain_waits_for_calls_of_services_and_for_nobody_else() -> None:
    """Who never takes what he is told, or holds a stream of reflection open, would use the whole grace up."""
    telemetry, behaviour = Telemetry("test"), Behaviour()
    server = Server(LoopbackSettings(drain_grace_s=10 * PATIENCE_S), telemetry)
    server.add(register, behaviour, FULL_NAME)
    address = await server.start()
    greedy = await asyncio.to_thread(watch_and_take_nothing, address)
    async with channel(address) as client:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub
        asks = stub(client).ServerReflectionInfo(timeout=20 * PATIENCE_S)
        await asks.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await asks.read()).HasField("list_services_response")
        wait: Any = client.unary_unary(f"/{FULL_NAME}/UnaryUnary")
        running = asyncio.ensure_future(wait(b"wait", timeout=20 * PATIENCE_S))
        await asyncio.wait_for(behaviour.waiting.wait(), PATIENCE_S)
        closing = asyncio.create_task(server.close())
        done, _ = await asyncio.wait({closing, running}, timeout=2.0)  # longer than the last state is offered
        assert not done, "what is under way goes on"
        behaviour.release.set()
        assert await running == b"wait"
        await asyncio.wait_for(closing, PATIENCE_S)
    greedy.close()
    telemetry.close()
