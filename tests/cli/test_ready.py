# SPDX-License-Identifier: Apache-2.0
"""Waiting for a started suite."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric.provisioner.v1 import provisioner_service_pb2, provisioner_service_pb2_grpc
from services.cli.ready import serving_engines
from services.common.errors import DeadlineExceededError, UnavailableError
from tests.support.servers import Unserved, serving


class SlowProvisioner(Unserved):
    """Answers once it has had time to."""

    def __init__(self) -> None:
        self.calls = 0

    async def ListNodes(self, request: Any, context: Any) -> provisioner_service_pb2.ListNodesResponse:
        self.calls += 1
        if self.calls == 1:
            raise DeadlineExceededError("a machine with much to do")
        return provisioner_service_pb2.ListNodesResponse()


class SlowBroker(Unserved):
    """Knows the engine of node `a` from its second call on."""

    def __init__(self) -> None:
        self.calls = 0

    async def ListEngines(self, request: Any, context: Any) -> broker_service_pb2.ListEnginesResponse:
        self.calls += 1
        if self.calls == 1:
            raise UnavailableError("not yet")
        return broker_service_pb2.ListEnginesResponse(engines=[broker_service_pb2.Engine(node_ids=["a"])])


@dataclass
class Started:
    """What of a suite is looked at: names and addresses."""

    name: str = ""
    address: str = ""


@dataclass
class StartedSuite:
    """A suite whose processes do not end."""

    provisioner: Started
    broker: Started
    workers: tuple[Started, ...] = (Started("a"),)

    async def watch(self) -> None:
        await asyncio.Event().wait()


async def test_services_that_are_slow_to_answer_are_waited_for() -> None:
    add_provisioner = provisioner_service_pb2_grpc.add_ProvisionerServiceServicer_to_server
    add_broker = broker_service_pb2_grpc.add_BrokerServiceServicer_to_server
    async with (
        serving(add_provisioner, SlowProvisioner(), "ifabric.provisioner.v1.ProvisionerService") as provisioner,
        serving(add_broker, SlowBroker(), "ifabric.broker.v1.BrokerService") as broker,
    ):
        suite: Any = StartedSuite(Started(address=provisioner.address), Started(address=broker.address))
        (engine,) = await serving_engines(suite, limit_s=30)
    assert list(engine.node_ids) == ["a"]
