# SPDX-License-Identifier: Apache-2.0
"""The process's certificate, its key, and the authorities that it trusts: read from files, and read again.

Whoever renews certificates replaces the files (a Kubernetes secret does it in one step, other tools in three); new
connections use the new ones, with no restart. A set that cannot be used, because it is half replaced or because
somebody made a mistake, is logged once and left alone: the set in force stays in force.

A service's identity is the DNS name `<role>.ifabric` in its certificate, wherever the service runs: peers check that
name and not the address, which a pod does not know beforehand.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from services.common import logs
from services.common.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

REALM = ".ifabric"
"""What follows the role in a service's DNS name."""
CHECK_S = 1.0
"""How often the files are looked at, at most: a handshake costs three `stat` calls a second, not three reads."""
_SKEW_S = 60.0
"""How far the clock of whoever issues certificates may be ahead."""

_log = logs.get("common.security")


@dataclass(frozen=True, slots=True)
class Files:
    """Where the three are, PEM each."""

    certificate: Path
    """The certificate, followed by those that lead to the authority."""
    key: Path
    """Its private key, without a pass phrase."""
    authorities: Path
    """Certificates of the authorities whose certificates are trusted, of servers and of clients alike."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One usable set."""

    certificate: bytes
    key: bytes
    authorities: bytes
    expires_at: float
    """When the certificate ends, in seconds since 1970."""
    names: tuple[str, ...]
    """DNS names in the certificate."""
    fingerprint: str
    """SHA-256 over all three; two sets with one fingerprint are the same."""


class _EarlyError(ValueError):
    """A certificate whose time has not come."""

    def __init__(self, sentence: str, begins_at: float) -> None:
        super().__init__(sentence)
        self.begins_at = begins_at


class Credentials:
    """The set in force. Safe to ask from any thread: gRPC asks from its own.

    Args:
        files: Where the set is.
        clock: Monotonic time in seconds.
        now: Seconds since 1970.

    Raises:
        StartError: there is no usable set to begin with; the sentence names the file.
    """

    def __init__(
        self, files: Files, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._files = files
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        try:
            self._stamp = _stamp(files)
            self._bundle = read(files, now())
        except ValueError as error:
            raise StartError(str(error)) from error
        self._looked_at = clock()
        self._again_at = math.inf
        """When files that have not changed are read again, in seconds since 1970: theirs is a time to come."""
        self.reloads = 0
        """Times that a new set came into force."""
        self.failures = 0
        """Times that a new set could not be used."""

    def current(self) -> Bundle:
        """Returns the set in force, after a look at the files where the last one is `CHECK_S` ago."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= CHECK_S:
                self._looked_at = now
                self._look()
            return self._bundle

    def _look(self) -> None:
        try:
            stamp = _stamp(self._files)
            if stamp == self._stamp and self._now() < self._again_at:
                return
            self._stamp, self._again_at = stamp, math.inf
            fresh = read(self._files, self._now())
        except ValueError as error:
            if isinstance(error, _EarlyError):
                self._again_at = error.begins_at
            self.failures += 1
            _log.error("certificate.refused", why=str(error), expires_at=_instant(self._bundle.expires_at))
            return
        if fresh.fingerprint != self._bundle.fingerprint:
            self._bundle = fresh
            self.reloads += 1
            _log.info("certificate.reloaded", names=list(fresh.names), expires_at=_instant(fresh.expires_at))


def read(files: Files, now: float) -> Bundle:
    """Reads a set and checks that it can be used: it parses, key and certificate belong together, its time is now.

    Args:
        files: Where it is.
        now: Seconds since 1970.

    Raises:
        ValueError: it cannot; the message is one sentence that names the file.
    """
    certificate, key, authorities = (_bytes(path) for path in (files.certificate, files.key, files.authorities))
    leaf = _certificates(certificate, files.certificate)[0]
    _certificates(authorities, files.authorities)
    try:
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{files.key} is no private key in PEM without a pass phrase") from error
    if _encoded(private.public_key()) != _encoded(leaf.public_key()):
        raise ValueError(f"{files.key} is not the key of the certificate in {files.certificate}")
    begins_at, expires_at = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    if begins_at > now + _SKEW_S:
        raise _EarlyError(f"the certificate in {files.certificate} begins at {_instant(begins_at)}", begins_at)
    if expires_at <= now:
        raise ValueError(f"the certificate in {files.certificate} ended at {_instant(expires_at)}")
    try:
        alternative = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = tuple(alternative.get_values_for_type(x509.DNSName))
    except x509.ExtensionNotFound:
        names = ()
    fingerprint = hashlib.sha256(b"\0".join((certificate, key, authorities))).hexdigest()
    return Bundle(certificate, key, authorities, expires_at, names, fingerprint)


def _certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError(f"{path} holds no certificate in PEM") from error


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _stamp(files: Files) -> tuple[tuple[int, int, int], ...]:
    """What changes when a file is replaced or written."""
    found = []
    for path in (files.certificate, files.key, files.authorities):
        try:
            status = path.stat()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _instant(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
