# SPDX-License-Identifier: Apache-2.0
"""Engine directories, looked at from the outside: is everything there, and what is it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engines.agreement import CONFIGURATION_FILE, disagreements
from services.common import schema
from services.common.contract import CONTRACT_FILE, Contract, all_findings, engine_digest, read
from services.common.errors import FabricError, FailedPreconditionError
from services.common.schema.document import MAX_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from ifabric.engine.v1 import contract_pb2
    from services.common.schema import Finding

INPUTS_FLAG: Final = "inputs"
"""Name of the build flag that holds the digest of everything that an engine was made of."""


@dataclass(frozen=True, slots=True)
class Description:
    """An engine directory that holds what its contract says."""

    directory: Path
    engine_digest: str
    """SHA-256 of `contract.json`."""
    contract: Contract
    size_bytes: int
    """Of all files together."""


def verify(directory: Path) -> list[Finding]:
    """Everything wrong with an engine directory: contract, files by digest, and the configurations that are known here.

    Where each of them is sound, also where the embedded runtime's configuration and the contract are of two engines.

    Raises:
        NotFoundError: There is no such directory, or no contract in it.
        FailedPreconditionError: It cannot be read.
    """
    return _examine(directory)[1]


def describe(directory: Path) -> Description:
    """What an engine directory holds.

    Raises:
        NotFoundError: There is no such directory, or no contract in it.
        FailedPreconditionError: It does not hold what its contract says: all findings are named.
    """
    proto, findings = _examine(directory)
    if findings:
        raise FailedPreconditionError(f"{directory}: " + "; ".join(map(str, findings)))
    contract = Contract.from_proto(proto)
    size = sum(file.size_bytes for file in contract.files)
    return Description(directory, engine_digest(directory), contract, size)


def made_of(directory: Path, inputs: str) -> Contract | None:
    """The contract of an engine directory that is whole and was made of these inputs; None otherwise."""
    try:
        contract = describe(directory).contract
    except FabricError:
        return None
    return contract if f"{INPUTS_FLAG}={inputs}" in contract.build.flags else None


def _examine(directory: Path) -> tuple[contract_pb2.EngineContract, list[Finding]]:
    contract, reading = read(directory)
    findings = all_findings(contract, reading)
    runtime = None
    for name in schema.names():
        configuration = directory / f"{name}.json"
        if configuration.name != CONTRACT_FILE and configuration.is_file():
            with configuration.open("rb") as file:
                document, found = schema.check_text(name, file.read(MAX_BYTES + 1))
            if configuration.name == CONFIGURATION_FILE and not found:
                runtime = document
            findings += [schema.Finding(f"{configuration.name}:{f.path}", f.found, f.expected) for f in found]
    if isinstance(runtime, dict) and not findings:
        findings += disagreements(runtime, Contract.from_proto(contract))
    return contract, findings
