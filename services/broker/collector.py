# SPDX-License-Identifier: Apache-2.0
"""Python's cycle collector, kept from looking through what waits.

Requests that wait are many objects that live long and lie in no cycle: the core leaves none behind (a test says so).
With Python's own thresholds, looking through them took a quarter of the core's time (`make bench-throughput`), in
pauses that grow with what waits.
"""

from __future__ import annotations

import gc

COLLECT_EVERY = (10_000, 20, 50)
"""New objects before the collector looks at the youngest, and how often before it looks at older ones."""


def spare_the_collector() -> None:
    """Lets the collector look less often, and never at what was loaded so far. Called once, when all is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)
