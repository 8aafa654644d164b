# SPDX-License-Identifier: Apache-2.0
"""Figures that the core works by. The broker's settings model fills them in; every default is stated here, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Settings of the core."""

    waiting_requests_max: int = 1_000_000
    """Requests that may be in flight, waiting ones included; more are refused at the door."""
    tenant_requests_max: int = 0
    """Of these, requests of one tenant; more of it are refused at the door, others' are not. 0 is "no limit"."""
    waiting_bytes_max: int = 1_900_000_000
    """Memory that they may take, in bytes: packed ids, and 1,440 bytes a request."""
    holdings_bytes_max: int = 128 * 1024 * 1024
    """Memory for what workers are believed to hold beyond what waits, in bytes."""
    bound_chains_max: int = 4_000_000
    """Block chains that are kept exactly for the bound of one job, 8 bytes each; beyond them a sample is counted."""

    interactive_linger_s: float = 0.001
    """How long interactive work waits for siblings while other interactive work has come just before."""
    bulk_linger_s: float = 0.02
    """How long the first work of a flow waits for siblings."""
    lead_limit_s: float = 20.0
    """How long siblings wait for their leader's prompt to be computed before they go all the same."""
    interactive_reserve: float = 0.05
    """Share of a worker's credit, and of its engine's slots, that bulk work leaves free while interactive work has come
    lately."""
    interactive_lately_s: float = 10.0
    """What "lately" means there."""

    ageing_s: float = 60.0
    """Waiting time that makes up for one priority, or for half the decode density within a flow."""
    overdue_s: float = 600.0
    """Time after which a claimed group goes behind the others."""
    decode_weight: float = 2.0
    """Prompt tokens that one generated token counts for when work is divided between workers."""
    join_factor: float = 4.0
    """How many times its cost in recomputed tokens a cut has to move."""
    quantum: int = 32
    """Requests that are given out before it is looked anew whose turn it is."""
    tenant_weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Share of each tenant; one that is not named has 1."""

    silence_limit_s: float = 10.0
    """How long a worker with work may send nothing at all before it counts as lost."""
    nobody_limit_s: float = 300.0
    """How long work waits while no worker serves any of its engines before it fails UNAVAILABLE."""
    retry_first_s: float = 0.05
    """Delay before lost work runs again; doubles with each loss, cut by a random part."""
    retry_most_s: float = 5.0
    retry_share: float = 0.1
    """Attempts beyond the first that may be spent for each first one."""
    retry_burst: int = 512
    """Attempts beyond the first that may be spent at once."""
    attempts_max: int = 20
    """Attempts after which a request fails UNAVAILABLE, innocent or not. A bad neighbour costs three at most."""
