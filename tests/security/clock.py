# SPDX-License-Identifier: Apache-2.0
"""Time that a test moves."""

from __future__ import annotations


class Clock:
    """A monotonic clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
