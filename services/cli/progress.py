# SPDX-License-Identifier: Apache-2.0
"""Progress of a job on stderr: a bar on a terminal, plain lines elsewhere, JSON lines for machines.

Every form says the same: rows, errors, tokens a second, the part of prompt tokens that shared prefixes saved so far,
and the time that is left at the pace of the last half minute.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ifabric.broker.v1 import job_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LINE_EVERY_S = 5.0
_EVENT_EVERY_S = 1.0
_BAR_EVERY_S = 0.1
_PACE_S = 30.0
_ECHO_COLUMNS = 4
"""Room behind the bar for what a terminal writes there when Ctrl-C is pressed, twice: `^C^C`. Where it wrapped to the
next line, the bar would be drawn anew below itself."""
_WAITING = "waiting"
_HELD = frozenset({"paused", "stalled", _WAITING})
"""Stages in which nothing moves: said at once."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a job is."""

    stage: str
    """`uploading`, or the state of the job: `running`, `paused`, `stalled` and so on; `waiting` for a broker."""
    rows: int
    """Rows that are durable while uploading, rows that have ended while running."""
    total: int
    failed: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens as sent, of rows that have ended."""
    computed_tokens: int = 0
    """Of these, computed by engines."""
    reason: str = ""
    """Why the job does not go on, where it does not."""

    @property
    def prefix_saving(self) -> float | None:
        """Part of the prompt tokens that no engine computed, 0 to 1; None before there are any."""
        return max(0.0, 1 - self.computed_tokens / self.prompt_tokens) if self.prompt_tokens else None


def reading_of(job: pb.Job, total: int) -> Reading:
    """How far a job is that runs."""
    report = job.report
    return Reading(
        pb.JobState.Name(job.state).removeprefix("JOB_STATE_").lower(),
        job.finished_rows + job.failed_rows,
        total,
        job.failed_rows,
        report.generated_tokens,
        report.prompt_tokens_logical,
        report.prompt_tokens_computed,
        job.state_reason,
    )


class Told:
    """Passes readings on, and tells what stands in the command's way beside the last of them."""

    def __init__(self, tell: Callable[[Reading], None], first: Reading) -> None:
        self._tell = tell
        self._last = first

    def __call__(self, reading: Reading) -> None:
        """Passes a reading on."""
        self._last = reading
        self._tell(reading)

    def hindered(self, why: str) -> None:
        """The broker does not answer, or has no room."""
        self._tell(replace(self._last, stage=_WAITING, reason=why))


class Pace:
    """Readings of the last half minute, and what they say of the speed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._last: deque[tuple[float, Reading]] = deque()

    def take(self, reading: Reading) -> dict[str, Any]:
        """Takes a reading in and returns everything that there is to say, by the names of `--json`."""
        now = self._clock()
        if self._last and self._last[-1][1].stage != reading.stage:
            self._last.clear()
        while len(self._last) > 1 and now - self._last[0][0] > _PACE_S:
            self._last.popleft()
        self._last.append((now, reading))
        then, first = self._last[0]
        span = now - then
        rows_per_s = (reading.rows - first.rows) / span if span > 0 else 0.0
        saving = reading.prefix_saving
        return {
            "event": "progress",
            "stage": reading.stage,
            "rows": reading.rows,
            "total": reading.total,
            "failed": reading.failed,
            "tokens_per_s": round((reading.generated_tokens - first.generated_tokens) / span, 1) if span > 0 else 0.0,
            "prompt_tokens_per_s": round((reading.prompt_tokens - first.prompt_tokens) / span, 1) if span > 0 else 0.0,
            "prefix_saving": None if saving is None else round(saving, 4),
            "eta_s": round((reading.total - reading.rows) / rows_per_s, 1) if rows_per_s > 0 else None,
            "elapsed_s": round(now - self._started, 1),
            "reason": reading.reason,
        }


def line_of(said: dict[str, Any]) -> str:
    """One line for people."""
    head = "uploaded " if said["stage"] == "uploading" else ""
    rows = f"{head}{said['rows']:,} of {said['total']:,} rows"
    parts = [f"{rows} after {said['elapsed_s']:.0f} s, {said['failed']:,} failed"]
    if said["tokens_per_s"]:
        parts.append(f"{said['tokens_per_s']:,.0f} tokens/s")
    if said["prefix_saving"] is not None:
        parts.append(f"{100 * said['prefix_saving']:.0f} % of prompt tokens saved")
    if said["eta_s"]:
        parts.append(f"{_span(said['eta_s'])} left")
    if said["stage"] in _HELD:
        parts.append(said["stage"] + (f": {said['reason']}" if said["reason"] else ""))
    return ", ".join(parts)


@contextmanager
def shown(*, as_json: bool) -> Iterator[Callable[[Reading], None]]:
    """Gives a function that is told how far the job is, as often as one likes."""
    if as_json:
        yield _paced(_EVENT_EVERY_S, lambda said: sys.stderr.write(orjson.dumps(said).decode() + "\n"))
    elif sys.stderr.isatty():
        with _bar() as tell:
            yield tell
    else:
        yield _paced(_LINE_EVERY_S, lambda said: sys.stderr.write(line_of(said) + "\n"))


def _paced(every_s: float, write: Callable[[dict[str, Any]], object]) -> Callable[[Reading], None]:
    pace, last, said = Pace(), time.monotonic(), ("", "", False)

    def tell(reading: Reading) -> None:
        nonlocal last, said
        now, state = time.monotonic(), (reading.stage, reading.reason, reading.rows == reading.total)
        news = state != said and (state[2] or reading.stage in _HELD)
        if news or now - last >= every_s:
            last, said = now, state
            write(pace.take(reading))
            sys.stderr.flush()

    return tell


class _Narrow(Console):
    """A terminal whose last columns stay free."""

    @property
    def options(self) -> ConsoleOptions:
        whole = super().options
        return whole.update(width=max(1, whole.max_width - _ECHO_COLUMNS))


@contextmanager
def _bar() -> Iterator[Callable[[Reading], None]]:
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=_Narrow(stderr=True), transient=False) as progress:
        task = progress.add_task("", total=None, note="")

        def write(said: dict[str, Any]) -> None:
            note = line_of(said).split(" rows ", 1)[1]
            progress.update(task, completed=said["rows"], total=said["total"], note=note)

        yield _paced(_BAR_EVERY_S, write)


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
