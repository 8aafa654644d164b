# SPDX-License-Identifier: Apache-2.0
"""What follows from the evidence about an engine.

The newest document of each kind counts. One that fails closes the way; where nothing fails and a kind that is asked for
is missing, nothing is decided; otherwise the way is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from services.common.errors import InvalidArgumentError, Violation
from services.common.evidence import FAILS, Evidence, Flawed, read_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEEP: Final = "keep"
CLOSE: Final = "close"
OPEN: Final = "open"
KINDS: Final = ("audit", "comparison", "guided-probe", "ladder")
"""What a verdict rests on, where nothing else is asked for."""
_COMMANDS: Final = {
    "audit": "ifab engine audit SOURCE {engine}",
    "comparison": "ifab engine compare REFERENCE {engine}",
    "guided-probe": "ifab engine probe-guided {engine}",
    "ladder": "ifab engine ladder {engine}",
    "sweep": "ifab engine sweep {engine}",
}


@dataclass(frozen=True, slots=True)
class Ground:
    """One thing that the verdict rests on."""

    kind: str
    subject: str
    statement: str
    command: str
    """What repeats it, or finds it out."""
    against: bool
    """Whether it speaks against the engine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict and its grounds."""

    outcome: str
    """KEEP, CLOSE or OPEN."""
    engine_digest: str
    counted: tuple[Evidence, ...]
    """The documents that count, in order of kind."""
    grounds: tuple[Ground, ...]
    missing: tuple[str, ...]
    """Kinds that were asked for and are not there."""
    flawed: tuple[Flawed, ...]
    """Documents that do not count, since they are damaged."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.outcome == CLOSE:
            kinds = ", ".join(each.kind for each in self.counted if each.outcome == FAILS)
            return f"close: the {kinds} speaks against this engine"
        if self.outcome == OPEN:
            return f"open: nothing speaks against this engine, and there is no {' and no '.join(self.missing)} of it"
        return f"keep: nothing speaks against this engine, by its {', '.join(each.kind for each in self.counted)}"


def judge(engine: Path, engine_digest: str, *, required: Sequence[str] = KINDS) -> Verdict:
    """Reads what lies beside an engine directory and judges.

    Args:
        engine: The engine directory.
        engine_digest: Its digest; evidence about others does not count.
        required: Kinds without which nothing is decided; at least one.

    Raises:
        InvalidArgumentError: No kind is required, or one that nothing makes.
        FailedPreconditionError: The evidence cannot be read.
    """
    unknown = [kind for kind in required if kind not in _COMMANDS]
    if unknown or not required:
        found = ", ".join(map(repr, unknown)) or "empty"
        raise InvalidArgumentError.of(
            [Violation("required", f"is {found}; expected at least one of {', '.join(_COMMANDS)}")]
        )
    documents, flawed = read_all(engine, engine_digest)
    newest = {document.kind: document for document in documents if document.kind != "verdict"}
    missing = tuple(kind for kind in required if kind not in newest)
    order = {kind: number for number, kind in enumerate((*KINDS, "sweep"))}
    counted = tuple(sorted(newest.values(), key=lambda each: (order.get(each.kind, len(order)), each.kind)))
    grounds: list[Ground] = []
    for document in counted:
        against = document.outcome == FAILS
        grounds.append(
            Ground(document.kind, document.engine_id, document.summary, document.produced_by.command, against)
        )
        grounds += [
            Ground(document.kind, finding.subject, finding.statement, finding.command, against)
            for finding in document.findings
        ]
    for kind in missing:
        command = _COMMANDS[kind].format(engine=engine)
        grounds.append(Ground(kind, "-", "it was not made", command, against=False))
    failing = any(document.outcome == FAILS for document in counted)
    outcome = CLOSE if failing else OPEN if missing else KEEP
    return Verdict(outcome, engine_digest, counted, tuple(grounds), missing, tuple(flawed))
