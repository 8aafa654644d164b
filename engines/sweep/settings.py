# SPDX-License-Identifier: Apache-2.0
"""What of an engine can be set without building its weights anew, and the values that are tried.

The levers have the same names whatever runs the engine: `budget` (tokens a step), `slots` (sequences at a time),
`chunk` (whether prompts are computed over several steps), `block` (tokens a cache block), `heads` (shared leading parts
of prompts that are kept). An engine has those that its own configuration has.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from services.common.contract import CONTRACT_FILE, Contract, all_findings, read
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from pathlib import Path

LEVERS: Final = ("budget", "slots", "chunk", "block", "heads")
"""In the order in which they are tried."""
SIMULATED: Final = "simulated.json"
LLAMA: Final = "llama.json"
_STEPS: Final = 3
"""A number is tried at its value times 2^-3 to 2^3."""
_BLOCK_LEAST: Final = 4
_HEADS_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """Values of all levers; None for a lever that the engine does not have."""

    budget: int
    slots: int
    chunk: bool | None = None
    block: int | None = None
    heads: int | None = None

    def with_(self, lever: str, value: int) -> Setting:
        """The same with another value of one lever."""
        changed: dict[str, Any] = {lever: bool(value) if lever == "chunk" else value}
        return dataclasses.replace(self, **changed)

    def value(self, lever: str) -> int | None:
        """The value of a lever; a truth as 0 or 1."""
        value = getattr(self, lever)
        return None if value is None else int(value)

    def text(self) -> str:
        """For people: `budget 512, slots 16`."""
        return ", ".join(f"{lever} {self.value(lever)}" for lever in LEVERS if self.value(lever) is not None)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine directory whose settings can be swept."""

    directory: Path
    contract: Contract
    configuration: str
    """Name of the file that configures the runtime; empty where the contract alone does."""
    document: dict[str, Any]
    """That file."""
    setting: Setting


def open_engine(directory: Path) -> Engine:
    """Reads what an engine is set to.

    Raises:
        NotFoundError: There is no contract.
        FailedPreconditionError: The contract has findings.
    """
    proto, reading = read(directory)
    if findings := all_findings(proto, reading):
        raise FailedPreconditionError(f"{directory / CONTRACT_FILE}: " + "; ".join(map(str, findings)))
    contract = Contract.from_proto(proto)
    name = next((each for each in (SIMULATED, LLAMA) if (directory / each).is_file()), "")
    document: dict[str, Any] = json.loads((directory / name).read_bytes()) if name else {}
    limits = contract.limits
    setting = Setting(limits.step_token_budget, limits.slots)
    if name == SIMULATED:
        setting = dataclasses.replace(setting, chunk=document["splits_prompts"], block=limits.kv_block_tokens)
    elif name == LLAMA:
        setting = dataclasses.replace(setting, heads=document["resident_heads"])
    return Engine(directory, contract, name, document, setting)


def grid(engine: Engine, lever: str, at: Setting) -> list[int]:
    """The values that are tried for a lever, in order; those of the engine and of `at` are among them."""
    own, now = engine.setting.value(lever), at.value(lever)
    if own is None or now is None:
        return []
    if lever == "chunk":
        return [0, 1]
    values = (
        {own, now} | {own * 2**step for step in range(1, _STEPS + 1)} | {own >> step for step in range(1, _STEPS + 1)}
    )
    if lever == "heads":
        return sorted({value for value in values | {0, 1} if value <= _HEADS_MOST})
    least = _BLOCK_LEAST if lever == "block" else 1
    if lever == "budget":
        least = at.slots if engine.configuration != LLAMA else at.slots + 64
    most = engine.contract.limits.built_step_token_budget if lever == "budget" and not engine.configuration else None
    return sorted({value for value in values if value >= least and (most is None or value <= most)} | {now})
