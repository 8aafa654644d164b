# SPDX-License-Identifier: Apache-2.0
"""What the worker says of itself: the engine directory as read, the card, and later the loaded engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifabric.engine.v1 import contract_pb2, node_pb2
from services.common import contract, evidence
from services.common.contract import Contract, Finding
from services.common.errors import FabricError, NotFoundError
from services.common.protocol import PROTOCOL_REVISION, suite_version
from services.common.schema import Real
from services.worker.card import card_facts
from services.worker.credit import Capacity
from services.worker.native import inspect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from services.worker.native import EngineDescription, Stats

_Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine directory, as read."""

    engine_digest: str
    """SHA-256 of the bytes of contract.json; empty where there is none."""
    contract: contract_pb2.EngineContract
    findings: tuple[Finding, ...]
    """What is wrong with the directory and the wire form of the contract cannot show."""
    evidence: tuple[node_pb2.EvidenceFacts, ...] = ()
    """What lies beside the directory about this engine, oldest first."""


class DirectoryReader:
    """Reads an engine directory, digests of all files included; again only once something in it has changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: tuple[_Fingerprint, Reading] | None = None

    def read(self) -> Reading:
        """Returns what lies there; everything wrong with it is in the findings. Blocks as long as the disk needs."""
        before = self._fingerprint()
        if self._last is not None and self._last[0] == before:
            return self._last[1]
        reading = self._read()
        self._last = (before, reading) if self._fingerprint() == before else None
        return reading

    def _read(self) -> Reading:
        try:
            read, findings = contract.read(self._directory)
            digest = contract.engine_digest(self._directory)
            findings += [
                Finding(finding.path, finding.found, finding.expected) for finding in inspect(self._directory).findings
            ]
        except FabricError as error:
            expected = f"a readable {contract.CONTRACT_FILE} in the engine directory"
            absent = Finding("", "absent" if isinstance(error, NotFoundError) else error.message, expected)
            return Reading("", contract_pb2.EngineContract(), (absent,))
        return Reading(digest, read, tuple(dict.fromkeys(findings)), tuple(_evidence(self._directory, digest)))

    def _fingerprint(self) -> _Fingerprint:
        """Names, sizes, times of change and inodes of what lies in the directory, and beside it as evidence."""
        return tuple(sorted(self._entries()))

    def _entries(self) -> Iterator[tuple[str, int, int, int]]:
        for root in (self._directory, evidence.folder(self._directory)):
            for folder, _folders, files in os.walk(root):
                for name in files:
                    path = os.path.join(folder, name)
                    try:
                        found = os.stat(path)
                    except OSError:
                        yield path, -1, 0, 0
                    else:
                        yield path, found.st_size, found.st_mtime_ns, found.st_ino


def _evidence(directory: Path, digest: str) -> Iterator[node_pb2.EvidenceFacts]:
    try:
        good, flawed = evidence.read_all(directory, digest)
    except FabricError as error:
        yield node_pb2.EvidenceFacts(flaw=error.message)
        return
    for flaw in flawed:
        yield node_pb2.EvidenceFacts(kind=flaw.kind, flaw=flaw.why)
    for each in good:
        yield node_pb2.EvidenceFacts(
            kind=each.kind, digest=each.digest, outcome=_OUTCOMES[each.outcome], time=each.produced_by.time
        )


_OUTCOMES = {
    evidence.HOLDS: node_pb2.EVIDENCE_OUTCOME_HOLDS,
    evidence.FAILS: node_pb2.EVIDENCE_OUTCOME_FAILS,
    evidence.MEASURED: node_pb2.EVIDENCE_OUTCOME_MEASURED,
}


def node_description(reading: Reading, *, node_id: str, incarnation: str, address: str) -> node_pb2.NodeDescription:
    """Makes the description with which the node registers."""
    return node_pb2.NodeDescription(
        node_id=node_id,
        incarnation=incarnation,
        address=address,
        engine_digest=reading.engine_digest,
        contract=reading.contract,
        findings=[
            node_pb2.Finding(path=finding.path, found=finding.found, expected=finding.expected)
            for finding in reading.findings
        ],
        card=card_facts(reading.contract.card.family),
        evidence=reading.evidence,
        suite_version=suite_version(),
        protocol_revision=PROTOCOL_REVISION,
    )


def capacity(agreed: Contract, description: EngineDescription) -> Capacity:
    """Returns what a loaded engine can have in work.

    Args:
        agreed: Its contract, with which the library has found the engine to agree.
        description: What it says of itself.
    """
    limits, form = agreed.limits, agreed.capabilities.payload
    block_tokens = limits.kv_block_tokens
    return Capacity(
        slots=limits.slots,
        max_input_tokens=limits.max_input_tokens,
        max_sequence_tokens=limits.max_sequence_tokens,
        max_output_tokens=limits.max_output_tokens,
        samples_max=agreed.capabilities.samples_max,
        step_token_budget=limits.step_token_budget,
        pool_tokens=None if block_tokens is None else description.kv_pool_blocks * block_tokens,
        payload_bytes=0 if form is None else form.size_bytes,
    )


def report_message(description: EngineDescription) -> node_pb2.EngineReport:
    """Returns the wire form of what a loaded engine says of itself."""
    said = contract.from_document(
        {"limits": _document(description.limits), "capabilities": _document(description.capabilities)}
    )
    return node_pb2.EngineReport(
        engine_digest=description.contract_sha256,
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        layers=description.layers,
        limits=said.limits,
        capabilities=said.capabilities,
        kv_pool_blocks=description.kv_pool_blocks,
        load_ms=description.load_ms,
    )


def stats_message(stats: Stats) -> node_pb2.EngineStats:
    """Returns the wire form of a reading of an engine's counters."""
    return node_pb2.EngineStats(**{name: getattr(stats, name) for name in _STATS_FIELDS})


_STATS_FIELDS = tuple(field.name for field in node_pb2.EngineStats.DESCRIPTOR.fields)


def _document(plain: dict[str, Any]) -> dict[str, Any]:
    """Turns plain JSON values into those of a strict document, in which a real number knows its text."""
    return {name: Real.of(value) if isinstance(value, float) else value for name, value in plain.items()}
