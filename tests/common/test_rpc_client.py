# SPDX-License-Identifier: Apache-2.0
"""Channels: what is tried again, what is not, and how failures of gRPC itself read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import code_pb2

from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common import reasons
from services.common.errors import DeadlineExceededError, NotFoundError, UnavailableError, UnimplementedError
from services.common.rpc import call_error, channel, options, translated
from tests.common.behaviour import FULL_NAME, Behaviour, call, register
from tests.support.ports import held_port
from tests.support.servers import LoopbackSettings, serving
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROVISIONER = "ifabric.provisioner.v1.ProvisionerService"


class Shaky:
    """A provisioner that is UNAVAILABLE a number of times before it answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    async def ListNodes(self, request: Any, context: Any) -> wire.ListNodesResponse:
        self._maybe_fail()
        return wire.ListNodesResponse()

    async def WatchNodes(self, request: Any, context: Any) -> AsyncIterator[wire.WatchNodesResponse]:
        self._maybe_fail()
        yield wire.WatchNodesResponse()

    def __getattr__(self, name: str) -> Any:
        async def unserved(request: Any, context: Any) -> Any:
            raise UnimplementedError(name)

        return unserved

    def _maybe_fail(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise UnavailableError("not now")


async def test_an_idempotent_call_is_tried_again_after_unavailable() -> None:
    shaky = Shaky(2)
    add = provisioner_service_pb2_grpc.add_ProvisionerServiceServicer_to_server
    async with serving(add, shaky, PROVISIONER) as server, channel(server.address) as client:
        await provisioner_service_pb2_grpc.ProvisionerServiceStub(client).ListNodes(
            wire.ListNodesRequest(), timeout=PATIENCE_S
        )
    assert shaky.calls == 3


async def test_a_stream_is_never_tried_again_by_itself() -> None:
    shaky = Shaky(1)
    add = provisioner_service_pb2_grpc.add_ProvisionerServiceServicer_to_server
    async with serving(add, shaky, PROVISIONER) as server, channel(server.address) as client:
        stream = provisioner_service_pb2_grpc.ProvisionerServiceStub(client).WatchNodes(
            wire.WatchNodesRequest(), timeout=PATIENCE_S
        )
        with pytest.raises(UnavailableError, match="not now"), translated():
            async for _ in stream:
                pass
    assert shaky.calls == 1


def test_only_methods_that_exist_and_may_be_repeated_are_tried_again() -> None:
    from google.protobuf import descriptor_pool
    from grpc_health.v1 import health_pb2

    from ifabric.broker.v1 import broker_service_pb2
    from ifabric.worker.v1 import worker_service_pb2

    assert all((health_pb2, broker_service_pb2, worker_service_pb2))  # their services are in the pool now
    pool = descriptor_pool.Default()
    (policy,) = options.service_config(balanced=False)["methodConfig"]
    assert policy["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    for name in policy["name"]:
        method = pool.FindServiceByName(name["service"]).methods_by_name[name["method"]]
        assert not method.client_streaming
        assert not method.server_streaming
        assert not method.name.startswith(("Generate", "Exchange", "Execute", "Submit"))


async def test_nobody_there_is_unavailable_and_says_so() -> None:
    async with channel("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError) as caught, translated():
            await call(client, "UnaryUnary", b"ok")
    assert caught.value.reason == reasons.PEER_UNREACHABLE


async def test_a_deadline_of_ours_is_a_deadline() -> None:
    behaviour = Behaviour()
    async with serving(register, behaviour, FULL_NAME) as server, channel(server.address) as client:
        with pytest.raises(DeadlineExceededError) as caught, translated():
            await call(client, "UnaryUnary", b"wait", timeout=0.2)
    assert caught.value.reason == reasons.DEADLINE


async def test_a_server_that_comes_back_is_found_again() -> None:
    behaviour = Behaviour()
    with held_port() as address:
        settings = LoopbackSettings(listen=address, drain_grace_s=1.0)
        async with serving(register, behaviour, FULL_NAME, settings=settings):
            client = channel(address)
            assert await call(client, "UnaryUnary", b"ok") == [b"ok"]
        with pytest.raises(UnavailableError), translated():
            await call(client, "UnaryUnary", b"ok")
        async with serving(register, behaviour, FULL_NAME, settings=settings):

            async def answered() -> bool:
                try:
                    with translated():
                        return await call(client, "UnaryUnary", b"ok") == [b"ok"]
                except UnavailableError:
                    return False

            await wait_until(answered, what="the channel found the server again")
            await client.close()


async def test_balanced_channels_leave_out_what_is_not_ready() -> None:
    behaviour = Behaviour()
    async with serving(register, behaviour, FULL_NAME) as server:
        async with channel(server.address, balanced=True) as client:
            assert await call(client, "UnaryUnary", b"ok") == [b"ok"]
            await server.not_ready()

            async def left_out() -> bool:
                try:
                    with translated():
                        await call(client, "UnaryUnary", b"ok")
                except UnavailableError:
                    return True
                return False

            await wait_until(left_out, what="the channel left the server out")
        async with channel(server.address) as direct:
            assert await call(direct, "UnaryUnary", b"ok") == [b"ok"]


def test_details_that_contradict_their_code_are_not_believed() -> None:
    from google.rpc import status_pb2

    lying = status_pb2.Status(code=code_pb2.NOT_FOUND, message="x").SerializeToString()
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(("grpc-status-details-bin", lying)), "y"
    )
    assert isinstance(call_error(error), UnavailableError)
    plain = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
    assert isinstance(call_error(plain), NotFoundError)


async def test_a_stream_on_which_nothing_is_said_is_pinged_and_lives() -> None:
    """Pings that a server objects to would end it after the fourth, and every other call of the connection with it."""
    said = asyncio.Event()

    async def quiet(request: bytes, context: Any) -> AsyncIterator[bytes]:
        await said.wait()
        yield b"said"

    handler: Any = grpc.unary_stream_rpc_method_handler(quiet)
    server = grpc.aio.server(options=options.server(options.MESSAGE_BYTES_MAX, keepalive_ms=1000))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Quiet", {"Watch": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    arguments = options.client(options.MESSAGE_BYTES_MAX, balanced=False, keepalive_ms=1000)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=arguments) as client:
        watch: Any = client.unary_stream("/tests.Quiet/Watch")
        asyncio.get_running_loop().call_later(5, said.set)
        try:
            assert [answer async for answer in watch(b"", timeout=PATIENCE_S)] == [b"said"]
        finally:
            await server.stop(0)
