# SPDX-License-Identifier: Apache-2.0
"""What a service's metrics endpoint says, for tests of whole suites."""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.jobs.running import Service


def text_of(service: Service) -> str:
    """What the metrics endpoint shows."""
    assert service.process is not None
    with urllib.request.urlopen(f"http://{service.process.metrics}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def scraped(service: Service, name: str) -> float:
    """Sum over the labels of a metric; 0 where it was never set."""
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text_of(service), flags=re.MULTILINE)
    return sum(float(value) for value in found)
