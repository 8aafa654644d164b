# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a contract in its wire form, and putting findings together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifabric.engine.v1 import contract_pb2
from services.common import schema
from services.common.contract.wire import to_document
from services.common.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.common.schema import Finding

SCHEMA = "contract"
"""Name of the schema of contracts."""


def check(contract: contract_pb2.EngineContract) -> list[Finding]:
    """Everything that is wrong with a contract by its own rules: what is absent, out of range, or disagrees.

    A field that is absent is named, also where the whole message around it is:
    `limits.step_token_budget: absent, expected integer from 1 to 16777216`.
    """
    findings = schema.Findings()
    schema.named(SCHEMA).check(to_document(contract), findings)
    return findings.all


def all_findings(contract: contract_pb2.EngineContract, reading: Iterable[Finding]) -> list[Finding]:
    """Everything that is wrong with a contract that was read from a directory and sent.

    Args:
        contract: The contract as read.
        reading: What `read` found that the wire form cannot carry.

    Returns:
        Findings of the reading, then those of the contract, each once. Where the reading says why a field could not
        be carried, that the field is absent from the wire form is left out.
    """
    out = list(dict.fromkeys(reading))
    explained = tuple(finding.path for finding in out if finding.path)
    if len(explained) < len(out) and contract == contract_pb2.EngineContract():
        return out  # the document could not be read: that nothing of it arrived says nothing more
    for finding in check(contract):
        if finding.found == "absent" and any(_covers(path, finding.path) for path in explained):
            continue
        if finding not in out:
            out.append(finding)
    return out


def violations(findings: Sequence[Finding]) -> list[Violation]:
    """Findings as the fields at fault of an error."""
    return [Violation(finding.path, f"{finding.found}, expected {finding.expected}") for finding in findings]


def _covers(path: str, field: str) -> bool:
    return field == path or field.startswith((f"{path}.", f"{path}["))
