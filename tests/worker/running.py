# SPDX-License-Identifier: Apache-2.0
"""A worker's servicer over a real engine and a real socket, inside the test's event loop."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from engines.simulated import SimulatedEngine, Simulation, write_simulated_engine
from ifabric.worker.v1 import worker_service_pb2_grpc
from services.common import contract
from services.common.contract import Contract
from services.common.telemetry import Telemetry
from services.worker.credit import CreditBook
from services.worker.description import DirectoryReader, capacity, node_description
from services.worker.engine_host import EngineHost
from services.worker.main import FULL_NAME
from services.worker.metrics import EngineMetrics
from services.worker.servicer import WorkerServicer
from tests.support.servers import serving
from tests.worker.peers import Broker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.common.rpc import Server


GENERATING: dict[str, Any] = {
    "vocab_size": 1000, "max_input_tokens": 192, "max_sequence_tokens": 256, "max_output_tokens": 64, "slots": 8,
    "step_token_budget": 256, "kv_pool_blocks": 128, "samples_max": 4, "longest_step_ms": 1000,
    "time_mode": "real", "step_us": 500, "prompt_token_ns": 0, "generated_token_ns": 0,
}  # fmt: skip
"""A small engine whose steps take half a millisecond."""
LONG_TOKENS = 8000
LONG: dict[str, Any] = {
    "max_output_tokens": LONG_TOKENS, "max_sequence_tokens": 192 + LONG_TOKENS, "kv_pool_blocks": 16_384,
}  # fmt: skip
"""What makes it one on which an item lasts, at some milliseconds a step, until a test has done with it."""
MINING: dict[str, Any] = {
    **GENERATING, "max_input_tokens": 128, "max_sequence_tokens": 128, "max_output_tokens": 0,
    "kv_block_tokens": None, "kv_pool_blocks": None, "samples_max": 1, "scoring": False, "payload_dtype": "float32",
}  # fmt: skip
"""The same, made for hidden states: 64 values of float32 a request."""


class Running:
    """What a test holds of it."""

    def __init__(self, directory: Path, engine: SimulatedEngine, telemetry: Telemetry) -> None:
        self.directory = directory
        self.digest = contract.engine_digest(directory)
        self.simulation = Simulation(engine)
        self.failures: list[str] = []
        self.host = EngineHost(self.failures.append)
        self.servicer = WorkerServicer(directory, self.host, EngineMetrics(telemetry), telemetry.tracer)
        self.address = ""
        self.server: Server

    def broker(self, **options: Any) -> Broker:
        """Another broker."""
        return Broker(self.address, self.digest, **options)

    async def load(self) -> None:
        """Loads the engine and opens for work, as the worker's main does."""
        node = node_description(
            DirectoryReader(self.directory).read(), node_id="node-1", incarnation="one", address=self.address
        )
        self.servicer.describe_as(node)
        description = await self.host.load(self.directory)
        self.servicer.open(CreditBook(capacity(Contract.from_proto(node.contract), description)))


@asynccontextmanager
async def running(
    directory: Path, kind: dict[str, Any] = GENERATING, *, load: bool = True, **engine: Any
) -> AsyncIterator[Running]:
    """Runs a worker's servicer over a simulated engine of a kind; further keywords are fields that differ."""
    telemetry = Telemetry("worker")
    made = Running(directory, write_simulated_engine(directory, **{**kind, **engine}), telemetry)
    try:
        async with serving(
            worker_service_pb2_grpc.add_WorkerServiceServicer_to_server, made.servicer, FULL_NAME, telemetry=telemetry
        ) as server:
            made.server, made.address = server, server.address
            if load:
                await made.load()
            yield made
    finally:
        await made.host.close()
        telemetry.close()
