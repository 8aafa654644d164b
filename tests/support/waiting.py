# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 40.0
"""How long a condition is waited for that holds after a moment: a wait that ends with it costs nothing by its length,
and the machine may have much else to do."""
_POLL_S = 0.01


async def wait_until(condition: Callable[[], Any], *, within_s: float = PATIENCE_S, what: str = "") -> Any:
    """Returns the first true value of `condition`, which may be a coroutine function.

    Raises:
        AssertionError: It was not true within `within_s`; says `what` was waited for and the last value.
    """
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_message(what, within_s, value))
        await asyncio.sleep(_POLL_S)


def block_until(
    condition: Callable[[], Any], *, within_s: float = PATIENCE_S, what: str = "", every_s: float = _POLL_S
) -> Any:
    """As `wait_until`, for tests without an event loop; `every_s` spares what is costly to ask."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_message(what, within_s, value))
        time.sleep(every_s)
    return value


def _message(what: str, within_s: float, value: Any) -> str:
    return f"not within {within_s} s: {what or 'the condition'} (last value {value!r})"
