# SPDX-License-Identifier: Apache-2.0
"""How a service reaches the others: in the clear, or with its certificate and theirs verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from services.common.rpc import options
from services.common.rpc.client import channel
from services.common.rpc.following import FollowingChannel
from services.common.rpc.tls import channel_credentials
from services.common.security.certificates import REALM

if TYPE_CHECKING:
    from services.common.security import Credentials
    from services.common.security.certificates import Bundle


class Dialer:
    """Opens channels to other services.

    Args:
        credentials: The process's certificate; None speaks in the clear.
        message_bytes_max: Longest message sent or taken, in bytes.
    """

    def __init__(
        self, credentials: Credentials | None = None, *, message_bytes_max: int = options.MESSAGE_BYTES_MAX
    ) -> None:
        self._credentials = credentials
        self._message_bytes_max = message_bytes_max

    def channel(self, address: str, *, role: str, balanced: bool = False) -> grpc.aio.Channel:
        """Opens a channel; it connects with the first call and reconnects by itself.

        Args:
            address: `host:port`, `dns:///name:port` or `unix:/path`.
            role: What listens there: its certificate has to have the DNS name `<role>.ifabric`, whatever the address.
            balanced: Spread calls over all healthy addresses behind the name, see `client.channel`.
        """
        if self._credentials is None:
            return channel(address, message_bytes_max=self._message_bytes_max, balanced=balanced)
        arguments = [
            *options.client(self._message_bytes_max, balanced=balanced),
            ("grpc.ssl_target_name_override", role + REALM),
        ]

        def make(bundle: Bundle | None) -> grpc.aio.Channel:
            assert bundle is not None  # noqa: S101 -- credentials always have a set
            return grpc.aio.secure_channel(address, channel_credentials(bundle), options=arguments)

        return FollowingChannel(self._credentials.current, make)
