# SPDX-License-Identifier: Apache-2.0
"""The channel to a broker: in the clear on loopback, by TLS elsewhere, with a token where the broker wants one."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

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
_SCHEME = re.compile(r"(dns|unix|unix-abstract|vsock|ipv4|ipv6|xds):(?!\d+$)")
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Tls:
    """How to speak TLS. With nothing said the system's authorities are trusted, and no certificate is shown."""

    authorities: Path | str | None = None
    """File with the certificates to trust, PEM."""
    certificate: Path | str | None = None
    """File with the certificate to show, PEM; with `key`."""
    key: Path | str | None = None
    """File with its private key, PEM."""
    server_name: str = ""
    """Name in the broker's certificate; empty for `broker.ifabric` with authorities of your own, else the address's."""


def open_channel(address: str, tls: Tls | None, *, has_token: bool) -> grpc.aio.Channel:
    """Opens a channel; it connects with the first call.

    Args:
        address: `host:port`, or what else gRPC resolves: `dns:///name:port`, `unix:/path`.
        tls: None for a channel in the clear.
        has_token: Whether a token will be sent.

    Raises:
        ValueError: the address is none, or the token would go to another machine in the clear.
        OSError: a file cannot be read.
    """
    _check(address)
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


def _check(address: str) -> None:
    """Without a port gRPC takes 443, and of a web address it makes a name: both would be tried again for long.

    Raises:
        ValueError: it is no address of a broker.
    """
    if _SCHEME.match(address):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 1 <= int(port) <= _PORT_MAX:
        raise ValueError(f"the address {address!r} is not host:port with a port from 1 to {_PORT_MAX}")


def _is_local(address: str) -> bool:
    """Whether only this machine is meant; a name other than `localhost` is taken for another machine's."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
