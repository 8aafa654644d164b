# SPDX-License-Identifier: Apache-2.0
"""What a call is sent, before its handler sees it: messages that parse, on the caller's tenant, within its quota.

gRPC would answer bytes that do not parse with UNKNOWN and the name of a Python class. So messages are parsed here, and
what cannot be is a violation like any other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from services.common.errors import DeadlineExceededError, InvalidArgumentError, Violation
from services.common.security.tenants import impose, request_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from services.common.security import Caller
    from services.common.security.quotas import Quotas


class Unparsed:
    """A message that could not be parsed."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


def tolerant(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Returns a parser that gives `Unparsed` where `parse` raises; None where messages stay bytes."""
    if parse is None:
        return None

    def attempt(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception:  # whatever a parser raises, the bytes are the caller's
            return Unparsed(len(data))

    return attempt


async def only(messages: AsyncIterator[Any], within_s: float) -> Any:
    """Returns the message of a single call, once its caller may bring one.

    Args:
        messages: What the call brings.
        within_s: How long it may take to come whole, in seconds.

    Raises:
        InvalidArgumentError: there is none.
        DeadlineExceededError: it takes longer.
    """
    try:
        async with asyncio.timeout(within_s):
            return await anext(messages)
    except TimeoutError as error:
        raise DeadlineExceededError(f"the request did not come whole within {within_s:g} s") from error
    except StopAsyncIteration as error:
        raise InvalidArgumentError.of([Violation("request", "is absent")]) from error


def checked(message: Any) -> Any:
    """Returns a message that was parsed.

    Raises:
        InvalidArgumentError: it could not be.
    """
    if isinstance(message, Unparsed):
        raise InvalidArgumentError.of(
            [Violation("request", f"is {message.size} bytes that are no message of this method")]
        )
    return message


def owned(message: Any, caller: Caller) -> Any:
    """Returns a single call's message, on the caller's tenant.

    Raises:
        InvalidArgumentError: it could not be parsed.
        PermissionDeniedError: it names another tenant.
    """
    impose(checked(message), caller)
    return message


class Incoming:
    """The messages of a stream.

    Args:
        messages: As they come.
        caller: Who sends them; None where nobody is known.
        quotas: What tenants take; the stream is slowed down to it. None is "no limit".
        check_standing: Looks again at the caller, with each message: a stream may outlive a key.

    Raises (on iteration):
        InvalidArgumentError: a message could not be parsed.
        UnauthenticatedError: the caller's key was withdrawn.
        PermissionDeniedError: it names another tenant than the caller's.
    """

    def __init__(
        self,
        messages: AsyncIterator[Any],
        caller: Caller | None = None,
        quotas: Quotas | None = None,
        check_standing: Callable[[Caller], None] | None = None,
    ) -> None:
        self._messages = messages
        self._caller = caller
        self._quotas = quotas
        self._check_standing = check_standing
        self._first = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = checked(await anext(self._messages))
        if self._caller is not None:
            if self._check_standing is not None:
                self._check_standing(self._caller)
            impose(message, self._caller, first=self._first)
            self._first = False
            if self._quotas is not None:
                await self._quotas.pace(self._caller.tenant, request_count(message))
        return message
