# SPDX-License-Identifier: Apache-2.0
"""Streams of changes: every watcher gets a snapshot, then what changed, and has a bound of its own.

Changes of one node that wait for a watcher are folded into the newest. A watcher that lets changes of more nodes pile
up than its bound is ended, and starts over with a snapshot; the others never notice.

A provisioner that has just started knows nothing yet, and an empty snapshot would make every broker drop every worker.
So the first snapshots wait until the workers have had the time to register again.

A watcher whose connection broke goes on where it was: it brings the token of the last message that it took, and gets
what has changed since, as long as this is the same process and the nodes that went away meanwhile are still remembered.
Else it gets a snapshot.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common import reasons
from services.common.errors import ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from services.provisioner.registry import Node

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class News:
    """One message to a watcher."""

    revision: int
    """Number of changes of this process that it and the messages before it account for."""
    snapshot: bool
    """Whether `nodes` is everything."""
    nodes: tuple[Node, ...]
    gone: tuple[str, ...] = ()
    resume_token: str = ""
    """Brings a watcher back to behind this message."""


class _Backlog:
    """Changes that wait for one watcher."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pending: dict[str, Node | None] = {}
        self._wake = asyncio.Event()
        self.overrun = False

    def reset(self) -> None:
        """Forgets what waits: a snapshot is about to say it all."""
        self._pending.clear()
        self._wake.clear()
        self.overrun = False

    def wake(self) -> None:
        """Has `take` return, even with nothing."""
        self._wake.set()

    def put(self, node_id: str, node: Node | None) -> None:
        if not self.overrun and node_id not in self._pending and len(self._pending) >= self._most:
            self.overrun = True
            self._pending.clear()
        if not self.overrun:
            self._pending[node_id] = node
        self._wake.set()

    async def take(self) -> dict[str, Node | None]:
        await self._wake.wait()
        self._wake.clear()
        taken, self._pending = self._pending, {}
        return taken


class Watchers:
    """All open WatchNodes streams."""

    def __init__(self, everything: Callable[[], list[Node]], *, watchers_max: int, backlog_max: int) -> None:
        """Starts without watchers, and holds snapshots back until `open`.

        Args:
            everything: Returns all nodes, in order.
            watchers_max: Most streams at a time.
            backlog_max: Most changed nodes that wait for one of them.
        """
        self._everything = everything
        self._watchers_max = watchers_max
        self._backlog_max = backlog_max
        self._backlogs: set[_Backlog] = set()
        self._opened = asyncio.Event()
        self._closed = False
        self._revision = 0
        self._process = secrets.token_hex(8)
        self._changed_at: dict[str, int] = {}
        self._gone_at: dict[str, int] = {}
        self._forgotten = 0

    def open(self) -> None:
        """Lets snapshots out: what can be known by now is known."""
        self._opened.set()

    def close(self) -> None:
        """Ends all streams: the provisioner goes away, and watchers do better to look for another."""
        self._closed = True
        self._opened.set()
        for backlog in self._backlogs:
            backlog.wake()

    def publish(self, node_id: str, node: Node | None) -> None:
        """Tells every watcher of a change; None means gone."""
        self._revision += 1
        self._remember(node_id, gone=node is None)
        for backlog in self._backlogs:
            backlog.put(node_id, node)

    async def watch(self, resume_token: str = "") -> AsyncGenerator[News, None]:
        """Yields a snapshot and then every change, without end.

        Args:
            resume_token: Of the last message that this watcher took from an earlier stream: then what has changed
                since comes in place of the snapshot, if it is still known.

        Raises:
            ResourceExhaustedError: There are `watchers_max` streams already, or this one fell too far behind.
            UnavailableError: `close` was called.
        """
        with self._backlog() as backlog:
            await self._opened.wait()
            backlog.reset()
            self._refuse_closed()
            yield self._first(resume_token)
            while True:
                changed = await backlog.take()
                self._refuse_closed()
                if backlog.overrun:
                    raise ResourceExhaustedError(
                        f"changes of more than {self._backlog_max} nodes wait for this watcher; call again for a "
                        f"snapshot",
                        reason=reasons.WATCHER_SLOW,
                        retry_after_s=_RETRY_AFTER_S,
                    )
                yield News(
                    self._revision,
                    snapshot=False,
                    nodes=tuple(node for node in changed.values() if node is not None),
                    gone=tuple(node_id for node_id, node in changed.items() if node is None),
                    resume_token=self._token(),
                )

    def _remember(self, node_id: str, *, gone: bool) -> None:
        """Notes the newest change of a node; of those that are gone only the last `backlog_max` are kept."""
        self._changed_at.pop(node_id, None)
        self._gone_at.pop(node_id, None)
        (self._gone_at if gone else self._changed_at)[node_id] = self._revision
        while len(self._gone_at) > self._backlog_max:
            oldest = next(iter(self._gone_at))
            self._forgotten = self._gone_at.pop(oldest)

    def _token(self) -> str:
        return f"{self._process}:{self._revision}"

    def _first(self, resume_token: str) -> News:
        """The first message of a stream: what has changed since, or everything."""
        process, _, text = resume_token.partition(":")
        since = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if process != self._process or not self._forgotten <= since <= self._revision:
            return News(self._revision, snapshot=True, nodes=tuple(self._everything()), resume_token=self._token())
        return News(
            self._revision,
            snapshot=False,
            nodes=tuple(node for node in self._everything() if self._changed_at.get(node.node_id, 0) > since),
            gone=tuple(node_id for node_id, revision in self._gone_at.items() if revision > since),
            resume_token=self._token(),
        )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UnavailableError(
                "the provisioner is going away", reason=reasons.DRAINING, retry_after_s=_RETRY_AFTER_S
            )

    @contextmanager
    def _backlog(self) -> Iterator[_Backlog]:
        if len(self._backlogs) >= self._watchers_max:
            raise ResourceExhaustedError(
                f"{self._watchers_max} watchers are connected, which is the most that watchers_max allows",
                reason=reasons.WATCHERS_FULL,
                retry_after_s=_RETRY_AFTER_S,
            )
        backlog = _Backlog(self._backlog_max)
        self._backlogs.add(backlog)
        try:
            yield backlog
        finally:
            self._backlogs.discard(backlog)
