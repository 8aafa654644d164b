# SPDX-License-Identifier: Apache-2.0
"""Waits until a started suite can serve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric.provisioner.v1 import provisioner_service_pb2, provisioner_service_pb2_grpc
from services.cli.running import CommandError
from services.common.errors import DeadlineExceededError, UnavailableError
from services.common.rpc import channel, translated

if TYPE_CHECKING:
    from services.cli.suite import Suite

_CALL_S = 5.0
_POLL_S = 0.05


async def serving_engines(suite: Suite, *, limit_s: float) -> list[broker_service_pb2.Engine]:
    """Waits until the broker lists every worker of `suite`, and returns the engines.

    Raises:
        CommandError: A worker was refused (the sentence names every violation), a process ended, or `limit_s` passed.
    """
    watch = asyncio.create_task(suite.watch())
    wait = asyncio.create_task(_poll(suite))
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.wait({watch, wait}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                await watch
            return await wait
    except TimeoutError:
        raise CommandError(f"the engines were not ready within {limit_s:g} s; see the logs of the services") from None
    finally:
        for task in (watch, wait):
            task.cancel()
        await asyncio.gather(watch, wait, return_exceptions=True)


async def _poll(suite: Suite) -> list[broker_service_pb2.Engine]:
    wanted = {service.name for service in suite.workers}
    async with channel(suite.provisioner.address) as to_provisioner, channel(suite.broker.address) as to_broker:
        provisioner = provisioner_service_pb2_grpc.ProvisionerServiceStub(to_provisioner)
        broker = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
        while True:
            try:
                with translated():
                    nodes = await provisioner.ListNodes(provisioner_service_pb2.ListNodesRequest(), timeout=_CALL_S)
                    _check(nodes.nodes)
                    listed = await broker.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=_CALL_S)
            except (DeadlineExceededError, UnavailableError):
                pass
            else:
                if wanted <= {node for engine in listed.engines for node in engine.node_ids}:
                    return list(listed.engines)
            await asyncio.sleep(_POLL_S)


def _check(nodes: object) -> None:
    for node in nodes:  # type: ignore[attr-defined]
        if node.state == provisioner_service_pb2.NODE_STATE_REFUSED:
            reasons = "; ".join(f"{each.path} is {each.found}, expected {each.expected}" for each in node.violations)
            raise CommandError(
                f"the engine of {node.description.node_id} was refused: {reasons}; mend its directory, or make it anew "
                "with `ifab engine build`"
            )
