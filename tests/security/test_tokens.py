# SPDX-License-Identifier: Apache-2.0
"""Tokens of clients: what is taken, what is not, and what the callers behind them may do."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from services.common import reasons
from services.common.errors import StartError, UnauthenticatedError
from services.common.security import TokenSources, TokenVerifier
from services.common.security import tokens as module
from services.common.security.tokens import bearer
from tests.support.logged import captured_logs
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ISSUER, AUDIENCE = "https://issuer.test", "ifabric"


class Issuer:
    """Somebody who issues tokens, and publishes the keys that they are signed with."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "jwks.json"
        self.keys: dict[str, Any] = {}
        self.add("first")

    def add(self, name: str, key: Any = None) -> None:
        """Adds a key to the published set."""
        self.keys[name] = key or ec.generate_private_key(ec.SECP256R1())
        self.publish()

    def publish(self) -> None:
        listed = []
        for name, key in self.keys.items():
            algorithm = jwt.get_algorithm_by_name("EdDSA" if isinstance(key, ed25519.Ed25519PrivateKey) else "ES256")
            listed.append({**json.loads(algorithm.to_jwk(key.public_key())), "kid": name})
        self.path.write_text(json.dumps({"keys": listed}))

    def token(self, *, key: str = "first", kid: str | None = None, algorithm: str = "ES256", **claims: Any) -> str:
        said = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "somebody",
            "exp": time.time() + 600,
            "tenant": "acme",
            "scope": "generate jobs",
            **claims,
        }
        kept = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(kept, self.keys[key], algorithm, headers={"kid": kid or key})


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


@pytest.fixture
def verifier(issuer: Issuer) -> TokenVerifier:
    return TokenVerifier(TokenSources(issuer.path, ISSUER, AUDIENCE))


def test_a_good_token_says_who_calls(issuer: Issuer, verifier: TokenVerifier) -> None:
    caller = verifier.verify(issuer.token())
    assert (caller.name, caller.tenant) == ("sub:somebody", "acme")
    assert caller.scopes == {"generate", "jobs"}
    assert verifier.verify(issuer.token(aud=["others", AUDIENCE])).tenant == "acme"


def test_keys_of_other_uses_in_an_issuers_set_are_passed_over(issuer: Issuer) -> None:
    published = json.loads(issuer.path.read_text())
    (signs,) = published["keys"]
    published["keys"] += [
        {"kty": "RSA", "use": "enc", "alg": "RSA-OAEP", "kid": "seals", "n": "AQAB", "e": "AQAB"},
        {"kty": "OKP", "crv": "X25519", "kid": "agrees", "x": "AAAA"},
        {**signs, "kid": "derives", "key_ops": ["deriveKey"]},
    ]
    issuer.path.write_text(json.dumps(published))
    verifier = TokenVerifier(TokenSources(issuer.path, ISSUER, AUDIENCE))
    assert verifier.verify(issuer.token()).tenant == "acme"
    with pytest.raises(UnauthenticatedError):
        verifier.verify(issuer.token(kid="derives"))


def test_a_token_may_end_later_than_any_clock_goes(issuer: Issuer, verifier: TokenVerifier) -> None:
    assert verifier.verify(issuer.token(exp=10**400)).tenant == "acme"


def test_every_kind_of_public_key_is_taken(issuer: Issuer) -> None:
    issuer.add("edwards", ed25519.Ed25519PrivateKey.generate())
    verifier = TokenVerifier(TokenSources(issuer.path, ISSUER, AUDIENCE))
    assert verifier.verify(issuer.token(key="edwards", algorithm="EdDSA")).tenant == "acme"


def unsigned(issuer: Issuer) -> str:
    return jwt.encode({"sub": "x", "exp": time.time() + 60, "iss": ISSUER, "aud": AUDIENCE}, "", "none")


def confused(issuer: Issuer) -> str:
    """Signed with the public key as if it were a shared secret: the classic confusion of algorithms."""
    published = issuer.path.read_bytes()
    claims = {"sub": "x", "exp": time.time() + 60, "iss": ISSUER, "aud": AUDIENCE}
    return jwt.encode(claims, hashlib.sha256(published).digest(), "HS256", headers={"kid": "first"})


def forged(issuer: Issuer) -> str:
    head, _, tail = issuer.token().rpartition(".")
    return f"{head}.{'A' * len(tail)}"


WRONG: list[tuple[str, Callable[[Issuer], str]]] = [
    ("another issuer", lambda issuer: issuer.token(iss="https://other.test")),
    ("another audience", lambda issuer: issuer.token(aud="others")),
    ("no audience", lambda issuer: issuer.token(aud=None)),
    ("no end", lambda issuer: issuer.token(exp=None)),
    ("no subject", lambda issuer: issuer.token(sub=None)),
    ("an unknown key", lambda issuer: issuer.token(kid="second")),
    ("no signature", unsigned),
    ("a shared secret", confused),
    ("a forged signature", forged),
    ("a tenant that is none", lambda issuer: issuer.token(tenant=7)),
    ("a tenant that is too long", lambda issuer: issuer.token(tenant="x" * 65)),
    ("a scope that is none", lambda issuer: issuer.token(scope=["generate"])),
    ("a length beyond all measure", lambda issuer: issuer.token(more="x" * 10_000)),
    ("no form at all", lambda _: "nonsense"),
    ("nothing", lambda _: ".."),
]


@pytest.mark.parametrize("make", [make for _, make in WRONG], ids=[name for name, _ in WRONG])
def test_a_wrong_token_is_refused_without_saying_why(
    issuer: Issuer, verifier: TokenVerifier, make: Callable[[Issuer], str]
) -> None:
    token = make(issuer)
    with captured_logs() as lines, pytest.raises(UnauthenticatedError, match="not valid here") as caught:
        verifier.verify(token)
    assert caught.value.reason == reasons.TOKEN_INVALID
    assert len(token) < 20 or token not in lines.text()


@pytest.mark.parametrize("claims", [{"exp": time.time() - 3600}, {"nbf": time.time() + 3600}])
def test_a_token_outside_its_time_is_said_to_be(
    issuer: Issuer, verifier: TokenVerifier, claims: dict[str, Any]
) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        verifier.verify(issuer.token(**claims))
    assert caught.value.reason == reasons.TOKEN_EXPIRED


def test_a_remembered_token_ends_in_time(issuer: Issuer) -> None:
    now = [time.time()]
    verifier = TokenVerifier(TokenSources(issuer.path, ISSUER, AUDIENCE), now=lambda: now[0])
    token = issuer.token(exp=now[0] + 1)
    assert verifier.verify(token) is verifier.verify(token)
    now[0] += 1 + module.LEEWAY_S
    # PyJWT has a clock of its own, which still finds it good: what was remembered is judged anew, and not kept longer.
    assert verifier.verify(token) is not verifier.verify(token)


def test_a_key_that_is_withdrawn_withdraws_its_tokens(issuer: Issuer, verifier: TokenVerifier) -> None:
    token = issuer.token()
    assert verifier.verify(token).tenant == "acme"
    del issuer.keys["first"]
    issuer.add("second")

    def refused() -> bool:
        try:
            verifier.verify(token)
        except UnauthenticatedError:
            return True
        return False

    block_until(refused, what="the token of the withdrawn key is refused")
    assert verifier.verify(issuer.token(key="second")).tenant == "acme"


def test_a_change_that_cannot_be_used_changes_nothing(issuer: Issuer, verifier: TokenVerifier) -> None:
    token = issuer.token()
    issuer.path.write_text("{}")
    with captured_logs() as lines:

        def told() -> bool:
            verifier.verify(token)
            return bool(lines.all("access.refused_change"))

        block_until(told, what="the refused change is logged")
    assert verifier.verify(token).tenant == "acme"


def access(folder: Path, text: str) -> TokenSources:
    path = folder / "access.toml"
    path.write_text(text)
    return TokenSources(access=path)


def entry(key: str, **more: str) -> str:
    said = {
        "id": '"nightly"',
        "sha256": f'"{hashlib.sha256(key.encode()).hexdigest()}"',
        "tenant": '"acme"',
        "scopes": '["generate"]',
        **more,
    }
    return "[[keys]]\n" + "\n".join(f"{name} = {value}" for name, value in said.items() if value)


def test_a_static_key_says_who_calls(tmp_path: Path) -> None:
    verifier = TokenVerifier(access(tmp_path, entry("the key") + "\n[tenants.acme]\ncalls = 3\n"))
    caller = verifier.verify("the key")
    assert (caller.name, caller.tenant, set(caller.scopes)) == ("key:nightly", "acme", {"generate"})
    assert verifier.quota("acme").calls == 3
    assert verifier.quota("others").calls is None
    with pytest.raises(UnauthenticatedError):
        verifier.verify("another key")


def test_a_static_key_ends(tmp_path: Path) -> None:
    now = [0.0]
    sources = access(tmp_path, entry("the key", expires="1970-01-01T00:01:00Z"))
    verifier = TokenVerifier(sources, now=lambda: now[0])
    assert verifier.verify("the key").tenant == "acme"
    now[0] = 60.0
    with pytest.raises(UnauthenticatedError) as caught:
        verifier.verify("the key")
    assert caught.value.reason == reasons.TOKEN_EXPIRED


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[keys]", "is not TOML"),
        ("[other]", "'other' is not known; known are keys, tenants"),
        ("keys = 3", "keys is not an array"),
        (entry("k", id='"not a name"'), r"keys\[0\]\.id"),
        (entry("k", sha256='"abc"'), r"keys\[0\]\.sha256 is not 64 hexadecimal digits"),
        (entry("k", tenant=""), r"keys\[0\]\.tenant"),
        (entry("k", scopes='["everything"]'), r"keys\[0\]\.scopes .* any-tenant, generate, jobs, operate"),
        (entry("k", expires='"soon"'), r"keys\[0\]\.expires"),
        (entry("k") + "\n" + entry("other"), r"keys\[1\] repeats the id"),
        (entry("k", more="1"), "'more' is not known"),
        ("[tenants.a]\ncalls = 0", r"tenants\.a\.calls is not a number from 1 on"),
        ("tenants = 3", "tenants is not a table"),
    ],
)
def test_an_access_file_that_says_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(StartError, match=said) as caught:
        TokenVerifier(access(tmp_path, text))
    assert hashlib.sha256(b"k").hexdigest() not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "is no JSON Web Key Set"),
        ("[" * 100_000, "is no JSON Web Key Set"),
        ('{"keys": null}', "its keys are no array"),
        ('{"keys": []}', "holds no key"),
        ('{"keys": [{"kty": "RSA", "use": "enc", "kid": "x"}]}', "holds no key that signs"),
        ('{"keys": [{"kty": "EC", "kid": ["x"]}]}', r"keys\[0\] has a kid that is not text"),
        ('{"keys": [{"kty": "oct", "k": "AAAA", "kid": "x"}]}', r"keys\[0\] is no public key"),
        ('{"keys": [{"kty": "EC", "d": "AAAA", "kid": "x"}]}', r"keys\[0\] is no public key"),
        ('{"keys": [{"kty": "EC", "crv": "P-256", "kid": "x"}]}', r"keys\[0\] cannot be used"),
    ],
)
def test_a_key_set_that_cannot_be_trusted_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(text)
    with pytest.raises(StartError, match=said):
        TokenVerifier(TokenSources(path, ISSUER, AUDIENCE))


@pytest.mark.parametrize("header", [None, b"Bearer x", "Basic x", "Bearer", "Bearer  "])
def test_what_is_no_bearer_token_is_missing(header: str | bytes | None) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        bearer(header)
    assert caught.value.reason == reasons.TOKEN_MISSING
