# SPDX-License-Identifier: Apache-2.0
"""The card set of this machine.

A machine without an accelerator is one card of the family `cpu` with the memory that this process may use.
"""

from __future__ import annotations

import os
from pathlib import Path

from ifabric.engine.v1 import contract_pb2, node_pb2

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where version 2 and version 1 of control groups say how much memory a container may use."""


def card_facts() -> node_pb2.CardFacts:
    """Reads what the machine has."""
    return node_pb2.CardFacts(
        family="cpu",
        compute_capability=contract_pb2.MaybeText(not_applicable=True),
        memory_bytes=memory_bytes(),
        count=1,
    )


def memory_bytes(limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Returns the memory that this process may use, in bytes: the machine's, or its container's where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for path in limits if (limit := _limit(path)) is not None)])


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
