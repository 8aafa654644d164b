# SPDX-License-Identifier: Apache-2.0
"""Why nobody could be reached, in words that say what to do: gRPC says UNAVAILABLE of all of it.

The pieces of text are gRPC's own, of the connection that it gave up last.
"""

from __future__ import annotations

import re

_PLACE = re.compile(r"ipv[46]:(\S+?): ")
"""Where gRPC says that it could not connect."""

_AT_THE_START = "failed to connect"
"""A connection that stood and was lost says the same of its end, and says nothing of how it was made."""

_BY_TLS = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "what answers at {place} shows a certificate that no authority in force has signed; name the file of those "
        "that have with --tls-ca",
    ),
    (
        "Hostname Verification Check failed",
        "the certificate of what answers at {place} has another name; if it is the right one, say its name with "
        "--tls-server-name",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "what answers at {place} speaks no TLS; if it is the right one, leave out the options of TLS",
    ),
    (
        "Failed to create security handshaker",
        "the files of --tls-ca, --tls-cert and --tls-key cannot be used: one holds no certificate or key, or the key "
        "is another certificate's",
    ),
    (
        "Socket closed",
        "what answers at {place} ends the connection; if it asks for a certificate, show one that its authorities have "
        "signed, with --tls-cert and --tls-key",
    ),
)
_IN_THE_CLEAR = (
    ("Socket closed", "what answers at {place} ends the connection; if it speaks TLS, add --tls-ca FILE or --tls"),
    ("Failed parsing HTTP/2", "what answers at {place} does not speak gRPC; name the address of one that does"),
)
_NOBODY = "nothing answers{at}; start a suite with `ifab up`, or name the address of one that runs"


def is_mistaken(message: str, *, protected: bool) -> bool:
    """Whether somebody is there, and the connection was asked for in a way that he does not take.

    Args:
        message: What gRPC says.
        protected: Whether the connection was to be TLS.
    """
    pieces = _BY_TLS if protected else _IN_THE_CLEAR
    return _AT_THE_START in message and any(piece in message for piece, _ in pieces)


def sentence(message: str, address: str, *, protected: bool) -> str:
    """What went wrong and what to do.

    Args:
        message: What gRPC says.
        address: Where the call went, for where that does not say it; may be empty.
        protected: Whether the connection was to be TLS.
    """
    found = _PLACE.search(message)
    place = found[1] if found else address
    if _AT_THE_START in message:
        for piece, said in _BY_TLS if protected else _IN_THE_CLEAR:
            if piece in message:
                return said.format(place=place)
    return _NOBODY.format(at=f" at {place}" if place else "")
