# SPDX-License-Identifier: Apache-2.0
"""What the intake does when its own tools fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.common.clock import SystemClock
from services.common.errors import FailedPreconditionError
from services.common.tasks import Tasks
from services.common.telemetry import Telemetry
from services.provisioner.intake import Intake
from services.provisioner.registry import REFUSED, Registry
from tests.provisioner import made
from tests.support.logged import captured_logs

if TYPE_CHECKING:
    from ifabric.worker.v1 import worker_service_pb2


class BrokenProber:
    """Fails as no prober should."""

    async def probe(self, address: str) -> worker_service_pb2.ProbeResponse:
        raise RuntimeError("a fault of ours")


async def test_a_node_that_trips_us_up_is_refused_and_ends_nothing_else() -> None:
    failures: list[str] = []
    telemetry = Telemetry("test")
    tasks = Tasks(failures.append)
    registry = Registry(SystemClock(), lease_s=3.0, nodes_max=10)
    intake = Intake(registry, BrokenProber(), tasks, telemetry)
    node = made.description()
    with captured_logs() as lines, pytest.raises(FailedPreconditionError) as caught:
        await intake.register(node, made.report(node))
    (violation,) = caught.value.violations
    assert violation.field == "probe"
    assert "RuntimeError" in violation.description
    assert "a fault of ours" not in violation.description
    assert len(lines.all("probe.failed")) == 1
    kept = registry.find(node.node_id)
    assert kept is not None
    assert kept.state == REFUSED
    assert failures == []
    await tasks.close()
    telemetry.close()
