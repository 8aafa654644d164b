# SPDX-License-Identifier: Apache-2.0
"""An authority of its own for each test: certificates as the services want them, made in a moment."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common.security import Files

if TYPE_CHECKING:
    from pathlib import Path

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """Where one certificate lies."""

    files: Files

    def settings(self) -> dict[str, str]:
        """The settings of a service with this certificate."""
        files = self.files
        return {"tls_cert": str(files.certificate), "tls_key": str(files.key), "tls_ca": str(files.authorities)}

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """Authorities, key and certificate, as gRPC's channel credentials take them."""
        return self.files.authorities.read_bytes(), self.files.key.read_bytes(), self.files.certificate.read_bytes()


class Authority:
    """Issues certificates into a folder.

    Args:
        folder: Where files go.
        name: Told apart from other authorities by it.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = (
            self._builder(self._name, self._key.public_key(), 2 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        role: str,
        *,
        names: tuple[str, ...] = (),
        lives: datetime.timedelta = _DAY,
        begins: datetime.timedelta = -_DAY,
    ) -> Identity:
        """Issues a certificate with the DNS name `<role>.ifabric` and `localhost`, over the role's last one."""
        key = ec.generate_private_key(ec.SECP256R1())
        every = [x509.DNSName(name) for name in (f"{role}.ifabric", "localhost", *names)]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        certificate = (
            self._builder(subject, key.public_key(), lives, begins)
            .add_extension(x509.SubjectAlternativeName(every), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = Files(self._folder / f"{role}.crt", self._folder / f"{role}.key", self._folder / f"{role}.ca")
        plain = serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        _replace(files.key, key.private_bytes(serialization.Encoding.PEM, form, plain))
        _replace(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
        _replace(files.authorities, self.path.read_bytes())
        return Identity(files)

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        lives: datetime.timedelta,
        begins: datetime.timedelta = -_DAY,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + lives)
        )


def _replace(path: Path, content: bytes) -> None:
    """Replaces a file in one step, as whoever renews certificates does."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)
