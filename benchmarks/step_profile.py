# SPDX-License-Identifier: Apache-2.0
"""What an engine of the embedded runtime calls the runtime with, and how long each class of calls takes.

The engine appends a JSON line to the file that IFAB_LLAMA_PROFILE names whenever its last sequence has ended
(`native/backends/llama/step_profile.h`). A read is one pass over all weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VARIABLE = "IFAB_LLAMA_PROFILE"
_HEAD = ("calls of", "tokens to", "seqs to", "calls", "reads", "copies", "tokens", "a read", "ms a call", "s", "share")


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one class."""

    kind: str
    """prompt, generate, or both."""
    tokens_to: int
    """Power of two that the tokens of a call reach at most."""
    sequences_to: int
    """The same of its sequences."""
    calls: int = 0
    tokens: int = 0
    sequences: int = 0
    reads: int = 0
    copies: int = 0
    """Sequences that were copied before the calls; 0 in classes of calls without."""
    seconds: float = 0.0

    def __add__(self, other: Calls) -> Calls:
        return Calls(
            self.kind,
            max(self.tokens_to, other.tokens_to),
            max(self.sequences_to, other.sequences_to),
            self.calls + other.calls,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.reads + other.reads,
            self.copies + other.copies,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What an engine did between two times of having nothing to do, or over several."""

    steps: int
    steps_s: float
    """Time in steps."""
    between_s: float
    """Time from the end of a step to the beginning of the next, with something in the batcher."""
    fillers: int
    """Rows that were computed and that nobody reads."""
    classes: tuple[Calls, ...]

    def of(self, wanted: Callable[[Calls], bool]) -> Calls:
        """The sum of some classes."""
        return sum((each for each in self.classes if wanted(each)), Calls("", 0, 0))

    @property
    def runtime_s(self) -> float:
        """Time in calls into the runtime."""
        return sum(each.seconds for each in self.classes)

    @property
    def table(self) -> str:
        """A row for each class of calls, and where the rest of the time went."""
        whole = self.steps_s + self.between_s
        rows = [
            (
                each.kind + (", copies" if each.copies else ""),
                f"{each.tokens_to}",
                f"{each.sequences_to}",
                f"{each.calls}",
                f"{each.reads}",
                f"{each.copies}",
                f"{each.tokens}",
                f"{each.tokens / each.reads:.0f}",
                f"{1e3 * each.seconds / each.calls:.2f}",
                f"{each.seconds:.2f}",
                f"{each.seconds / whole:.1%}",
            )
            for each in sorted(self.classes, key=lambda each: -each.seconds)
        ]
        for name, seconds in (
            ("in steps, outside calls", self.steps_s - self.runtime_s),
            ("between steps", self.between_s),
        ):
            mean = f"{1e3 * seconds / self.steps:.2f}"
            rows.append(
                (name, "", "", f"{self.steps}", "", "", "", "", mean, f"{seconds:.2f}", f"{seconds / whole:.1%}")
            )
        lines = [_HEAD, *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


def lines_in(path: Path) -> int:
    """How many lines a file has; 0 where it is not there yet."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def read(path: Path, after: int = 0) -> StepProfile:
    """The sum of the lines of a profile.

    Args:
        path: The file that IFAB_LLAMA_PROFILE named.
        after: Lines at its beginning that do not count.

    Raises:
        ValueError: There is none.
    """
    said = [json.loads(line) for line in path.read_text().splitlines()[after:]] if path.exists() else []
    if not said:
        raise ValueError(f"{path} has no line after {after}: the engine was not idle since, or wrote no profile")
    classes: dict[tuple[str, int, int, bool], Calls] = {}
    for call in (Calls(**each) for line in said for each in line["calls"]):
        key = (call.kind, call.tokens_to, call.sequences_to, call.copies > 0)
        classes[key] = classes[key] + call if key in classes else call
    return StepProfile(
        sum(line["steps"] for line in said),
        sum(line["steps_s"] for line in said),
        sum(line["between_s"] for line in said),
        sum(line["fillers"] for line in said),
        tuple(classes.values()),
    )
