# SPDX-License-Identifier: Apache-2.0
"""The entry point of `ifab`, which answers Ctrl-C before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Entry point of the `ifab` program."""
    # Importing takes most of a second. Ctrl-C meanwhile leaves at once: as an exception it would surface anywhere in
    # the imports of others, some of which swallow it. Where SIGINT is ignored (`nohup`, `&` in scripts), it stays so.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    from services.cli.app import app

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="ifab")
    except KeyboardInterrupt:  # while the commands are put together, which nothing guards
        sys.exit(_INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
