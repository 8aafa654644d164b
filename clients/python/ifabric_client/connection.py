# SPDX-License-Identifier: Apache-2.0
"""The channel to a broker: in the clear on loopback, by TLS elsewhere, with a token where the broker wants one."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from pathlib import Path

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""Longest message sent or taken, in bytes: the broker's own default."""
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A refused request names every field at fault in its trailers: more than gRPC's 8 KiB.
    ("grpc.max_metadata_size", 32 * 1024),
    ("grpc.absolute_max_metadata_size", 64 * 1024),
    # Bulk streams may be silent for minutes; what stands between must not forget them.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """How to speak TLS. With nothing said the system's authorities are trusted, and no certificate is shown."""

    authorities: Path | None = None
    """Certificates to trust, PEM."""
    certificate: Path | None = None
    """Certificate to show, PEM; with `key`."""
    key: Path | None = None
    """Its private key, PEM."""
    server_name: str = ""
    """Name in the broker's certificate; empty for `broker.ifabric` with authorities of your own, else the address's."""


def open_channel(address: str, tls: Tls | None, *, has_token: bool) -> grpc.aio.Channel:
    """Opens a channel; it connects with the first call.

    Args:
        address: `host:port`, or what else gRPC resolves.
        tls: None for a channel in the clear.
        has_token: Whether a token will be sent.

    Raises:
        ValueError: the token would go to another machine in the clear.
        OSError: a file cannot be read.
    """
    if tls is None:
        if has_token and not _is_local(address):
            raise ValueError(f"the token would go to {address} in the clear: give tls=Tls(...)")
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    options = list(_OPTIONS)
    name = tls.server_name or ("broker.ifabric" if tls.authorities is not None else "")
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    credentials = grpc.ssl_channel_credentials(*(_read(each) for each in (tls.authorities, tls.key, tls.certificate)))
    return grpc.aio.secure_channel(address, credentials, options=options)


def _is_local(address: str) -> bool:
    """Whether only this machine is meant; a name other than `localhost` is taken for another machine's."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
