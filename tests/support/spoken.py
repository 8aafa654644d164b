# SPDX-License-Identifier: Apache-2.0
"""What a command says on stderr while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess


def until(process: subprocess.Popen[str], said: str) -> str:
    """Reads what a command says on stderr up to a line with these words, which it returns.

    Raises:
        AssertionError: The command ended without them.
    """
    assert process.stderr is not None
    before = []
    for line in process.stderr:
        if said in line:
            return line
        before.append(line)
    raise AssertionError(f"never said {said!r}: {before}")
