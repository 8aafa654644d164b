# SPDX-License-Identifier: Apache-2.0
"""A client that does not read stops its own stream, from the broker back to the engine, and nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import psutil
import pytest

from engines.simulated import Simulation, write_simulated_engine
from ifabric.broker.v1 import broker_service_pb2 as wire
from ifabric.broker.v1 import broker_service_pb2_grpc
from ifabric.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.common.rpc import channel
from tests.support.processes import ServiceProcess
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS, BATCH, HIDDEN = 4000, 100, 4096
"""Payloads of 8 KB: 4,096 values of two bytes."""
KEPT = 2 * 1024 * 1024
"""What the broker may keep for a stream that is not read, in bytes."""
MIB = 1024 * 1024


@pytest.fixture
def mining(tmp_path: Path) -> Iterator[tuple[ServiceProcess, ServiceProcess, Simulation]]:
    """A broker, and a worker on an engine that answers with hidden states."""
    engine = write_simulated_engine(
        tmp_path / "engine", max_output_tokens=0, max_input_tokens=128, payload_dtype="float16", hidden_size=HIDDEN
    )
    with (
        ServiceProcess("services.provisioner") as provisioner,
        ServiceProcess(
            "services.worker",
            {"engine_dir": str(tmp_path / "engine"), "provisioner": provisioner.address, "node_id": "w"},
        ) as worker,
        ServiceProcess(
            "services.broker", {"provisioner": provisioner.address, "stream_result_bytes_max": KEPT}
        ) as broker,
    ):
        yield broker, worker, Simulation(engine)


def _prompt(at: int) -> list[int]:
    return [at % 250, at // 250, 7]


async def _send(call: Any, job: str, count: int) -> None:
    for first in range(0, count, BATCH):
        message = wire.ExchangeRequest()
        if not first:
            message.open.CopyFrom(wire.ExchangeOpen(job_id=job))
        for at in range(first, first + BATCH):
            request = message.requests.add(request_id=f"{job}-{at}")
            request.prompt.tokens.ids.extend(_prompt(at))
        await call.write(message)
    await call.done_writing()


async def _read(call: Any) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    while (answer := await call.read()) is not grpc.aio.EOF:
        for outcome in answer.outcomes:
            assert not outcome.HasField("failed"), outcome.failed.message
            if outcome.HasField("finished"):
                assert outcome.finished.request_id not in found, "a result came twice"
                found[outcome.finished.request_id] = outcome.finished.payload.data
    return found


async def test_a_slow_reader_of_large_payloads_stops_itself_and_nobody_else(
    mining: tuple[ServiceProcess, ServiceProcess, Simulation],
) -> None:
    broker, worker, simulation = mining
    process = psutil.Process(broker.pid)
    async with channel(broker.address) as made, channel(broker.address) as other, channel(worker.address) as near:
        stub = broker_service_pb2_grpc.BrokerServiceStub(made)
        await wait_until(_serves(stub), what="an engine that serves")
        engine = worker_service_pb2_grpc.WorkerServiceStub(near)

        async def computed() -> int:
            answer = await engine.Describe(worker_service_pb2.DescribeRequest(), timeout=30)
            return int(answer.stats.requests_finished)

        slow = stub.Exchange()
        sending = asyncio.create_task(_send(slow, "slow", ROWS))
        before = process.memory_info().rss
        last = -1

        async def stands_still() -> bool:
            nonlocal last
            now, last_now = await computed(), last
            last = now
            return now > 0 and now == last_now

        await wait_until(stands_still, what="a stream that stands still")
        held = await computed()
        assert held < ROWS / 2, "the engine went on for somebody who does not read"

        quick = broker_service_pb2_grpc.BrokerServiceStub(other).Exchange()
        await _send(quick, "quick", 500)
        assert len(await _read(quick)) == 500
        assert await computed() - 500 < ROWS / 2, "it goes on meanwhile"
        assert process.memory_info().rss - before < 120 * MIB

        found = await _read(slow)
        await sending
        assert len(found) == ROWS
        for at in (0, 1, ROWS - 1):
            values = np.frombuffer(found[f"slow-{at}"], np.float16)
            assert np.array_equal(values.astype(np.float32), simulation.payload(_prompt(at)))


def _serves(stub: Any) -> Any:
    async def ask() -> bool:
        answer = await stub.ListEngines(wire.ListEnginesRequest(), timeout=30)
        return any(engine.node_ids for engine in answer.engines)

    return ask
