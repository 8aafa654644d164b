# SPDX-License-Identifier: Apache-2.0
"""What both ends of a connection have to agree on."""

from __future__ import annotations

from importlib import metadata

PROTOCOL_REVISION = 1
"""Revision of the protocol between broker and worker; peers with another one are refused by number."""

CONTRACT_VERSION = 1
"""Version of the contract document that this suite reads."""

HEARTBEATS_A_LEASE = 3
"""A registration ends after this many heartbeat intervals without a heartbeat."""


def suite_version() -> str:
    """Returns the version of the installed suite, such as `0.1.0`."""
    return metadata.version("inference-fabric")
