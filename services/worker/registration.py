# SPDX-License-Identifier: Apache-2.0
"""The worker's life with the provisioner.

    describe ──▶ register ──may load──▶ load ──▶ register as loaded ──accepted──▶ heartbeat ──unknown──▶ register …
       ▲            │                    │              │                            │
       └──refused───┴──── cannot load ───┘              └── refused: wait, again     └── unreachable: go on

Nothing here gives up: a provisioner that is not there yet is waited for, a refused directory is read again until it is
mended, a provisioner that forgot the node hears of it again. The description of an engine that could not be
loaded says why, so that the provisioner refuses it and everybody sees the reason. Only another process under the same
name ends this one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common import logs, reasons
from services.common.backoff import Backoff
from services.common.errors import FabricError, FailedPreconditionError, InvalidArgumentError, NotFoundError
from services.common.rpc import translated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc

    from ifabric.engine.v1 import node_pb2

REGISTER_WITHIN_S = 5.0
REGISTER_LOADED_WITHIN_S = 40.0
"""The provisioner probes the engine meanwhile."""
HEARTBEAT_WITHIN_S = 2.0
RETRY_MOST_S = 0.5
"""How long a mended directory waits at most until it is read again. Registering renews the lease of a refused node, so
that it stays listed with its violations: a lease is three seconds by default."""

RELOAD_AFTER_S = 30.0
"""How long an engine that could not be loaded waits until that is tried again, unless its directory changes before."""

_log = logs.get("worker.registration")


class Worker(Protocol):
    """What the registration asks of the rest of the worker."""

    async def describe(self) -> node_pb2.NodeDescription:
        """Reads the engine directory anew; raises nothing for what is wrong with it: that is in the findings."""

    async def load(self, node: node_pb2.NodeDescription) -> node_pb2.EngineReport:
        """Loads the engine; raises FabricError where it cannot be loaded."""

    async def accepted(self, against: str | None) -> None:
        """Hears that the provisioner accepts the loaded engine (None), or why it does not."""

    def stats(self) -> node_pb2.EngineStats | None:
        """The engine's counters; None before it is loaded."""


@dataclass(frozen=True, slots=True)
class _FailedLoad:
    """An attempt to load an engine that failed; none where the digest is empty."""

    engine_digest: str = ""
    message: str = ""
    at: float = 0.0

    def add_to(self, node: node_pb2.NodeDescription) -> None:
        """Adds the failure to the description of the same engine, until it is time to try again."""
        if self.engine_digest == node.engine_digest != "" and time.monotonic() < self.at + RELOAD_AFTER_S:
            node.findings.add(path="", found=f"not loadable: {self.message}", expected="an engine that loads here")


class Registration:
    """Keeps one worker registered."""

    def __init__(self, channel: grpc.aio.Channel, worker: Worker, on_superseded: Callable[[str], None]) -> None:
        """Not registered yet.

        Args:
            channel: To the provisioner.
            worker: The rest of this worker.
            on_superseded: Called with a sentence when another process has taken the node's name.
        """
        self._stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(channel)
        self._worker = worker
        self._on_superseded = on_superseded
        self._node: node_pb2.NodeDescription | None = None
        self._draining = False
        self._last_refusal: tuple[str, ...] = ()
        self._failed_load = _FailedLoad()

    async def run(self) -> None:
        """Registers, loads and keeps the lease until it is cancelled or the node's name is taken."""
        try:
            node, report = await self._until_loaded()
            await self._keep(node, report)
        except FailedPreconditionError as error:
            if error.reason != reasons.NODE_SUPERSEDED:
                raise
            self._on_superseded(error.message)

    async def leave(self) -> None:
        """Says that the worker drains, now and with every heartbeat to come; registers no more."""
        self._draining = True
        if self._node is not None:
            await self._farewell("heartbeat", self._heartbeat(self._node))

    async def withdraw(self) -> None:
        """Takes the node out."""
        if self._node is not None:
            request = wire.WithdrawNodeRequest(node_id=self._node.node_id, incarnation=self._node.incarnation)
            await self._farewell("withdrawal", self._stub.WithdrawNode(request, timeout=HEARTBEAT_WITHIN_S))

    async def _until_loaded(self) -> tuple[node_pb2.NodeDescription, node_pb2.EngineReport]:
        backoff = Backoff(first_s=0.25, most_s=RETRY_MOST_S)
        while True:
            node = await self._worker.describe()
            self._failed_load.add_to(node)
            try:
                interval_s = await self._register(node, None)
                try:
                    return node, await self._load(node, interval_s)
                except FabricError as error:
                    self._failed_load = _FailedLoad(node.engine_digest, error.message, time.monotonic())
                    raise
            except FabricError as error:
                self._report(node, error)
            await backoff.wait()

    async def _load(self, node: node_pb2.NodeDescription, interval_s: float) -> node_pb2.EngineReport:
        """Loads the engine, which may take minutes, and keeps the lease meanwhile."""
        loop = asyncio.get_running_loop()
        loading = loop.create_task(self._worker.load(node), name="load")
        holding = loop.create_task(self._hold(node, interval_s), name="hold")
        try:
            await asyncio.wait({loading, holding}, return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                await holding
            return await loading
        finally:
            loading.cancel()
            holding.cancel()

    async def _hold(self, node: node_pb2.NodeDescription, interval_s: float) -> None:
        """Keeps the lease of a node that is not loaded; ends only by the error that its name is taken."""
        while True:
            try:
                await self._beat(node, interval_s)
                interval_s = await self._register(node, None)
            except FabricError as error:
                self._report(node, error)
                await asyncio.sleep(interval_s)

    async def _keep(self, node: node_pb2.NodeDescription, report: node_pb2.EngineReport) -> None:
        backoff = Backoff(first_s=0.1, most_s=RETRY_MOST_S)
        while not self._draining:
            try:
                interval_s = await self._register(node, report)
                await self._worker.accepted(None)
                backoff.reset()
                await self._beat(node, interval_s)
                continue
            except FabricError as error:
                self._report(node, error)
                if _is_verdict(error):
                    await self._worker.accepted(f"the provisioner refuses it: {error.message}")
                    node = await self._look_again(node)
            await backoff.wait()

    async def _look_again(self, node: node_pb2.NodeDescription) -> node_pb2.NodeDescription:
        """Describes the node anew, since what it is refused for may have been mended: evidence, or the card.

        Another engine that lies there by now is not the one that is loaded: then the description stays.
        """
        seen = await self._worker.describe()
        return seen if seen.engine_digest == node.engine_digest else node

    async def _register(self, node: node_pb2.NodeDescription, report: node_pb2.EngineReport | None) -> float:
        """Registers; returns the heartbeat interval, in seconds."""
        self._node = node
        request = wire.RegisterNodeRequest(description=node, loaded=report)
        limit_s = REGISTER_WITHIN_S if report is None else REGISTER_LOADED_WITHIN_S
        with translated():
            response = await self._stub.RegisterNode(request, timeout=limit_s)
        self._last_refusal = ()
        _log.info("node.registered", node_id=node.node_id, state=wire.NodeState.Name(response.state))
        return max(response.heartbeat_interval_ms, 1) / 1000

    async def _beat(self, node: node_pb2.NodeDescription, interval_s: float) -> None:
        """Sends heartbeats until the provisioner wants a new registration."""
        reachable = True
        while True:
            await asyncio.sleep(interval_s)
            try:
                with translated():
                    response = await self._heartbeat(node)
            except NotFoundError:
                return
            except FailedPreconditionError:
                raise
            except FabricError as error:
                if reachable:
                    _log.warning("heartbeat.failed", reason=error.reason, error=error.message)
                reachable = False
                continue
            if not reachable:
                _log.info("heartbeat.recovered")
            reachable = True
            if response.state == wire.NODE_STATE_REFUSED:
                return  # the registration to come brings the violations

    def _heartbeat(
        self, node: node_pb2.NodeDescription
    ) -> grpc.aio.UnaryUnaryCall[wire.HeartbeatRequest, wire.HeartbeatResponse]:
        request = wire.HeartbeatRequest(
            node_id=node.node_id,
            incarnation=node.incarnation,
            stats=self._worker.stats(),
            draining=self._draining,
        )
        return self._stub.Heartbeat(request, timeout=HEARTBEAT_WITHIN_S)

    async def _farewell(self, what: str, call: Awaitable[object]) -> None:
        """Awaits a call that ends with the lease anyway, should nobody hear it."""
        try:
            with translated():
                await call
        except FabricError as error:
            _log.warning("farewell.failed", what=what, reason=error.reason, error=error.message)

    def _report(self, node: node_pb2.NodeDescription, error: FabricError) -> None:
        """Logs why the node is not in service; the same reason again is not news."""
        if error.reason == reasons.NODE_SUPERSEDED:
            raise error
        refusal = (error.reason, error.message, *(f"{v.field}: {v.description}" for v in error.violations))
        if refusal == self._last_refusal:
            return
        self._last_refusal = refusal
        log = _log.error if _is_verdict(error) else _log.warning
        log(
            "node.not_in_service",
            node_id=node.node_id,
            reason=error.reason,
            error=error.message,
            violations=[{"field": v.field, "description": v.description} for v in error.violations],
        )


def _is_verdict(error: FabricError) -> bool:
    return isinstance(error, InvalidArgumentError | FailedPreconditionError)
