# SPDX-License-Identifier: Apache-2.0
"""The broker as a process: its line, its health, its answers without engines, its end."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.broker.frontdoor.servicer import FULL_NAME
from services.common.errors import FabricError, UnavailableError, from_status
from tests.broker_front.made import request
from tests.support.processes import ServiceProcess, run_to_end
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def provisioner() -> Iterator[ServiceProcess]:
    with ServiceProcess("services.provisioner", {"heartbeat_interval_ms": 100}) as process:
        yield process


@pytest.fixture
def broker(provisioner: ServiceProcess) -> Iterator[ServiceProcess]:
    with ServiceProcess("services.broker", {"provisioner": provisioner.address}) as process:
        yield process


def health(address: str, service: str = "") -> Any:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status


def refused(address: str, made: broker_service_pb2.GenerationRequest) -> FabricError:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        broker_service_pb2_grpc.BrokerServiceStub(channel).Generate(
            broker_service_pb2.GenerateRequest(request=made), timeout=PATIENCE_S
        )
    call: Any = caught.value
    status = rpc_status.from_call(call)
    assert status is not None
    return from_status(status)


def test_ready_once_the_provisioner_was_heard_and_ends_in_order(broker: ServiceProcess) -> None:
    assert broker.line["service"] == "broker"
    block_until(lambda: health(broker.address) == SERVING, what="readiness")
    assert health(broker.address, FULL_NAME) == SERVING
    assert health(broker.address, "liveness") == SERVING
    error = refused(broker.address, request())
    assert isinstance(error, UnavailableError)
    assert "no engine is accepted" in error.message
    assert error.retry_after_s
    assert broker.stop() == 0
    assert len(broker.logs("request.refused")) == 1


def test_alive_but_not_ready_without_a_provisioner() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        peer = f"127.0.0.1:{nobody.getsockname()[1]}"
        with ServiceProcess("services.broker", {"provisioner": peer}) as broker:
            assert health(broker.address, "liveness") == SERVING
            assert health(broker.address) != SERVING
            assert "has not heard yet" in refused(broker.address, request()).message
            broker.signal(signal.SIGINT)
            assert broker.wait() == 0


def test_reflection_tells_what_a_request_is(broker: ServiceProcess) -> None:
    with grpc.insecure_channel(broker.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert FULL_NAME in database.get_services()
        file = database.FindFileContainingSymbol("ifabric.broker.v1.GenerationRequest")
        assert file.package == "ifabric.broker.v1"


def test_a_start_that_cannot_be_is_one_sentence() -> None:
    missing = run_to_end("services.broker", [])
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert "provisioner" in missing.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_to_end("services.broker", ["--provisioner", "127.0.0.1:1", "--listen", address])
        assert ended.returncode == 2
        assert address in ended.stderr.splitlines()[-1]
