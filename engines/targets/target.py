# SPDX-License-Identifier: Apache-2.0
"""What every server under test can be asked."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Protocol

from services.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable

    OnTokens = Callable[[int], None]

_SPARE_FILES = 128
"""Open files beside those of requests."""


class Target(Protocol):
    """A server that generates text."""

    @property
    def name(self) -> str:
        """What it is and where, for people."""
        ...

    async def ask(self, prompt: str, max_tokens: int, on_tokens: OnTokens) -> None:
        """Has a prompt answered, as far as the server lets it with its end ignored.

        Args:
            prompt: The text.
            max_tokens: Most tokens to generate.
            on_tokens: Called with their number whenever tokens came.

        Raises:
            FabricError: The server refused, failed, or went away; its `reason` is the kind of error.
        """
        ...


def allow_connections(count: int) -> None:
    """Raises the process' limit of open files so that `count` connections fit.

    Raises:
        ResourceExhaustedError: The system does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceExhaustedError(
            f"{count} connections need {needed} open files, and the system allows {hard}: raise it with `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
