# SPDX-License-Identifier: Apache-2.0
"""How near jobs came to the least that they could have computed, for whoever watches many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.telemetry import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.common.telemetry import Telemetry


def ended_jobs(telemetry: Telemetry) -> Callable[[int, int, int], None]:
    """Returns what is told of each job that ran to its end: its prompt tokens as sent, as computed, and the bound."""
    tokens = telemetry.counter(names.BROKER_ENDED_JOB_TOKENS)
    kinds = [{"kind": kind} for kind in ("logical", "computed", "bound")]

    def told(*counts: int) -> None:
        for count, kind in zip(counts, kinds, strict=True):
            tokens.add(count, kind)

    return told
