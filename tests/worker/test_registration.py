# SPDX-License-Identifier: Apache-2.0
"""Registration against a real gRPC server that plays the provisioner by a script."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ifabric.engine.v1 import node_pb2
from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common import reasons
from services.common.errors import (
    FabricError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    Violation,
)
from services.common.rpc import channel
from services.worker.registration import Registration
from tests.support.logged import captured_logs
from tests.support.ports import held_port
from tests.support.servers import LoopbackSettings, Unserved, serving
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

FULL_NAME = "ifabric.provisioner.v1.ProvisionerService"
REFUSAL = InvalidArgumentError(
    "the node is refused",
    reason=reasons.NODE_DESCRIPTION_REFUSED,
    violations=(
        Violation("contract.limits.step_token_budget", "found absent, expected integer"),
        Violation("contract.limits.slots", "found 0, expected at least 1"),
    ),
)
SUPERSEDED = FailedPreconditionError("another process took the name", reason=reasons.NODE_SUPERSEDED)


class ScriptedProvisioner(Unserved):
    """Answers by what the test sets, and remembers what it was asked."""

    def __init__(self) -> None:
        self.refusal: FabricError | None = None
        self.refusal_loaded: FabricError | None = None
        self.forgotten = False
        self.superseded = False
        self.registrations: list[wire.RegisterNodeRequest] = []
        self.heartbeats: list[wire.HeartbeatRequest] = []
        self.withdrawals: list[wire.WithdrawNodeRequest] = []

    async def RegisterNode(self, request: wire.RegisterNodeRequest, context: Any) -> wire.RegisterNodeResponse:
        self.registrations.append(request)
        loaded = request.HasField("loaded")
        refusal = self.refusal_loaded if loaded else self.refusal
        if refusal is not None:
            raise refusal
        if request.description.findings:
            raise InvalidArgumentError(request.description.findings[0].found, reason=reasons.NODE_DESCRIPTION_REFUSED)
        self.forgotten = False
        state = wire.NODE_STATE_ACCEPTED if loaded else wire.NODE_STATE_MAY_LOAD
        return wire.RegisterNodeResponse(state=state, heartbeat_interval_ms=20)

    async def Heartbeat(self, request: wire.HeartbeatRequest, context: Any) -> wire.HeartbeatResponse:
        self.heartbeats.append(request)
        if self.superseded:
            raise SUPERSEDED
        if self.forgotten:
            raise NotFoundError("who?", reason=reasons.NODE_UNKNOWN)
        return wire.HeartbeatResponse(state=wire.NODE_STATE_ACCEPTED)

    async def WithdrawNode(self, request: wire.WithdrawNodeRequest, context: Any) -> wire.WithdrawNodeResponse:
        self.withdrawals.append(request)
        return wire.WithdrawNodeResponse()


class ScriptedWorker:
    """The rest of the worker, as far as the registration sees it."""

    def __init__(self) -> None:
        self.digest = "a" * 64
        self.evidence = ""
        self.described = 0
        self.loads = 0
        self.load_error: FabricError | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.verdicts: list[str | None] = []

    async def describe(self) -> node_pb2.NodeDescription:
        self.described += 1
        evidence = [node_pb2.EvidenceFacts(kind=self.evidence)] if self.evidence else []
        return node_pb2.NodeDescription(
            node_id="node-1",
            incarnation="one",
            address="127.0.0.1:1",
            engine_digest=self.digest,
            evidence=evidence,
        )

    async def load(self, node: node_pb2.NodeDescription) -> node_pb2.EngineReport:
        self.loads += 1
        await self.may_load.wait()
        if self.load_error is not None:
            raise self.load_error
        return node_pb2.EngineReport(engine_digest=node.engine_digest)

    async def accepted(self, against: str | None) -> None:
        self.verdicts.append(against)

    def stats(self) -> node_pb2.EngineStats | None:
        return node_pb2.EngineStats(steps=7) if self.verdicts else None


class Scene:
    """A registration that runs, with both of its ends."""

    def __init__(self, provisioner: ScriptedProvisioner, worker: ScriptedWorker, address: str) -> None:
        self.provisioner = provisioner
        self.worker = worker
        self.superseded: list[str] = []
        self.channel = channel(address)
        self.registration = Registration(self.channel, worker, self.superseded.append)
        self.task = asyncio.get_running_loop().create_task(self.registration.run())

    async def accepted(self) -> None:
        """Waits until the worker is in service."""
        await wait_until(lambda: self.worker.verdicts and self.worker.verdicts[-1] is None, what="acceptance")


@asynccontextmanager
async def scene(provisioner: ScriptedProvisioner, worker: ScriptedWorker) -> AsyncIterator[Scene]:
    async with serving(
        provisioner_service_pb2_grpc.add_ProvisionerServiceServicer_to_server, provisioner, FULL_NAME
    ) as server:
        made = Scene(provisioner, worker, server.address)
        try:
            yield made
        finally:
            made.task.cancel()
            await asyncio.wait({made.task})
            await made.channel.close()


async def test_a_worker_registers_loads_registers_as_loaded_and_beats_with_its_counters() -> None:
    async with scene(ScriptedProvisioner(), ScriptedWorker()) as made:
        await made.accepted()
        first, second = made.provisioner.registrations
        assert not first.HasField("loaded")
        assert second.loaded.engine_digest == "a" * 64
        await wait_until(lambda: [beat for beat in made.provisioner.heartbeats if beat.stats.steps == 7])
        assert not made.provisioner.heartbeats[-1].draining


async def test_a_refused_worker_does_not_load_logs_every_violation_once_and_tries_again_with_a_new_reading() -> None:
    provisioner, worker = ScriptedProvisioner(), ScriptedWorker()
    provisioner.refusal = REFUSAL
    with captured_logs() as lines:
        async with scene(provisioner, worker) as made:
            await wait_until(lambda: worker.described >= 3, what="three readings")
            assert worker.loads == 0
            (line,) = lines.all("node.not_in_service")
            assert [violation["field"] for violation in line["violations"]] == [
                "contract.limits.step_token_budget",
                "contract.limits.slots",
            ]
            worker.digest = "b" * 64
            await wait_until(lambda: provisioner.registrations[-1].description.engine_digest == worker.digest)
            assert worker.loads == 0
            provisioner.refusal = None
            await made.accepted()


async def test_an_engine_that_cannot_be_loaded_says_why_and_is_tried_again_once_its_directory_changes() -> None:
    provisioner, worker = ScriptedProvisioner(), ScriptedWorker()
    worker.load_error = FailedPreconditionError("no such configuration")
    with captured_logs() as lines:
        async with scene(provisioner, worker) as made:
            await wait_until(lambda: len(provisioner.registrations) >= 4, what="several registrations")
            assert [len(each.description.findings) for each in provisioner.registrations[:4]] == [0, 1, 1, 1]
            (finding,) = provisioner.registrations[-1].description.findings
            assert "no such configuration" in finding.found
            assert worker.loads == 1
            assert [line["error"] for line in lines.all("node.not_in_service")] == [
                "no such configuration",
                "not loadable: no such configuration",
            ]
            worker.load_error, worker.digest = None, "b" * 64
            await made.accepted()
            assert worker.loads == 2


async def test_the_lease_is_kept_while_the_engine_loads() -> None:
    provisioner, worker = ScriptedProvisioner(), ScriptedWorker()
    worker.may_load.clear()
    async with scene(provisioner, worker) as made:
        await wait_until(lambda: len(provisioner.heartbeats) >= 3)
        assert worker.loads == 1
        provisioner.forgotten = True
        await wait_until(lambda: len(provisioner.registrations) >= 2, what="registration anew while loading")
        assert worker.loads == 1
        worker.may_load.set()
        await made.accepted()


async def test_a_provisioner_that_forgot_hears_of_the_loaded_node_again() -> None:
    provisioner = ScriptedProvisioner()
    async with scene(provisioner, ScriptedWorker()) as made:
        await made.accepted()
        provisioner.forgotten = True
        await wait_until(lambda: len(provisioner.registrations) == 3)
        assert provisioner.registrations[-1].HasField("loaded")
        assert made.worker.loads == 1


async def test_a_loaded_node_that_is_refused_hears_it_and_comes_back_once_it_is_accepted() -> None:
    provisioner, worker = ScriptedProvisioner(), ScriptedWorker()
    provisioner.refusal_loaded = FailedPreconditionError("the probe disagrees", reason=reasons.NODE_DISAGREES)
    async with scene(provisioner, worker) as made:
        await wait_until(lambda: worker.verdicts)
        assert "the probe disagrees" in str(worker.verdicts[0])
        provisioner.refusal_loaded = None
        await made.accepted()
        assert worker.loads == 1


async def test_a_provisioner_that_is_not_there_yet_is_waited_for() -> None:
    provisioner, worker = ScriptedProvisioner(), ScriptedWorker()
    provisioner.refusal = UnavailableError("starting")
    async with scene(provisioner, worker) as made:
        await wait_until(lambda: len(provisioner.registrations) >= 2)
        provisioner.refusal = None
        await made.accepted()


async def test_a_loaded_node_that_is_refused_describes_itself_anew() -> None:
    provisioner, worker = ScriptedProvisioner(), ScriptedWorker()
    provisioner.refusal_loaded = FailedPreconditionError("evidence[audit] is absent", reason=reasons.NODE_DISAGREES)
    async with scene(provisioner, worker) as made:
        await wait_until(lambda: worker.verdicts and worker.verdicts[-1])
        worker.evidence = "audit"
        await wait_until(lambda: [e.kind for e in provisioner.registrations[-1].description.evidence] == ["audit"])
        loaded = worker.digest
        worker.digest = "b" * 64  # another engine lies there by now, and is not the one that is loaded
        seen = worker.described
        await wait_until(lambda: worker.described > seen + 1)
        last = provisioner.registrations[-1]
        assert (last.description.engine_digest, last.loaded.engine_digest) == (loaded, loaded)
        provisioner.refusal_loaded = None
        await made.accepted()
        assert worker.loads == 1


@pytest.fixture
def address() -> Iterator[str]:
    """Where a provisioner listens that comes back."""
    with held_port() as held:
        yield held


async def test_a_provisioner_that_goes_away_takes_nothing_from_a_worker_in_service(address: str) -> None:
    provisioner, worker = ScriptedProvisioner(), ScriptedWorker()
    register = provisioner_service_pb2_grpc.add_ProvisionerServiceServicer_to_server
    settings = LoopbackSettings(listen=address, drain_grace_s=1.0)
    with captured_logs() as lines:  # the end may take a heartbeat with it
        async with serving(register, provisioner, FULL_NAME, settings=settings):
            made = Scene(provisioner, worker, address)
            await made.accepted()
        await wait_until(lambda: lines.all("heartbeat.failed"))
        async with serving(register, provisioner, FULL_NAME, settings=LoopbackSettings(listen=address)):
            provisioner.forgotten = True
            before = len(provisioner.registrations)
            await wait_until(lambda: len(provisioner.registrations) > before, what="registration after a restart")
            assert len(lines.all("heartbeat.failed")) == 1
    assert worker.verdicts == [None] * len(worker.verdicts)
    made.task.cancel()
    await asyncio.wait({made.task})
    await made.channel.close()


async def test_a_worker_whose_name_was_taken_is_told_and_registers_no_more() -> None:
    provisioner = ScriptedProvisioner()
    async with scene(provisioner, ScriptedWorker()) as made:
        await made.accepted()
        provisioner.superseded = True
        await wait_until(lambda: made.superseded)
        assert made.superseded == ["another process took the name"]
        await asyncio.wait_for(made.task, PATIENCE_S)
        assert len(provisioner.registrations) == 2


async def test_a_draining_worker_says_so_with_every_heartbeat_and_then_withdraws() -> None:
    provisioner = ScriptedProvisioner()
    async with scene(provisioner, ScriptedWorker()) as made:
        await made.accepted()
        await made.registration.leave()
        assert provisioner.heartbeats[-1].draining
        seen = len(provisioner.heartbeats)
        await wait_until(lambda: len(provisioner.heartbeats) > seen + 1)
        assert all(beat.draining for beat in provisioner.heartbeats[seen:])
        await made.registration.withdraw()
        assert [(gone.node_id, gone.incarnation) for gone in provisioner.withdrawals] == [("node-1", "one")]


async def test_a_farewell_that_nobody_hears_is_logged_and_ends_in_time() -> None:
    register = provisioner_service_pb2_grpc.add_ProvisionerServiceServicer_to_server
    async with serving(register, ScriptedProvisioner(), FULL_NAME) as server:
        made = Scene(ScriptedProvisioner(), ScriptedWorker(), server.address)
        await made.accepted()
    with captured_logs() as lines:
        await asyncio.wait_for(made.registration.leave(), 5)
        await asyncio.wait_for(made.registration.withdraw(), 5)
    assert [line["what"] for line in lines.all("farewell.failed")] == ["heartbeat", "withdrawal"]
    made.task.cancel()
    await asyncio.wait({made.task})
    await made.channel.close()
