# SPDX-License-Identifier: Apache-2.0
"""What a provisioner is told. Nothing about engines is among it: that comes from the nodes' descriptions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from services.common.settings import ServiceSettings

EvidenceKind = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
"""What was done to an engine, one word: `audit`, `ladder`."""


class ProvisionerSettings(ServiceSettings, env_prefix="IFAB_PROVISIONER_"):
    """Settings of a provisioner process."""

    heartbeat_interval_ms: int = Field(default=1_000, ge=50, le=60_000)
    """How often workers send a heartbeat, in milliseconds; a lease is three intervals."""
    probe_timeout_s: float = Field(default=25.0, gt=0, le=300)
    """How long the probe of a loaded engine may take, in seconds."""
    nodes_max: int = Field(default=1_000, ge=1, le=4_000)
    """Most nodes with a live lease, refused ones included; a further one is told to come back later."""
    watchers_max: int = Field(default=100, ge=1, le=10_000)
    """Most open WatchNodes streams."""
    watch_backlog_max: int = Field(default=1_000, ge=1, le=100_000)
    """Most changed nodes that wait for one slow watcher before its stream is ended."""
    required_evidence: tuple[EvidenceKind, ...] = Field(default=(), max_length=16)
    """Kinds of evidence without which no engine is accepted, as JSON: ["audit", "ladder"]. The newest document of each
    kind beside the engine must speak of this very engine and must not be one that fails."""
