# SPDX-License-Identifier: Apache-2.0
"""gRPC's two ends of TLS, made from the set of certificates in force.

A server asks for the set at each handshake. A channel is made with one set for good; `services.common.rpc.following`
makes another one when the set has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from services.common.security import Credentials
    from services.common.security.certificates import Bundle


def server_credentials(credentials: Credentials, *, certified: bool) -> grpc.ServerCredentials:
    """Returns credentials that follow the files.

    Args:
        credentials: The set in force.
        certified: Whether each peer has to show a certificate of the authorities.
    """
    shown = credentials.current()

    def fetch() -> Any:
        """Called by gRPC, on a thread of its own, before each handshake; None is "as before"."""
        nonlocal shown
        bundle = credentials.current()
        if bundle is shown:
            return None
        shown = bundle
        return _configuration(bundle)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), fetch, require_client_authentication=certified)


def channel_credentials(bundle: Bundle) -> grpc.ChannelCredentials:
    """Returns the credentials of a channel that shows the process's certificate."""
    return grpc.ssl_channel_credentials(bundle.authorities, bundle.key, bundle.certificate)


def _configuration(bundle: Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(bundle.key, bundle.certificate)], bundle.authorities)
