# SPDX-License-Identifier: Apache-2.0
"""Who calls: what a token or a certificate says, for as long as the call runs."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

ANY_TENANT = "any-tenant"
"""Scope of callers that speak for every tenant."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller whose credential was verified."""

    name: str
    """For logs: the token's subject or key id, or the certificate's name; never the credential itself."""
    tenant: str = ""
    """Whom it speaks for; empty with `ANY_TENANT` where a request may name anybody."""
    scopes: frozenset[str] = frozenset()
    """What it may do."""
    roles: frozenset[str] = frozenset()
    """What its certificate says it is."""

    @property
    def any_tenant(self) -> bool:
        """Whether it may name any tenant."""
        return ANY_TENANT in self.scopes


_current: ContextVar[Caller | None] = ContextVar("ifab_caller", default=None)


def current_caller() -> Caller | None:
    """Returns who made the call that runs now; None where the server authenticates nobody."""
    return _current.get()


def set_caller(caller: Caller | None) -> None:
    """Says who made the call that runs now. The server's interceptor does, once for each call's own context."""
    _current.set(caller)
