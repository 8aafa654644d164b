# SPDX-License-Identifier: Apache-2.0
"""A channel whose certificate or token may change while it is used.

Calls that run go on where they are, new ones take a connection with the new credentials, and the old one is closed when
its last call has ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.common.security.certificates import Bundle


class FollowingChannel(grpc.aio.Channel):
    """A channel that outlives its credentials.

    Args:
        shown: Returns what to show now, the very same object as long as it is the same; None is "nothing".
        make: Makes a channel that shows it for good.
        metadata: Returns what each call carries beside its caller's own metadata.
    """

    def __init__(
        self,
        shown: Callable[[], Bundle | None],
        make: Callable[[Bundle | None], grpc.aio.Channel],
        metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        self._shown = shown
        self._make = make
        self._metadata = metadata
        self._connection = _Connection(shown(), make)
        self._retired: set[_Connection] = set()

    async def __aenter__(self) -> FollowingChannel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes every connection; calls that run get `grace` seconds."""
        await asyncio.gather(*(each.channel.close(grace) for each in (self._connection, *self._retired)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the newest connection."""
        return self.current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the newest connection leaves a state."""
        await self.current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the newest connection stands."""
        await self.current().channel.channel_ready()

    def unary_unary(self, *what: Any, **options: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "unary_unary", what, options)

    def unary_stream(self, *what: Any, **options: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "unary_stream", what, options)

    def stream_unary(self, *what: Any, **options: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "stream_unary", what, options)

    def stream_stream(self, *what: Any, **options: Any) -> Any:
        """See grpc.aio."""
        return _Method(self, "stream_stream", what, options)

    def current(self) -> _Connection:
        """Returns the connection for a new call, a fresh one where what is shown has changed."""
        bundle = self._shown()
        if bundle is not self._connection.bundle:
            self._retired = {each for each in self._retired if not each.closed}
            self._retired.add(self._connection)
            self._connection.retire()
            self._connection = _Connection(bundle, self._make)
        return self._connection

    def carried(self) -> Sequence[tuple[str, str]]:
        """Returns what a call carries that is made now."""
        return self._metadata()


class _Connection:
    """A channel that shows one thing, and the calls on it."""

    def __init__(self, bundle: Bundle | None, make: Callable[[Bundle | None], grpc.aio.Channel]) -> None:
        self.bundle = bundle
        self.channel = make(bundle)
        self.closed = False
        self._methods: dict[_Method, Any] = {}
        self._calls = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None

    def call(self, method: _Method, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Makes a call and counts it until its end."""
        made = self._methods.get(method)
        if made is None:
            made = self._methods[method] = method.of(self.channel)
        call = made(*arguments, **options)
        self._calls += 1
        call.add_done_callback(self._ended)
        return call

    def retire(self) -> None:
        """Takes no further call; closes with the last one."""
        self._retired = True
        self._close_if_idle()

    def _ended(self, _call: Any) -> None:
        self._calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retired and not self._calls and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        await self.channel.close()
        self.closed = True


class _Method:
    """One method of a stub, whichever connection carries its next call."""

    def __init__(self, channel: FollowingChannel, kind: str, what: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._what = what
        self._options = options

    def of(self, channel: grpc.aio.Channel) -> Any:
        """Makes the method of one channel."""
        return getattr(channel, self._kind)(*self._what, **self._options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        carried = self._channel.carried()
        if carried:
            options["metadata"] = (*(options.get("metadata") or ()), *carried)
        return self._channel.current().call(self, arguments, options)
