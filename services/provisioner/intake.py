# SPDX-License-Identifier: Apache-2.0
"""One registration, from first look to verdict: judge the description, judge the report, probe, judge the probe."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from services.common import logs, reasons
from services.common.errors import (
    FabricError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    Violation,
)
from services.common.telemetry import names
from services.provisioner import verdict
from services.provisioner.registry import ACCEPTED, LOADED, Node, Registry
from services.provisioner.wording import field_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ifabric.engine.v1 import node_pb2
    from ifabric.worker.v1 import worker_service_pb2
    from services.common.contract import Finding
    from services.common.tasks import Tasks
    from services.common.telemetry import Telemetry

_DESCRIPTION_BYTES_MAX = 256 * 1024
_FINDINGS_MAX = 200
_log = logs.get("provisioner.intake")


class WorkerProber(Protocol):
    """Runs one request through the engine of a worker."""

    async def probe(self, address: str) -> worker_service_pb2.ProbeResponse:
        """See `prober.Prober.probe`."""
        ...


class Intake:
    """Takes registrations and brings each to its verdict."""

    def __init__(
        self,
        registry: Registry,
        prober: WorkerProber,
        tasks: Tasks,
        telemetry: Telemetry,
        *,
        required_evidence: Sequence[str] = (),
    ) -> None:
        """Takes what it works with.

        Args:
            registry: Where nodes are kept.
            prober: Runs probes.
            tasks: Where probes run: a worker that gives up waiting for its answer does not end its probe.
            telemetry: Where it counts.
            required_evidence: Kinds of evidence without which no node is accepted.
        """
        self._registry = registry
        self._prober = prober
        self._tasks = tasks
        self._required_evidence = tuple(required_evidence)
        self._probes: dict[int, asyncio.Task[Node | None]] = {}
        self._registrations = telemetry.counter(names.REGISTRATIONS)
        self._violations = telemetry.counter(names.VIOLATIONS)
        self._probe_duration = telemetry.histogram(names.PROBE_DURATION)

    async def register(
        self,
        description: node_pb2.NodeDescription,
        report: node_pb2.EngineReport | None,
    ) -> Node:
        """Registers a node; with a report, returns when the engine has been probed.

        Raises:
            InvalidArgumentError: Fields are absent, unknown or out of range; carries every violation.
            FailedPreconditionError: The description disagrees with the card, the report or the probe, or evidence that
                is required is not there; carries every violation. Or a later process of the node has registered, or
                the node was withdrawn or registered anew while it was probed.
            ResourceExhaustedError: There are too many nodes.
        """
        try:
            node = await self._judged(description, report)
        except FabricError as error:
            self._registrations.add(1, {"outcome": _OUTCOMES.get(error.reason, "refused")})
            raise
        self._registrations.add(1, {"outcome": "accepted" if node.state == ACCEPTED else "registered"})
        return node

    async def settle(self) -> None:
        """Returns once no probe runs."""
        while self._probes:
            await asyncio.wait(tuple(self._probes.values()))

    async def _judged(self, description: node_pb2.NodeDescription, report: node_pb2.EngineReport | None) -> Node:
        unlistable = verdict.identity(description) + verdict.oversized(description, _DESCRIPTION_BYTES_MAX)
        if unlistable:
            self._count(unlistable)
            raise _refusal(description.node_id, unlistable, malformed=True)
        malformed = verdict.description(description)
        findings = malformed + verdict.agreement(description)
        findings += verdict.evidence(description, self._required_evidence)
        if report is not None:
            findings += verdict.report(description, report)
        before = self._registry.find(description.node_id)
        node = self._registry.register(description, report, tuple(findings[:_FINDINGS_MAX]))
        if before is None or before.version != node.version:
            self._tell(node)
        if findings:
            raise _refusal(node.node_id, findings, malformed=bool(malformed))
        if node.state != LOADED:
            return node
        return await self._probed(node)

    async def _probed(self, node: Node) -> Node:
        """Waits for the probe of this registration; one that is sent twice waits for the same probe."""
        probe = self._probes.get(node.version)
        if probe is None:
            probe = self._tasks.start(self._probe(node), name=f"probe of {node.node_id}")
            self._probes[node.version] = probe
            probe.add_done_callback(lambda _: self._probes.pop(node.version, None))
        judged = await asyncio.shield(probe)
        if judged is None:
            raise FailedPreconditionError(
                f"node {node.node_id} was withdrawn or registered anew while it was probed",
                reason=reasons.NODE_OVERTAKEN,
                metadata={"node_id": node.node_id},
            )
        if judged.violations:
            raise _refusal(judged.node_id, judged.violations, malformed=False)
        return judged

    async def _probe(self, node: Node) -> Node | None:
        assert node.report is not None  # noqa: S101 -- a node in LOADED has one
        started = time.perf_counter()
        try:
            answer = await self._prober.probe(node.description.address)
            findings = verdict.probe(node.description, node.report, answer)
        except FabricError as error:
            findings, outcome = verdict.unanswered(node.description.address, error), "failed"
        except Exception as error:
            # A node that trips us up is refused like any other; the rest of the nodes must not notice.
            _log.exception("probe.failed", node_id=node.node_id)
            ours = InternalError(f"the probe could not be made ({type(error).__name__})")
            findings, outcome = verdict.unanswered(node.description.address, ours), "failed"
        else:
            outcome = "disagreed" if findings else "agreed"
        elapsed_s = time.perf_counter() - started
        self._probe_duration.record(elapsed_s, {"outcome": outcome})
        judged = self._registry.conclude(node, tuple(findings[:_FINDINGS_MAX]))
        _log.info("node.probed", node_id=node.node_id, outcome=outcome, probe_s=round(elapsed_s, 3))
        if judged is not None and judged.version == node.version:
            self._tell(judged)
        return judged

    def _tell(self, node: Node) -> None:
        """Counts and logs a verdict, once: a worker that says the same again does not fill the log."""
        facts = {
            "node_id": node.node_id,
            "incarnation": node.description.incarnation,
            "engine_id": node.description.contract.engine_id,
            "engine_digest": node.description.engine_digest,
            "address": node.description.address,
        }
        if node.violations:
            self._count(node.violations)
            _log.warning(
                "node.refused",
                **facts,
                violations=[{"path": v.path, "found": v.found, "expected": v.expected} for v in node.violations],
            )
        else:
            _log.info(_EVENTS.get(node.state, "node.registered"), **facts)

    def _count(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._violations.add(1, {"field": field_label(finding.path)})


_EVENTS = {ACCEPTED: "node.accepted", LOADED: "node.loaded"}
_OUTCOMES = {
    reasons.NODE_SUPERSEDED: "superseded",
    reasons.NODE_OVERTAKEN: "overtaken",
    reasons.NODES_FULL: "full",
}


def _refusal(node_id: str, findings: Sequence[Finding], *, malformed: bool) -> FabricError:
    violations = tuple(Violation(f.path, f"found {f.found}, expected {f.expected}") for f in findings)
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    first = findings[0]
    message = (
        f"node {node_id or 'without a name'} is refused: {first.path}: found {first.found}, expected "
        f"{first.expected}{more}"
    )
    if malformed:
        return InvalidArgumentError(message, reason=reasons.NODE_DESCRIPTION_REFUSED, violations=violations)
    return FailedPreconditionError(message, reason=reasons.NODE_DISAGREES, violations=violations)
