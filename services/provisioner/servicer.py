# SPDX-License-Identifier: Apache-2.0
"""`ifabric.provisioner.v1.ProvisionerService`: messages in, domain calls, messages out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp

from ifabric.engine.v1 import node_pb2
from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common import logs, reasons
from services.common.errors import FabricError, InvalidArgumentError, NotFoundError, Violation
from services.common.telemetry import names
from services.provisioner import explain
from services.provisioner.registry import DRAINING, End

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from services.common.clock import Clock
    from services.common.telemetry import Telemetry
    from services.provisioner.intake import Intake
    from services.provisioner.registry import Node, Registry
    from services.provisioner.watching import Watchers

FULL_NAME = wire.DESCRIPTOR.services_by_name["ProvisionerService"].full_name
_log = logs.get("provisioner.servicer")


class ProvisionerServicer(provisioner_service_pb2_grpc.ProvisionerServiceServicer):
    """Serves the nodes of one registry."""

    def __init__(
        self,
        registry: Registry,
        intake: Intake,
        watchers: Watchers,
        clock: Clock,
        telemetry: Telemetry,
        *,
        heartbeat_interval_ms: int,
    ) -> None:
        self._registry = registry
        self._intake = intake
        self._watchers = watchers
        self._clock = clock
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._heartbeats = telemetry.counter(names.HEARTBEATS)
        self._watching = telemetry.up_down(names.WATCHERS)

    async def RegisterNode(
        self,
        request: wire.RegisterNodeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> wire.RegisterNodeResponse:
        """See the proto."""
        report = request.loaded if request.HasField("loaded") else None
        node = await self._intake.register(request.description, report)
        return wire.RegisterNodeResponse(state=node.state, heartbeat_interval_ms=self._heartbeat_interval_ms)

    async def Heartbeat(
        self,
        request: wire.HeartbeatRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> wire.HeartbeatResponse:
        """See the proto."""
        stats = request.stats if request.HasField("stats") else None
        before = self._registry.find(request.node_id)
        try:
            node = self._registry.heartbeat(request.node_id, request.incarnation, stats, draining=request.draining)
        except FabricError as error:
            self._heartbeats.add(1, {"outcome": _HEARTBEAT_OUTCOMES.get(error.reason, "unknown")})
            raise
        self._heartbeats.add(1, {"outcome": "renewed"})
        if node.state == DRAINING and before is not None and before.state != DRAINING:
            _log.info("node.draining", node_id=node.node_id, incarnation=request.incarnation)
        return wire.HeartbeatResponse(state=node.state)

    async def WithdrawNode(
        self,
        request: wire.WithdrawNodeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> wire.WithdrawNodeResponse:
        """See the proto."""
        self._registry.withdraw(request.node_id, request.incarnation)
        return wire.WithdrawNodeResponse()

    async def ListNodes(
        self,
        request: wire.ListNodesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> wire.ListNodesResponse:
        """See the proto."""
        known = set(wire.NodeState.values()) - {wire.NODE_STATE_UNSPECIFIED}
        unknown = [
            Violation(f"states[{i}]", f"is {state}, allowed are {min(known)} to {max(known)}")
            for i, state in enumerate(request.states)
            if state not in known
        ]
        if unknown:
            raise InvalidArgumentError.of(unknown)
        return wire.ListNodesResponse(nodes=[self._message(node) for node in self._registry.nodes(request.states)])

    async def WatchNodes(
        self,
        request: wire.WatchNodesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[wire.WatchNodesResponse]:
        """See the proto."""
        self._watching.add(1)
        try:
            async for news in self._watchers.watch(request.resume_token):
                yield wire.WatchNodesResponse(
                    revision=news.revision,
                    snapshot=news.snapshot,
                    nodes=[self._message(node) for node in news.nodes],
                    gone_node_ids=news.gone,
                    resume_token=news.resume_token,
                )
        finally:
            self._watching.add(-1)

    async def ExplainNode(
        self,
        request: wire.ExplainNodeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> wire.ExplainNodeResponse:
        """See the proto."""
        node = self._registry.find(request.node_id)
        if node is None:
            raise NotFoundError(
                f"no node {request.node_id!r} has a live lease",
                reason=reasons.NODE_UNKNOWN,
                metadata={"node_id": request.node_id},
            )
        left = node.expires_at - self._clock.monotonic()
        return wire.ExplainNodeResponse(state=node.state, sentences=explain.sentences(node, lease_left_s=left))

    def _message(self, node: Node) -> wire.Node:
        expires = self._clock.wall() + node.expires_at - self._clock.monotonic()
        return wire.Node(
            description=node.description,
            state=node.state,
            report=node.report,
            stats=node.stats,
            violations=[node_pb2.Finding(path=v.path, found=v.found, expected=v.expected) for v in node.violations],
            register_time=_timestamp(node.registered_at),
            expire_time=_timestamp(expires),
        )


_HEARTBEAT_OUTCOMES = {reasons.NODE_SUPERSEDED: "superseded"}


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp


def log_end(node: Node, end: End) -> None:
    """Writes the line of a lease that ended."""
    write = _log.info if end is End.WITHDRAWN else _log.warning
    write(
        f"node.{end.value}",
        node_id=node.node_id,
        incarnation=node.description.incarnation,
        address=node.description.address,
    )
