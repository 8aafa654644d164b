# SPDX-License-Identifier: Apache-2.0
"""Puts the provisioner together and runs it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from ifabric.provisioner.v1.provisioner_service_pb2 import NodeState
from services.common.clock import SystemClock
from services.common.protocol import HEARTBEATS_A_LEASE
from services.common.rpc import Dialer, Server, options
from services.common.telemetry import names
from services.provisioner.intake import Intake
from services.provisioner.prober import Prober
from services.provisioner.registry import ACCEPTED, DRAINING, LOADED, MAY_LOAD, REFUSED, End, Node, Registry
from services.provisioner.servicer import FULL_NAME, ProvisionerServicer, log_end
from services.provisioner.watching import Watchers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.common.process import Process
    from services.common.telemetry import Telemetry
    from services.provisioner.settings import ProvisionerSettings

_STATES = (REFUSED, MAY_LOAD, LOADED, ACCEPTED, DRAINING)
_SWEEPS_AN_INTERVAL = 4
_INTERVALS_TO_LEARN = 1.5
"""How long a new process holds snapshots back once workers can reach it, for their next heartbeats."""


async def serve(settings: ProvisionerSettings, process: Process) -> None:
    """Serves until `process.stop` is asked for.

    Raises:
        StartError: The address to listen on is taken.
    """
    interval_s = settings.heartbeat_interval_ms / 1000
    clock, telemetry = SystemClock(), process.telemetry
    leases = telemetry.counter(names.LEASES_ENDED)
    for end in End:
        leases.add(0, {"reason": end.value})  # a counter that begins with its first event hides that event

    def ended(node: Node, end: End) -> None:
        leases.add(1, {"reason": end.value})
        log_end(node, end)

    def changed(node_id: str, node: Node | None) -> None:
        watchers.publish(node_id, node)
        count_states(registry.nodes())

    registry = Registry(
        clock, lease_s=HEARTBEATS_A_LEASE * interval_s, nodes_max=settings.nodes_max, on_change=changed, on_end=ended
    )
    watchers = Watchers(registry.nodes, watchers_max=settings.watchers_max, backlog_max=settings.watch_backlog_max)
    count_states = _state_counter(telemetry)
    count_states([])
    dialer = Dialer(process.credentials, message_bytes_max=settings.message_bytes_max)
    prober = Prober(telemetry, dialer, timeout_s=settings.probe_timeout_s)
    intake = Intake(registry, prober, process.tasks, telemetry, required_evidence=settings.required_evidence)
    servicer = ProvisionerServicer(
        registry, intake, watchers, clock, telemetry, heartbeat_interval_ms=settings.heartbeat_interval_ms
    )

    async def end_streams() -> None:
        watchers.close()

    server = Server(settings, telemetry, credentials=process.credentials)
    server.add(provisioner_service_pb2_grpc.add_ProvisionerServiceServicer_to_server, servicer, FULL_NAME)
    server.on_drain("watchers", end_streams)
    process.tasks.start(_sweep(registry, interval_s / _SWEEPS_AN_INTERVAL), name="lease sweep")
    least_s = options.RECONNECT_MS_MAX / 1000 + _INTERVALS_TO_LEARN * interval_s
    learning = _learn(intake, watchers, least_s=least_s, most_s=settings.probe_timeout_s)
    process.tasks.start(learning, name="learning")
    process.announce(await server.start(), health=server.health_address)
    await server.ready()
    await server.serve(process.stop)


async def _sweep(registry: Registry, period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        registry.sweep()


async def _learn(intake: Intake, watchers: Watchers, *, least_s: float, most_s: float) -> None:
    """Lets snapshots out once workers had the time to register and the engines that they brought have been probed.

    An engine that is busy answers its probe late; sent out before, the snapshot would take the node from its brokers.
    """
    await asyncio.sleep(least_s)
    with suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await intake.settle()
    watchers.open()


def _state_counter(telemetry: Telemetry) -> Callable[[Iterable[Node]], None]:
    """Returns what sets the count of nodes in each state, states without nodes included."""
    gauge = telemetry.gauge(names.NODES)

    def update(nodes: Iterable[Node]) -> None:
        counted = Counter(node.state for node in nodes)
        for state in _STATES:
            gauge.set(counted[state], {"state": NodeState.Name(state).removeprefix("NODE_STATE_").lower()})

    return update
