# SPDX-License-Identifier: Apache-2.0
"""A core on this event loop, with real provisioner and worker processes behind it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from engines.simulated import SimulatedEngine, Simulation, write_simulated_engine
from services.broker.core import Broker, CoreSettings
from services.common.rpc import Dialer
from services.common.tasks import Tasks
from services.common.telemetry import Telemetry
from tests.broker_core.made import RecordingSink, work
from tests.support.processes import ServiceProcess
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from services.broker.work import Work
    from tests.broker_core.tap import Tap

SLOW = {"time_mode": "real", "step_us": 20_000}
"""An engine that needs 20 ms for a step: a request of 50 tokens takes a second."""


@dataclass
class Fleet:
    """The core and what is behind it."""

    broker: Broker
    provisioner: ServiceProcess
    folder: Path
    stack: AsyncExitStack
    failures: list[str]
    workers: dict[str, ServiceProcess] = field(default_factory=dict)
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)
    """By digest."""

    async def start_worker(
        self, name: str, engine_id: str = "engine", *, tap: Tap | None = None, **engine: Any
    ) -> ServiceProcess:
        """Starts a worker; its engine is written where there is none of that id. Brokers reach it through `tap`."""
        directory = self.folder / engine_id
        if not directory.exists():
            write_simulated_engine(directory, engine_id=engine_id, **engine)
        process = await asyncio.to_thread(
            ServiceProcess,
            "services.worker",
            {
                "engine_dir": str(directory),
                "provisioner": self.provisioner.address,
                "node_id": name,
                "drain_grace_s": 2.0,
                **({"advertise": tap.address} if tap is not None else {}),
            },
        )
        if tap is not None:
            tap.relay_to(process.address)
        self.stack.callback(process.kill)
        self.workers[name] = process
        return process

    async def up(self, *names: str) -> None:
        """Waits until the core holds streams to these nodes and no others."""
        await wait_until(lambda: self.nodes() == set(names), what=f"streams to {names}")

    def nodes(self) -> set[str]:
        """Nodes that take work now."""
        return {w.node_id for w in self.broker.decision.scheduler.workers.values() if w.serving}

    def digest(self, engine_id: str = "engine") -> str:
        """Digest of an engine."""
        return next(e.digest for e in self.broker.catalog.engines() if e.contract.engine_id == engine_id)

    def works(self, count: int, *, digests: frozenset[str] | None = None, **wanted: Any) -> list[Work]:
        """Submits distinct work, or raises the first refusal."""
        made = [
            work([at % 200 + 1, *range(7)], digests=digests or frozenset({self.digest()}), **wanted)
            for at in range(count)
        ]
        return self.submit(made)

    def submit(self, made: list[Work]) -> list[Work]:
        """Submits work, or raises the first refusal."""
        for refusal in self.broker.submit(made):
            if refusal is not None:
                raise refusal
        return made

    async def ended(self, works: list[Work], *, within_s: float = 2 * PATIENCE_S) -> list[Any]:
        """Waits for the ends of works and returns them."""
        sinks = [made.sink for made in works]
        assert all(isinstance(sink, RecordingSink) for sink in sinks)
        await wait_until(
            lambda: all(sink.ends for sink in sinks),  # type: ignore[attr-defined]
            within_s=within_s,
            what="the end of all work",
        )
        return [sink.end for sink in sinks]  # type: ignore[attr-defined]

    async def ended_at_least(self, count: int, works: list[Work]) -> None:
        """Waits until so many of works have ended."""
        await wait_until(
            lambda: sum(bool(made.sink.ends) for made in works) >= count,  # type: ignore[attr-defined]
            within_s=2 * PATIENCE_S,
            what=f"{count} ends",
        )

    def simulation(self, engine_id: str = "engine", **engine: Any) -> Simulation:
        """What an engine that was written so answers."""
        return Simulation(SimulatedEngine(engine_id=engine_id, **engine))

    def outstanding(self, name: str) -> int:
        """Attempts at a node."""
        return sum(len(w.outstanding) for w in self.broker.decision.scheduler.workers.values() if w.node_id == name)


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., Any]:
    """Makes a fleet; its keywords are settings of the core."""

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[Fleet]:
        failures: list[str] = []
        async with AsyncExitStack() as stack:
            provisioner = ServiceProcess("services.provisioner", {"heartbeat_interval_ms": 500})
            stack.callback(provisioner.kill)
            telemetry = Telemetry("broker")
            stack.callback(telemetry.close)
            tasks = Tasks(failures.append)
            stack.push_async_callback(tasks.close)
            broker = Broker(
                CoreSettings(**{"bulk_linger_s": 0.005, **settings}),
                provisioner.address,
                broker_id="test",
                telemetry=telemetry,
                tasks=tasks,
                dialer=Dialer(),
            )
            stack.push_async_callback(broker.stop)
            await broker.start()
            yield Fleet(broker, provisioner, tmp_path, stack, failures)
        assert not failures

    return make
