# SPDX-License-Identifier: Apache-2.0
"""What a database's URL says before anybody connects: whether it carries a secret, whether rows would travel in clear.

libpq by itself prefers TLS, takes the clear where there is none, and verifies nobody. What a URL leaves out it takes
from the environment (PGHOST, PGHOSTADDR, PGSSLMODE).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from services.common.security.exposure import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECRETS = frozenset({"password", "sslpassword"})
_ENCRYPTED = frozenset({"require", "verify-ca", "verify-full"})
"""Values of `sslmode` with which libpq never falls back to the clear."""


def is_url(where: str) -> bool:
    """Whether a journal is named by URL, and not by path."""
    return "://" in where


def carries_secret(url: str) -> bool:
    """Whether the URL holds a password, between user and host or among its options.

    Raises:
        ValueError: it is no URL.
    """
    return urlsplit(url).password is not None or bool(_SECRETS & _options(url).keys())


def host_in_the_clear(url: str, environment: Mapping[str, str]) -> str:
    """Returns a host of another machine that would be spoken to without TLS; empty where there is none.

    Sockets of this machine and loopback are its own. A name is taken for another machine's.

    Args:
        url: Where the database is.
        environment: Of the process that is to connect.
    """
    options = _options(url)
    if options.get("sslmode", environment.get("PGSSLMODE")) in _ENCRYPTED:
        return ""
    named = [_host(part) for part in urlsplit(url).netloc.rpartition("@")[2].split(",")]
    named += options.get("host", "").split(",")
    if not any(named):
        named = environment.get("PGHOST", "").split(",")
    named += options.get("hostaddr", environment.get("PGHOSTADDR", "")).split(",")
    return next((name for name in named if name and name[0] not in "/@" and not is_loopback(name)), "")


def _options(url: str) -> dict[str, str]:
    """What stands behind the `?`; of an option that is said twice the last word counts, as for libpq."""
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))


def _host(authority: str) -> str:
    """Name, address or folder of a socket in `host:port` or `[address]:port`."""
    bracketed = authority.startswith("[")
    return unquote(authority[1:].partition("]")[0] if bracketed else authority.partition(":")[0])
