# SPDX-License-Identifier: Apache-2.0
"""A provisioner that requires evidence: what it refuses, what it takes, and that nobody has to be started again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from engines import evidence
from engines.evidence import EvidenceFinding
from engines.simulated import write_simulated_engine
from ifabric.engine.v1 import node_pb2
from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common.errors import FabricError, StartError
from services.common.rpc import channel, translated
from services.common.settings import load
from services.provisioner import verdict
from services.provisioner.settings import ProvisionerSettings
from services.provisioner.wording import field_label
from tests.provisioner import made
from tests.support.processes import ServiceProcess
from tests.support.waiting import wait_until
from tests.worker.running import GENERATING

if TYPE_CHECKING:
    from pathlib import Path

HOLDS, FAILS, MEASURED = (
    node_pb2.EVIDENCE_OUTCOME_HOLDS,
    node_pb2.EVIDENCE_OUTCOME_FAILS,
    node_pb2.EVIDENCE_OUTCOME_MEASURED,
)


def facts(kind: str, outcome: Any, *, second: int = 0) -> node_pb2.EvidenceFacts:
    return node_pb2.EvidenceFacts(kind=kind, digest="ab" * 32, outcome=outcome, time=f"2026-11-29T12:00:{second:02d}Z")


@pytest.mark.parametrize(
    ("brought", "required", "found"),
    [
        ([], [], {}),
        ([], ["audit"], {"evidence[audit]": "absent"}),
        ([facts("audit", HOLDS)], ["audit"], {}),
        ([facts("sweep", MEASURED)], ["sweep"], {}),
        ([facts("audit", HOLDS)], ["audit", "ladder"], {"evidence[ladder]": "absent"}),
        (
            [facts("audit", HOLDS), facts("audit", FAILS, second=1)],
            ["audit"],
            {"evidence[audit]": "abababababababab of 2026-11-29T12:00:01Z, which fails"},
        ),
        ([facts("audit", FAILS), facts("audit", HOLDS, second=1)], ["audit"], {}),
        (
            [node_pb2.EvidenceFacts(kind="audit", flaw="audit-1.json: digest: ...")],
            ["audit"],
            {"evidence[audit]": "audit-1.json: digest: ..."},
        ),
        ([node_pb2.EvidenceFacts(kind="ladder", flaw="cut off")], ["audit"], {"evidence[audit]": "absent"}),
        ([node_pb2.EvidenceFacts(flaw="cannot be read")], ["audit"], {"evidence[audit]": "cannot be read"}),
    ],
)
def test_what_is_required_is_the_newest_of_its_kind(
    brought: list[node_pb2.EvidenceFacts], required: list[str], found: dict[str, str]
) -> None:
    node = made.description()
    node.evidence.extend(brought)
    findings = verdict.evidence(node, required)
    assert {finding.path: finding.found for finding in findings} == found
    assert {field_label(finding.path) for finding in findings} <= {"evidence"}


def test_the_policy_is_a_setting_and_its_words_are_checked() -> None:
    settings = load(ProvisionerSettings, ["--required-evidence", '["audit", "ladder"]'], {})
    assert settings.required_evidence == ("audit", "ladder")
    with pytest.raises(StartError, match=r"--required-evidence\.1 is 'An Audit'; allowed is"):
        load(ProvisionerSettings, ["--required-evidence", '["audit", "An Audit"]'], {})


class Scene:
    """A real worker with a simulated engine, and the provisioner that judges it."""

    def __init__(self, engine: Path, stub: provisioner_service_pb2_grpc.ProvisionerServiceAsyncStub) -> None:
        self.engine = engine
        self.stub = stub

    async def node(self) -> wire.Node | None:
        with suppress(FabricError), translated():
            listed = await self.stub.ListNodes(wire.ListNodesRequest(), timeout=5)
            return next(iter(listed.nodes), None)
        return None

    async def refused_for(self, found: str) -> None:
        """Waits until the node is refused for its evidence alone, with these words."""

        async def seen() -> bool:
            node = await self.node()
            return (
                node is not None
                and node.state == wire.NODE_STATE_REFUSED
                and [(v.path[:8], found in v.found) for v in node.violations] == [("evidence", True)]
            )

        await wait_until(seen, what=f"a refusal that says {found}")

    async def accepted(self) -> wire.Node:
        async def seen() -> wire.Node | None:
            node = await self.node()
            return node if node is not None and node.state == wire.NODE_STATE_ACCEPTED else None

        node: wire.Node = await wait_until(seen, what="acceptance")
        return node

    async def write(self, kind: str, outcome: str) -> Path:
        findings = [EvidenceFinding("tensor", "1,000 times too large", "true")] if outcome == "fails" else []
        return await asyncio.to_thread(
            evidence.write,
            self.engine,
            kind=kind,
            outcome=outcome,
            summary=f"it {outcome}",
            command="ifab engine audit a b",
            findings=findings,
        )


async def test_a_worker_is_refused_until_the_evidence_is_there_and_nothing_is_started_again(
    address: str, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine, **GENERATING)
    policy = {"heartbeat_interval_ms": 200, "required_evidence": ["audit"], "listen": address}
    first = await asyncio.to_thread(ServiceProcess, "services.provisioner", policy)
    with first:
        settings = {"engine_dir": str(engine), "provisioner": address, "node_id": "node-1"}
        worker = await asyncio.to_thread(ServiceProcess, "services.worker", settings)
        with worker:
            async with channel(address) as client:
                scene = Scene(engine, provisioner_service_pb2_grpc.ProvisionerServiceStub(client))
                await scene.refused_for("absent")
                failing = await scene.write("audit", "fails")
                await scene.refused_for("which fails")
                failing.unlink()
                (failing.with_name("audit-0.json")).write_text("[" * 100_000)
                await scene.refused_for("nesting deeper")
                await scene.write("audit", "holds")
                loaded = await scene.accepted()
                assert not loaded.violations

                # A stricter policy: the engine that is loaded stays loaded, and waits for what is missing.
                assert await asyncio.to_thread(first.stop) == 0
                stricter = policy | {"required_evidence": ["audit", "ladder"]}
                with await asyncio.to_thread(ServiceProcess, "services.provisioner", stricter) as second:
                    await scene.refused_for("absent")
                    await scene.write("ladder", "measured")
                    again = await scene.accepted()
                    assert again.description.incarnation == loaded.description.incarnation
                    assert again.report == loaded.report
                    assert await asyncio.to_thread(worker.stop) == 0
                    assert await asyncio.to_thread(second.stop) == 0
                assert len(worker.logs("engine.loaded")) == 1
