# SPDX-License-Identifier: Apache-2.0
"""Engine contracts: the document in an engine directory, its wire form, and its values.

    values      `Contract`: the values of a contract without findings, as frozen dataclasses
    wire        exact mapping between the document and `ifabric.engine.v1.EngineContract`
    directory   reading the contract of an engine directory, with everything that is wrong there
    findings    what is wrong with a contract in its wire form, and putting findings together

A contract travels with its flaws: a worker reads what the document says, however wrong, and sends it with what the
typed form cannot carry as findings; whoever judges the contract puts both together.
"""

from __future__ import annotations

from services.common.contract.directory import CONTRACT_FILE, engine_digest, read
from services.common.contract.findings import all_findings, check, violations
from services.common.contract.values import Contract
from services.common.contract.wire import from_document, to_document, to_json
from services.common.schema import Finding

__all__ = [
    "CONTRACT_FILE",
    "Contract",
    "Finding",
    "all_findings",
    "check",
    "engine_digest",
    "from_document",
    "read",
    "to_document",
    "to_json",
    "violations",
]
