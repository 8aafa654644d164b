# SPDX-License-Identifier: Apache-2.0
"""Progress of a job on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LINE_EVERY_S = 5.0


@contextmanager
def shown(total: int) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that is told how many rows are done and how many of them failed."""
    if sys.stderr.isatty():
        with _bar(total) as tell:
            yield tell
    else:
        yield _lines(total)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        task = progress.add_task("", total=total, note="")

        def tell(done: int, failed: int) -> None:
            progress.update(task, completed=done, note=f"{failed} failed" if failed else "")

        yield tell


def _lines(total: int) -> Callable[[int, int], None]:
    started = last = time.monotonic()

    def tell(done: int, failed: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= _LINE_EVERY_S:
            last = now
            sys.stderr.write(f"{done} of {total} rows after {now - started:.0f} s, {failed} failed\n")
            sys.stderr.flush()

    return tell
