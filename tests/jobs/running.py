# SPDX-License-Identifier: Apache-2.0
"""The suite as separate processes, each of which a test may kill and start again at the same address."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from engines.simulated import write_simulated_engine
from tests.support.ports import held_port
from tests.support.processes import ServiceProcess

if TYPE_CHECKING:
    from pathlib import Path

ENGINE: dict[str, Any] = {
    "time_mode": "real", "step_us": 100, "prompt_token_ns": 0, "generated_token_ns": 0, "slots": 64,
    "step_token_budget": 2048, "kv_pool_blocks": 8192, "kv_block_tokens": 16,
}  # fmt: skip
"""An engine that is quick: a step takes a tenth of a millisecond."""
START_WITHIN_S = 120.0
"""Tests start many processes, and other tests run beside them."""
DIRECTLY = {"heartbeat_interval_ms": 100}


class Service:
    """One process that can be killed and started again, at an address that nobody else gets meanwhile."""

    def __init__(self, module: str, settings: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self._module = module
        self._stack = ExitStack()
        self.settings = {"listen": self._stack.enter_context(held_port()), **settings}
        self._env = env
        self.process: ServiceProcess | None = None

    def start(self, **settings: Any) -> ServiceProcess:
        """Starts it; `settings` hold for this time only. It listens where it always does."""
        self.process = ServiceProcess(
            self._module, {**self.settings, **settings}, env=self._env, start_within_s=START_WITHIN_S
        )
        return self.process

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def close(self) -> None:
        """Ends it by SIGKILL, and gives its address back."""
        self.kill()
        self._stack.close()

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self.process is not None
        return self.process.address


class Fabric:
    """Provisioner, workers and brokers.

    Args:
        folder: For engines and the journal.
        journal: Where jobs are kept; a file in the folder if empty.
        brokers: How many brokers.
        workers: How many workers.
        engine: Fields of the simulated engine that differ from `ENGINE`.
        broker: Settings of brokers that differ.
        worker_env: What the environment of the workers has besides.
        broker_env: The same of brokers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        journal: str = "",
        brokers: int = 1,
        workers: int = 1,
        engine: dict[str, Any] | None = None,
        broker: dict[str, Any] | None = None,
        worker_env: dict[str, str] | None = None,
        broker_env: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.journal = journal or str(folder / "journal.db")
        if not (folder / "engine").exists():
            write_simulated_engine(folder / "engine", **{**ENGINE, **(engine or {})})
        self.provisioner = Service("services.provisioner", dict(DIRECTLY))
        address = self.provisioner.start().address
        self.workers = [
            Service(
                "services.worker",
                {"engine_dir": folder / "engine", "provisioner": address, "node_id": f"node-{number}"},
                worker_env,
            )
            for number in range(workers)
        ]
        self.brokers = [
            Service(
                "services.broker",
                {
                    "provisioner": address, "journal": self.journal, "broker_id": f"broker-{number}",
                    "payload_dir": str(folder / "payloads"), **(broker or {}),
                },
                broker_env,
            )
            for number in range(brokers)
        ]  # fmt: skip

    @property
    def services(self) -> list[Service]:
        """All of them."""
        return [self.provisioner, *self.workers, *self.brokers]

    def start(self) -> Self:
        """Starts workers and brokers."""
        for service in (*self.workers, *self.brokers):
            service.start()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for service in reversed(self.services):
            service.close()
