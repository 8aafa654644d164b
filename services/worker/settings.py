# SPDX-License-Identifier: Apache-2.0
"""What a worker is told. No limit of the engine is among it: limits come from the engine directory alone."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field

from services.common.settings import PeerAddress, ServiceSettings


class WorkerSettings(ServiceSettings, env_prefix="IFAB_WORKER_"):
    """Settings of a worker process."""

    engine_dir: Path
    """Engine directory that this worker serves."""
    provisioner: PeerAddress
    """Where the provisioner listens."""
    node_id: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?$")
    """Name of the node, unique among live nodes and kept over restarts; the machine's host name if absent."""
    advertise: PeerAddress | None = None
    """Where brokers reach this worker, `host:port`; the address it listens on if absent."""

    @property
    def node_name(self) -> str:
        """The node's name in force."""
        return self.node_id or socket.gethostname().lower()
