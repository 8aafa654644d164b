# SPDX-License-Identifier: Apache-2.0
"""The card set of this machine.

An engine for a processor runs on any machine: it gets one card of the family `cpu` with the memory that this process
may use. For any other engine the accelerators are read through NVML, as far as this process may see them.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ifabric.engine.v1 import contract_pb2, node_pb2
from services.common import logs

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU_FAMILY = "cpu"

_log = logs.get("worker.card")

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where version 2 and version 1 of control groups say how much memory a container may use."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator."""

    product: str
    """As the vendor writes it: `NVIDIA H200`."""
    compute_capability: str
    """`9.0`."""
    memory_bytes: int


def card_facts(wanted_family: str) -> node_pb2.CardFacts:
    """Reads what the machine has for an engine of a card family.

    Args:
        wanted_family: The contract's `card.family`; empty where the contract leaves it out.

    Returns:
        The processor, for an engine of the family `cpu` and for a machine without accelerators; else the accelerators.
    """
    found = [] if wanted_family == CPU_FAMILY else accelerators()
    if found:
        return accelerator_facts(found)
    return node_pb2.CardFacts(
        family=CPU_FAMILY,
        compute_capability=contract_pb2.MaybeText(not_applicable=True),
        memory_bytes=memory_bytes(),
        count=1,
    )


def accelerator_facts(found: Sequence[Accelerator]) -> node_pb2.CardFacts:
    """The facts of a set of accelerators: those that are like the first, since an engine's cards are all alike."""
    first = found[0]
    return node_pb2.CardFacts(
        family=re.sub(r"[^a-z0-9]+", "-", first.product.lower()).strip("-"),
        compute_capability=contract_pb2.MaybeText(value=first.compute_capability),
        memory_bytes=min(card.memory_bytes for card in found),
        count=sum(card.product == first.product for card in found),
    )


def accelerators() -> list[Accelerator]:
    """Asks NVML; empty where its Python package (the extra `nvidia`), the driver or a card is missing."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _say_no_driver(str(error))
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            Accelerator(
                pynvml.nvmlDeviceGetName(handle),
                "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            )
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


@functools.cache
def _say_no_driver(why: str) -> None:
    """Says it once: a worker that is refused looks for its cards several times a second."""
    _log.info("card.no_driver", why=why)


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
