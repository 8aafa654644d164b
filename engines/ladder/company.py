# SPDX-License-Identifier: Apache-2.0
"""Clients of another engine on the same machine, busy for as long as a ladder is climbed beside them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.common.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from engines.targets.target import Target

PAUSE_S = 0.2
"""Time that a client which met an error waits, so that a server that refuses is not stormed."""


@dataclass(frozen=True, slots=True)
class Done:
    """What the clients got, over some time."""

    clients: int
    finished: int = 0
    """Requests that ended well."""
    tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """Requests that ended with an error, by its reason."""

    def since(self, before: Done) -> Done:
        """What came after an earlier moment."""
        errors = Counter(self.errors)
        errors.subtract(before.errors)
        return Done(self.clients, self.finished - before.finished, self.tokens - before.tokens, dict(+errors))

    @property
    def failed(self) -> int:
        """Requests that ended with an error."""
        return sum(self.errors.values())


class Company:
    """A closed loop that runs inside its block: each client sends its next request when the last one has ended.

    Args:
        target: The other engine.
        prompts: Taken in turn; not empty.
        clients: How many; at least 1.
        max_tokens: Tokens a request.
    """

    def __init__(self, target: Target, prompts: Sequence[str], *, clients: int, max_tokens: int) -> None:
        self._target = target
        self._prompts = itertools.cycle(prompts)
        self._clients = clients
        self._max_tokens = max_tokens
        self._finished = self._tokens = 0
        self._errors: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Company:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def done(self) -> Done:
        """What the clients got so far."""
        return Done(self._clients, self._finished, self._tokens, dict(self._errors))

    async def _client(self) -> None:
        while True:
            try:
                await self._target.ask(next(self._prompts), self._max_tokens, self._count)
            except FabricError as error:
                self._errors[error.reason] += 1
                await asyncio.sleep(PAUSE_S)
            else:
                self._finished += 1

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
