# SPDX-License-Identifier: Apache-2.0
"""Whether a call may go on: who makes it, and whether the method is theirs.

Three kinds of server:

* With tokens, callers say who they are by a token; what the table asks of a method are scopes.
* With TLS and no tokens, they do so by their certificate, which the handshake has verified; what is asked are roles.
* With neither, nobody is known. The server listens on loopback, or a setting says in as many words that it does not
  (`exposure`); what is for operators is then closed, since behind a proxy beside it everybody is of the same machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.common import reasons
from services.common.errors import PermissionDeniedError, UnauthenticatedError
from services.common.security.caller import ANY_TENANT, Caller
from services.common.security.certificates import REALM
from services.common.security.exposure import is_local_peer
from services.common.security.needs import GENERATE, JOBS, OPERATE, OPERATOR, ROLES, need_of
from services.common.security.quotas import Quotas
from services.common.security.tokens import bearer

if TYPE_CHECKING:
    import grpc

    from services.common.security.needs import Need
    from services.common.security.tokens import TokenVerifier

    Context = grpc.aio.ServicerContext[Any, Any]

_CERTIFIED_SCOPES = frozenset({GENERATE, JOBS, ANY_TENANT})
"""What a certificate of ours stands for towards a broker: a service of the house, which names tenants itself."""
_NAMES = ("x509_subject_alternative_name", "peer_dns")


class Access:
    """The rule of one server.

    Args:
        tokens: Verifies tokens, where clients come with one.
        certified: Whether the handshake verifies certificates of clients.
        exposed: Whether other machines reach the server.
    """

    def __init__(self, tokens: TokenVerifier | None, *, certified: bool, exposed: bool = False) -> None:
        self._tokens = tokens
        self._certified = certified
        self._exposed = exposed
        self.quotas = None if tokens is None else Quotas(tokens.quota)
        """What tenants take; None where there are none to tell apart."""
        self.check_standing = None if tokens is None else tokens.check_standing
        """Looks again at who makes a call that has run for a while; None where it is settled once."""

    def admit(self, method: str, context: Context) -> Caller | None:
        """Returns who calls; None where nobody is asked, or nobody can be.

        Args:
            method: Full name, `package.Service/Method`.
            context: The call.

        Raises:
            UnauthenticatedError: the call carries no credential that can be verified.
            PermissionDeniedError: the caller may not call the method.
        """
        need = need_of(method)
        if need.anybody:
            return None
        if self._tokens is not None:
            metadata = dict(context.invocation_metadata() or ())
            caller = self._tokens.verify(bearer(metadata.get("authorization")))
            if not need.scopes & caller.scopes:
                raise PermissionDeniedError(
                    f"the method asks for one of the scopes {_listed(need.scopes)}",
                    reason=reasons.SCOPE_MISSING,
                    metadata={"scopes": _listed(need.scopes)},
                )
            return caller
        if self._certified:
            return _by_certificate(need, context)
        if need.operators and (self._exposed or not is_local_peer(context.peer())):
            raise PermissionDeniedError(
                "a server that authenticates nobody serves this method on loopback only", reason=reasons.LOCAL_ONLY
            )
        return None


def _by_certificate(need: Need, context: Context) -> Caller:
    auth = context.auth_context()
    names = {value.decode("utf-8", "replace") for key in _NAMES for value in auth.get(key, ())}
    roles = frozenset(name.removesuffix(REALM) for name in names if name.endswith(REALM)) & ROLES
    if not roles:
        raise UnauthenticatedError(f"the certificate names no role: none of its DNS names is <role>{REALM}")
    if not need.roles & roles:
        raise PermissionDeniedError(
            f"the method asks for one of the roles {_listed(need.roles)}",
            reason=reasons.ROLE_MISSING,
            metadata={"roles": _listed(need.roles)},
        )
    scopes = _CERTIFIED_SCOPES | {OPERATE} if OPERATOR in roles else _CERTIFIED_SCOPES
    return Caller(f"certificate:{'+'.join(sorted(roles))}", "", frozenset(scopes), roles)


def _listed(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))
