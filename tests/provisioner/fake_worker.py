# SPDX-License-Identifier: Apache-2.0
"""A worker as the provisioner meets it: a real server that answers Probe, and a client that registers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from ifabric.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.common.errors import FailedPreconditionError, UnimplementedError
from services.common.rpc import channel, translated
from tests.provisioner import made
from tests.support.servers import serving
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from ifabric.engine.v1 import node_pb2


class ProbeServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Answers Probe with `answer`, after `go` is set."""

    def __init__(self) -> None:
        self.answer: worker_service_pb2.ProbeResponse | None = None
        self.probes = 0
        self.traceparent = ""
        self.go = asyncio.Event()
        self.go.set()

    async def Describe(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("this worker is only probed")

    def Execute(self, request_iterator: Any, context: Any) -> Any:
        raise UnimplementedError("this worker is only probed")

    def FetchFile(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("this worker is only probed")

    async def Probe(
        self,
        request: worker_service_pb2.ProbeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_service_pb2.ProbeResponse:
        self.probes += 1
        self.traceparent = str(dict(context.invocation_metadata() or ()).get("traceparent", ""))
        await self.go.wait()
        if self.answer is None:
            raise FailedPreconditionError("nothing is loaded")
        return self.answer


class FakeWorker:
    """One worker process in the eyes of a provisioner."""

    def __init__(self, provisioner: grpc.aio.Channel, servicer: ProbeServicer, node: node_pb2.NodeDescription) -> None:
        self.stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(provisioner)
        self.servicer = servicer
        self.node = node

    async def register(self, *, loaded: bool = False, timeout: float = PATIENCE_S) -> wire.RegisterNodeResponse:
        """Registers as this worker is now; loaded, with a report and a probe that agree unless told otherwise."""
        report = made.report(self.node) if loaded else None
        if loaded and self.servicer.answer is None:
            self.servicer.answer = made.answer(self.node)
        with translated():
            return await self.stub.RegisterNode(
                wire.RegisterNodeRequest(description=self.node, loaded=report), timeout=timeout
            )

    async def heartbeat(
        self,
        *,
        draining: bool = False,
        stats: node_pb2.EngineStats | None = None,
    ) -> wire.HeartbeatResponse:
        with translated():
            request = wire.HeartbeatRequest(
                node_id=self.node.node_id, incarnation=self.node.incarnation, draining=draining, stats=stats
            )
            return await self.stub.Heartbeat(request, timeout=PATIENCE_S)

    async def withdraw(self) -> None:
        with translated():
            await self.stub.WithdrawNode(
                wire.WithdrawNodeRequest(node_id=self.node.node_id, incarnation=self.node.incarnation), timeout=5
            )

    async def listed(self, *states: wire.NodeState.ValueType) -> list[wire.Node]:
        with translated():
            answer = await self.stub.ListNodes(wire.ListNodesRequest(states=states), timeout=PATIENCE_S)
        return list(answer.nodes)


@asynccontextmanager
async def fake_worker(
    provisioner: str,
    node_id: str = "node-1",
    incarnation: str = "i-1",
    *,
    payload: bool = False,
) -> AsyncIterator[FakeWorker]:
    """Runs a worker that knows the provisioner at an address."""
    servicer = ProbeServicer()
    name = "ifabric.worker.v1.WorkerService"
    add = worker_service_pb2_grpc.add_WorkerServiceServicer_to_server
    async with serving(add, servicer, name) as server, channel(provisioner) as client:
        yield FakeWorker(client, servicer, made.description(node_id, incarnation, server.address, payload=payload))
