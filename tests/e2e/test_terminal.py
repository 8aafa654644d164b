# SPDX-License-Identifier: Apache-2.0
"""What a person at a terminal sees, a real one: a job's bar is drawn once, however the job ends."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

from engines.simulated import write_simulated_engine
from tests.support.processes import ROOT, environment
from tests.support.suite import IFAB, STOP_WITHIN_S, all_gone, children_of
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, HEIGHT = 100, 30
CONTROL = re.compile(r"\x1b\[(\??)(\d*)((?:;\d+)*)([A-Za-z])")
CONTROL_BEGUN = re.compile(r"\x1b(\[\??[\d;]*)?")


class Screen:
    """As much of a terminal as the bar uses: lines, wrapping, a cursor that moves up, lines that are erased."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0
        self._begun = ""

    def write(self, text: str) -> None:
        text, at = self._begun + text, 0
        self._begun = ""
        while at < len(text):
            control = CONTROL.match(text, at)
            if control is not None:
                self._obey(control[4], int(control[2] or 1))
                at = control.end()
                continue
            if CONTROL_BEGUN.fullmatch(text, at):
                self._begun = text[at:]  # the rest of it comes with the next part
                return
            self._put(text[at])
            at += 1

    def _obey(self, verb: str, number: int) -> None:
        if verb == "A":
            self._row = max(0, self._row - number)
        elif verb == "K":
            self.lines[self._row] = ""

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._down()
        else:
            if self._column == WIDTH:
                self._column = 0
                self._down()
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine that takes its time, so that a bar is there to be seen."""
    write_simulated_engine(tmp_path / "engine", time_mode="real", generated_token_ns=20_000_000)
    return tmp_path / "engine"


@pytest.mark.parametrize("times", [1, 2])
def test_a_bar_is_drawn_once_when_control_c_ends_the_job(engine: Path, tmp_path: Path, times: int) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"Row {n}", "max_tokens": 200}) for n in range(500)))
    words = ("bulk", "run", str(rows), "-o", str(tmp_path / "out.jsonl"), "--up", "--engine", str(engine))
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    command = subprocess.Popen(
        ["setsid", "--ctty", *IFAB, *words, "--logs", str(tmp_path), "--fresh"],
        cwd=ROOT, env=environment({"TERM": "xterm"}), stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    services: set[int] = set()
    try:
        screen, shown = Screen(), ""
        letters = codecs.getincrementaldecoder("utf-8")("replace")
        deadline = time.monotonic() + 2 * PATIENCE_S
        pressed = 0
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    part = letters.decode(os.read(master, 65536))
                except OSError:
                    break  # the last of its ends is closed
                shown += part
                screen.write(part)
            if pressed < times and re.search(r"\d+/500", shown[-4000:]):
                services = services or {child.pid for child in children_of(command.pid)}
                os.write(master, b"\x03")
                pressed += 1
        assert command.wait(STOP_WITHIN_S) == 128 + signal.SIGINT, shown
        bars = [line for line in screen.lines if re.search(r"\d+/500", line)]
        assert len(bars) == 1, "\n".join(screen.lines)
        whole = "".join(screen.lines)  # a line of the terminal ends where it will
        assert whole.count("is kept; the same command, without --fresh, goes on") == 1, whole
        all_gone(services)
    finally:
        if command.poll() is None:
            command.kill()
            command.wait()
        os.close(master)
