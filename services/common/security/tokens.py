# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens of clients: JWTs of an issuer whose public keys lie in a JWKS file, and static keys by digest.

Both files are read again when they change; a change that cannot be used is logged, and what was in force stays so.
A token that was verified is remembered until it ends or the files change, so that a client's thousandth call costs one
digest and not one signature.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jwt

from services.common import logs, reasons
from services.common.errors import FabricError, StartError, UnauthenticatedError
from services.common.security import access_file
from services.common.security.access_file import AccessFile, Quota
from services.common.security.caller import Caller

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that are taken: those of public keys. With a shared secret every broker could issue tokens."""
LEEWAY_S = 30
"""How far apart the clocks of issuer and broker may be."""
TOKEN_CHARACTERS = 8192
"""Longest token; one that is longer is not looked at."""
CHECK_S = 1.0
"""How often the files are looked at, at most."""
_KEPT = 10_000
_FAR_S = 2**40
"""Tokens that end later end then: what a token says may be longer than a number."""
_KEY = "key:"
"""What stands before the id of a static key in its caller's name."""
_CURVES = ("P-256", "P-384", "P-521", "Ed25519", "Ed448")
_TOLD_A_SECOND = 10

_log = logs.get("common.security")


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Where tokens are verified from; at least one file."""

    jwks: Path | None = None
    """Public keys of the issuer, a JSON Web Key Set."""
    issuer: str = ""
    """What `iss` has to be."""
    audience: str = ""
    """What `aud` has to hold."""
    access: Path | None = None
    """Static keys and quotas, see `access_file`."""


class TokenVerifier:
    """Turns tokens into callers.

    Args:
        sources: The files.
        now: Seconds since 1970.

    Raises:
        StartError: a file cannot be used; the sentence names it.
    """

    def __init__(self, sources: TokenSources, *, now: Callable[[], float] = time.time) -> None:
        self._sources = sources
        self._now = now
        self._lock = threading.Lock()
        self._verified: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()
        try:
            self._stamp = self._look_at()
            self._keys, self._access = self._read()
        except ValueError as error:
            raise StartError(str(error)) from error
        self._named = _names(self._access)
        self._looked_at = time.monotonic()

    def verify(self, token: str) -> Caller:
        """Returns whose token it is.

        Raises:
            UnauthenticatedError: nobody's; says neither the token nor which check failed.
        """
        with self._lock:
            self._refresh()
            digest = hashlib.sha256(token.encode()).digest()
            found = self._verified.get(digest)
            if found is None or found[1] <= self._now():
                found = self._judge(token, digest.hex())
                self._verified[digest] = found
                if len(self._verified) > _KEPT:
                    self._verified.popitem(last=False)
            return found[0]

    def check_standing(self, caller: Caller) -> None:
        """Looks again at who makes a call that has run for a while.

        A static key ends with its entry. A signed token is looked at once: its time is that in which calls may begin,
        and its signer's key may leave the set once that is over.

        Raises:
            UnauthenticatedError: the caller's key was withdrawn.
        """
        with self._lock:
            self._refresh()
            if caller.name.startswith(_KEY) and caller.name not in self._named:
                raise _invalid("is a key that was withdrawn")

    def quota(self, tenant: str) -> Quota:
        """Returns what a tenant may take; one that the access file does not name has no limits."""
        with self._lock:
            self._refresh()
            return self._access.tenants.get(tenant, Quota())

    def _judge(self, token: str, digest: str) -> tuple[Caller, float]:
        if len(token) > TOKEN_CHARACTERS:
            raise _invalid(f"has {len(token)} characters")
        key = self._access.keys.get(digest)
        if key is not None:
            until = float("inf") if key.expires_at is None else key.expires_at
            if until <= self._now():
                raise UnauthenticatedError("the token has ended", reason=reasons.TOKEN_EXPIRED)
            return Caller(_KEY + key.id, key.tenant, key.scopes), until
        if self._keys is None:
            raise _invalid("is no known key")
        return self._judge_signed(token)

    def _judge_signed(self, token: str) -> tuple[Caller, float]:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key_of(token),
                algorithms=list(ALGORITHMS),
                audience=self._sources.audience or None,
                issuer=self._sources.issuer or None,
                leeway=LEEWAY_S,
                options={"require": ["exp", "sub"], "verify_aud": bool(self._sources.audience)},
            )
        except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError) as error:
            raise UnauthenticatedError(
                "the token has ended, or is not valid yet", reason=reasons.TOKEN_EXPIRED
            ) from error
        except jwt.PyJWTError as error:
            raise _invalid(type(error).__name__) from error
        tenant, scope = claims.get("tenant", ""), claims.get("scope", "")
        if not isinstance(tenant, str) or len(tenant) > access_file.TENANT_CHARACTERS or not tenant.isprintable():
            raise _invalid("names no tenant of at most 64 characters")
        if not isinstance(scope, str):
            raise _invalid("has a scope that is not text")
        scopes = frozenset(scope.split())
        return Caller(f"sub:{claims['sub'][:64]}", tenant, scopes), float(min(int(claims["exp"]), _FAR_S)) + LEEWAY_S

    def _key_of(self, token: str) -> Any:
        assert self._keys is not None  # noqa: S101 -- asked for only where there are keys
        name = jwt.get_unverified_header(token).get("kid")
        if name is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if name not in self._keys:
            raise _invalid("is signed by a key that the key set does not have")
        return self._keys[name]

    def _refresh(self) -> None:
        if time.monotonic() - self._looked_at < CHECK_S:
            return
        self._looked_at = time.monotonic()
        try:
            stamp = self._look_at()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._keys, self._access = self._read()
        except ValueError as error:
            _log.error("access.refused_change", why=str(error))
            return
        self._verified.clear()
        self._named = _names(self._access)
        _log.info("access.reloaded", keys=len(self._access.keys), signers=len(self._keys or ()))

    def _look_at(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._sources.jwks, self._sources.access):
            if path is None:
                continue
            try:
                status = path.stat()
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from error
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _read(self) -> tuple[dict[str | None, Any] | None, AccessFile]:
        keys = None if self._sources.jwks is None else read_key_set(self._sources.jwks)
        access = AccessFile() if self._sources.access is None else access_file.read(self._sources.access)
        return keys, access


def _names(access: AccessFile) -> frozenset[str]:
    """Callers' names of every static key."""
    return frozenset(_KEY + key.id for key in access.keys.values())


def read_key_set(path: Path) -> dict[str | None, Any]:
    """Reads the public keys of a JSON Web Key Set, by `kid`.

    Issuers publish keys of all uses together: those that do not sign, or in ways that are not taken, are passed over.

    Raises:
        ValueError: it cannot be read, has no key that signs, or holds one that is secret or wrong.
    """
    try:
        listed = json.loads(path.read_text("utf-8"))["keys"]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON Web Key Set") from error
    if not isinstance(listed, list):
        raise ValueError(f"{path} is no JSON Web Key Set: its keys are no array")
    keys: dict[str | None, Any] = {}
    for number, entry in enumerate(listed):
        where = f"{path}: keys[{number}]"
        if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP") or "d" in entry:
            raise ValueError(f"{where} is no public key of kind RSA, EC or OKP")
        if not isinstance(entry.get("kid", ""), str):
            raise ValueError(f"{where} has a kid that is not text")
        if not _signs(entry):
            continue
        try:
            key = jwt.PyJWK(entry)
        except jwt.PyJWTError as error:
            raise ValueError(f"{where} cannot be used: {error}") from error
        if key.key_id in keys:
            raise ValueError(f"{where} repeats the kid of an earlier key")
        keys[key.key_id] = key
    if not keys:
        raise ValueError(f"{path} holds no key that signs")
    return keys


def _signs(entry: dict[str, Any]) -> bool:
    """Whether tokens may be signed with a key, by what the set says of its use."""
    operations = entry.get("key_ops", ["verify"])
    return (
        entry.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
        and entry.get("alg", ALGORITHMS[0]) in ALGORITHMS
        and (entry["kty"] == "RSA" or entry.get("crv") in _CURVES)
    )


def bearer(value: str | bytes | None) -> str:
    """Returns the token of an `authorization` header.

    Raises:
        UnauthenticatedError: there is none.
    """
    if isinstance(value, str):
        kind, _, token = value.partition(" ")
        if kind.lower() == "bearer" and token.strip():
            return token.strip()
    raise UnauthenticatedError("the call carries no token: send `authorization: Bearer TOKEN`")


class _Teller:
    """Writes why tokens were refused, a few times a second at most: whoever guesses must not fill a disk."""

    def __init__(self) -> None:
        self._second = 0
        self._told = 0

    def tell(self, why: str) -> None:
        """Writes it, or leaves it out."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._told = second, 0
        self._told += 1
        if self._told <= _TOLD_A_SECOND:
            _log.info("token.refused", why=why)


_teller = _Teller()


def _invalid(why: str) -> FabricError:
    """One answer for every failed check: the log says which, the caller, who may be anybody, does not hear it."""
    _teller.tell(why)
    return UnauthenticatedError("the token is not valid here", reason=reasons.TOKEN_INVALID)
