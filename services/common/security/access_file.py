# SPDX-License-Identifier: Apache-2.0
"""The access file: static keys by digest, and what each tenant may take.

    [tenants.search]
    calls = 200                  # open at a time
    requests_a_minute = 60000

    [[keys]]
    id = "search-nightly"
    sha256 = "9f86d081884c7d65…"  # of the key; `ifab key` makes both
    tenant = "search"
    scopes = ["generate", "jobs"]
    expires = 2027-06-30T00:00:00Z

A key has 256 random bits, so its plain SHA-256 can be kept: there is nothing to guess, and nothing to slow down.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.common.security.needs import SCOPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TENANT_CHARACTERS = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may take; None is "no limit"."""

    calls: int | None = None
    """Calls that are open at a time, streams included."""
    requests_a_minute: int | None = None
    """Requests that it may bring, in single calls and in streams."""


@dataclass(frozen=True, slots=True)
class Key:
    """One static key."""

    id: str
    sha256: str
    tenant: str
    scopes: frozenset[str]
    expires_at: float | None
    """In seconds since 1970; None is "never"."""


@dataclass(frozen=True, slots=True)
class AccessFile:
    """What one file says."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    """By digest."""
    tenants: Mapping[str, Quota] = field(default_factory=dict)


def read(path: Path) -> AccessFile:
    """Reads an access file.

    Raises:
        ValueError: it cannot be read or says something that is not known; names the place, never a digest.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    _only(document, {"keys", "tenants"}, str(path))
    tenants = {}
    for name, table in _table(document.get("tenants", {}), f"{path}: tenants").items():
        where = f"{path}: tenants.{name}"
        _only(_table(table, where), {"calls", "requests_a_minute"}, where)
        tenants[name] = Quota(_count(table, "calls", where), _count(table, "requests_a_minute", where))
    keys: dict[str, Key] = {}
    listed = document.get("keys", [])
    if not isinstance(listed, list):
        raise ValueError(f"{path}: keys is not an array of tables")
    for number, entry in enumerate(listed):
        key = _key(_table(entry, f"{path}: keys[{number}]"), f"{path}: keys[{number}]")
        if key.sha256 in keys or any(other.id == key.id for other in keys.values()):
            raise ValueError(f"{path}: keys[{number}] repeats the id or digest of an earlier key")
        keys[key.sha256] = key
    return AccessFile(keys, tenants)


def _key(table: dict[str, Any], where: str) -> Key:
    _only(table, {"id", "sha256", "tenant", "scopes", "expires"}, where)
    name, digest, tenant = (table.get(part) for part in ("id", "sha256", "tenant"))
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(f"{where}.id is absent or has other characters than letters, digits, '.', '_' and '-'")
    if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ValueError(f"{where}.sha256 is not 64 hexadecimal digits in lower case")
    if not (isinstance(tenant, str) and len(tenant) <= TENANT_CHARACTERS and tenant.isprintable()):
        raise ValueError(f"{where}.tenant is absent or has more than {TENANT_CHARACTERS} characters")
    scopes = table.get("scopes")
    if not (isinstance(scopes, list) and scopes and all(scope in SCOPES for scope in scopes)):
        raise ValueError(f"{where}.scopes is absent or names another scope than {', '.join(sorted(SCOPES))}")
    expires = table.get("expires")
    if expires is not None and not (isinstance(expires, datetime.datetime) and expires.tzinfo is not None):
        raise ValueError(f"{where}.expires is not a time with an offset, such as 2027-06-30T00:00:00Z")
    return Key(name, digest, tenant, frozenset(scopes), None if expires is None else expires.timestamp())


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a table")
    return value


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        raise ValueError(f"{where}: {unknown[0]!r} is not known; known are {', '.join(sorted(known))}")


def _count(table: dict[str, Any], key: str, where: str) -> int | None:
    value = table.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{where}.{key} is not a number from 1 on")
    return value
