# SPDX-License-Identifier: Apache-2.0
"""What a sweep measured already, so that one that was ended goes on where it was."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from engines.sweep.settings import Setting
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Journal:
    """One line of JSON a setting, in a file that only grows.

    Args:
        path: The file; None keeps nothing.
        work: What the figures depend on beside the settings: engine, workload, machine. Lines of other work are kept
            and not used.

    Raises (on construction):
        FailedPreconditionError: The file cannot be read or is none of these.
    """

    def __init__(self, path: Path | None, work: str) -> None:
        self._path = path
        self._work = work
        self._known: dict[Setting, tuple[float, ...]] = {}
        if path is not None and path.exists():
            self._read(path)

    def get(self, setting: Setting) -> tuple[float, ...] | None:
        """What was measured of a setting; empty where the engine cannot be set so; None where it was not tried."""
        return self._known.get(setting)

    def add(self, setting: Setting, values: Sequence[float]) -> None:
        """Keeps what was measured."""
        self._known[setting] = tuple(values)
        if self._path is not None:
            line = {"work": self._work, "setting": dataclasses.asdict(setting), "values": list(values)}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _read(self, path: Path) -> None:
        *whole, last = path.read_text().split("\n")
        for number, text in enumerate(whole, start=1):
            try:
                line = json.loads(text)
                setting, values = Setting(**line["setting"]), tuple(float(value) for value in line["values"])
                mine = line["work"] == self._work
            except (ValueError, TypeError, KeyError) as error:
                raise FailedPreconditionError(f"{path}, line {number}, is none that a sweep wrote: {error}") from error
            if mine:
                self._known[setting] = values
        if last:
            # A sweep that was killed while it wrote left half a line: it ends here, so that the next one stands alone.
            path.write_text("".join(f"{text}\n" for text in whole))
