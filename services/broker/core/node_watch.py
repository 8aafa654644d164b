# SPDX-License-Identifier: Apache-2.0
"""Follows the provisioner: which nodes are accepted, as long as it is there, and what was known while it is not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc

from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common import logs
from services.common.backoff import Backoff
from services.common.rpc import call_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Nodes = Mapping[str, wire.Node]

LEASE_S = 30.0
"""How long nodes stay known while the provisioner cannot be reached; those that answer by themselves stay longer."""

_log = logs.get("broker.nodes")


class NodeWatch:
    """The list of nodes.

    Args:
        channel: To the provisioner.
        changed: Called with all known nodes, by id, whenever something about them is new.
    """

    def __init__(self, channel: grpc.aio.Channel, changed: Callable[[Nodes], None]) -> None:
        self._stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(channel)
        self._changed = changed
        self._nodes: dict[str, wire.Node] = {}
        self._resume_token = ""
        self._lost_at: float | None = None

    @property
    def nodes(self) -> Nodes:
        """All known nodes, by id, whatever their state."""
        return self._nodes

    @property
    def stale(self) -> bool:
        """Whether the provisioner has been away for longer than a lease."""
        return self._lost_at is not None and time.monotonic() - self._lost_at > LEASE_S

    async def run(self) -> None:
        """Follows for ever."""
        backoff = Backoff()
        while True:
            call = self._stub.WatchNodes(wire.WatchNodesRequest(resume_token=self._resume_token), wait_for_ready=False)
            try:
                async for message in call:
                    backoff.reset()
                    self._lost_at = None
                    self._take(message)
                _log.warning("watch.ended", why="the provisioner closed the stream")
            except grpc.aio.AioRpcError as error:
                if self._lost_at is None:
                    _log.warning("watch.ended", why=call_error(error).message)
            finally:
                call.cancel()
            if self._lost_at is None:
                self._lost_at = time.monotonic()
            await backoff.wait()

    def _take(self, message: wire.WatchNodesResponse) -> None:
        if message.snapshot:
            self._nodes = {}
        for node in message.nodes:
            self._nodes[node.description.node_id] = node
        for node_id in message.gone_node_ids:
            self._nodes.pop(node_id, None)
        self._resume_token = message.resume_token
        self._changed(self._nodes)
