# SPDX-License-Identifier: Apache-2.0
"""What may listen in the clear: everything on loopback, and beyond it only what a setting names in as many words."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from services.common.errors import StartError
from services.common.settings import split_address

if TYPE_CHECKING:
    from services.common.settings import Door


def check_exposure(door: Door, listen: str, *, protected: bool, allowed: tuple[str, ...], setting: str) -> None:
    """Lets a door open, or says why not.

    Args:
        door: What is about to listen.
        listen: Where, `host:port`.
        protected: Whether it speaks TLS.
        allowed: Doors that may listen in the clear beyond loopback.
        setting: Name of the setting that says where it listens.

    Raises:
        StartError: it would listen beyond loopback in the clear, and nobody said so.
    """
    if protected or is_loopback(split_address(listen)[0]) or door in allowed:
        return
    raise StartError(
        f"{setting} {listen} is reached by other machines, and {door} would speak in the clear there: give tls_cert, "
        f"tls_key and tls_ca, listen on loopback, or name {door} in allow_cleartext"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than `localhost` is taken for reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_local_peer(peer: str) -> bool:
    """Whether gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`, is of this machine."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    # gRPC percent-encodes the brackets of IPv6 addresses.
    host = rest.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0].strip("[]")
    return is_loopback(host.removeprefix("::ffff:"))
