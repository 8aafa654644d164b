# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's own programs: found, asked which flags they know, run within a limit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines.vendor.commands import BUILD, QUANTIZE
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.vendor.commands import Command

RELEASE: Final = "1.2.1"
HELP_LIMIT_S: Final = 300.0
"""The tools import PyTorch and start MPI before they say anything."""
RUN_LIMIT_S: Final = 6 * 3600.0
_QUANTIZE_PLACES: Final = (Path("/app/tensorrt_llm/examples/quantization/quantize.py"),)
"""Where the release image has it."""
_FLAG = re.compile(r"--[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class VendorTools:
    """The two programs."""

    quantize: Path
    build: Path

    @classmethod
    def find(cls, *, quantize: Path | None = None, path: str | None = None) -> VendorTools:
        """Finds them.

        Args:
            quantize: `quantize.py`; where the release image has it if absent.
            path: Folders to look for `trtllm-build` in, as in the variable PATH, which counts if absent.

        Raises:
            NotFoundError: One is not there: the message says where engines are built.
        """
        built = shutil.which(BUILD, path=path)
        script = quantize or next((place for place in _QUANTIZE_PLACES if place.is_file()), None)
        missing = [QUANTIZE] * (script is None or not script.is_file()) + [BUILD] * (built is None)
        if built is None or script is None or missing:
            raise NotFoundError(
                f"engines that generate are built by TensorRT-LLM {RELEASE}, and its {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not on this machine: build in the image of "
                "deploy/images/tensorrt-llm; `ifab engine plan` shows the commands anywhere"
            )
        return cls(script, Path(built))

    def words(self, command: Command) -> list[str]:
        """The command line of this machine."""
        return [*self._program(command.tool), *command.arguments()]

    def check(self, command: Command, *, limit_s: float = HELP_LIMIT_S) -> None:
        """Asks the tool which flags it knows.

        Raises:
            FailedPreconditionError: It cannot be asked, or does not know some of the command's: all are named.
        """
        done = _run([*self._program(command.tool), "--help"], None, limit_s)
        known = set(_FLAG.findall(done))
        if unknown := [flag.name for flag in command.flags if flag.name not in known]:
            raise FailedPreconditionError(
                f"{command.tool} does not know {', '.join(unknown)}: it is of another release than {RELEASE}"
            )

    def run(self, command: Command, log: Path, *, limit_s: float = RUN_LIMIT_S) -> None:
        """Runs a command; what it says goes to the end of `log`.

        Raises:
            FailedPreconditionError: It failed, or did not end in time: its last line is in the message.
        """
        _run(self.words(command), log, limit_s)

    def _program(self, tool: str) -> list[str]:
        return [sys.executable, str(self.quantize)] if tool == QUANTIZE else [str(self.build)]


def _run(words: Sequence[str], log: Path | None, limit_s: float) -> str:
    """Runs a program in a process group of its own, so that its helpers end with it; returns what it said."""
    name = Path(words[1] if words[0] == sys.executable else words[0]).name
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=limit_s)[0].decode("utf-8", "replace")
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise FailedPreconditionError(f"{name} took longer than {limit_s:g} s and was ended") from error
            raise
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {' '.join(words)}\n{said}\n")
    if process.returncode != 0:
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
        where = "" if log is None else f"; all that it said is in {log}"
        raise FailedPreconditionError(f"{name} ended with {how}: {last[:300]}{where}")
    return said
