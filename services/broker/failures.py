# SPDX-License-Identifier: Apache-2.0
"""Why requests were refused or failed, as a count by reason: what each means stands on the page about errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.broker.work import LANE_NAMES, Lane
from services.common import reasons
from services.common.telemetry import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.common.errors import FabricError
    from services.common.telemetry import Telemetry

_KNOWN = frozenset(value for key, value in vars(reasons).items() if key.isupper())
_OTHER = "other"
"""For words that a peer of another version may say: labels stay as many as there are reasons."""


def request_failures(telemetry: Telemetry) -> Callable[[Lane, FabricError], None]:
    """Returns what is told of each request that was refused or failed, and of each row that did."""
    failures = telemetry.counter(names.BROKER_REQUEST_FAILURES)

    def told(lane: Lane, error: FabricError) -> None:
        reason = error.reason if error.reason in _KNOWN else _OTHER
        failures.add(1, {"lane": LANE_NAMES[lane], "reason": reason})

    return told
