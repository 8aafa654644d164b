# SPDX-License-Identifier: Apache-2.0
"""Engines behind the one C interface, each with the whole suite in front of it; and what a client asks of them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.common.rpc import channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from ifabric.engine.v1 import node_pb2
    from tests.support.suite import RunningSuite

    Request = broker_service_pb2.GenerationRequest


@dataclass(frozen=True, slots=True)
class Engines:
    """Engine directories of one backend: one that generates, and one that gives hidden states."""

    texts: Path
    states: Path
    env: Mapping[str, str]
    """For the processes that load them."""


def contract(directory: Path) -> dict[str, Any]:
    """The contract of an engine directory."""
    return dict(json.loads((directory / "contract.json").read_bytes()))


@dataclass(frozen=True, slots=True)
class Door:
    """A running suite in front of the engines of one backend. Nothing here depends on which one it is."""

    suite: RunningSuite
    texts: dict[str, Any]
    """Contract of the engine that generates."""
    states: dict[str, Any]
    """Contract of the engine that gives hidden states."""

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[broker_service_pb2_grpc.BrokerServiceAsyncStub]:
        """The broker's stub."""
        async with channel(self.suite.broker) as to_broker:
            yield broker_service_pb2_grpc.BrokerServiceStub(to_broker)

    def request(self, name: str, prompt: str | list[int], *, most: int, states: bool = False) -> Request:
        """A request for one of the two engines."""
        made = broker_service_pb2.GenerationRequest(request_id=name, return_token_ids=not states)
        if most:
            made.max_tokens = most
        made.engine.engine_id = (self.states if states else self.texts)["engine_id"]
        if isinstance(prompt, str):
            made.prompt.text = prompt
        else:
            made.prompt.tokens.ids.extend(prompt)
        return made

    async def exchange(
        self, requests: list[Request], *, deltas: bool = False
    ) -> tuple[dict[str, broker_service_pb2.RequestOutcome], broker_service_pb2.JobReport, dict[str, str]]:
        """Runs requests over one stream. Returns outcomes by name, the report, and the texts that were streamed."""

        async def messages() -> AsyncIterator[broker_service_pb2.ExchangeRequest]:
            opening = broker_service_pb2.ExchangeOpen(job_id="door", stream_deltas=deltas)
            yield broker_service_pb2.ExchangeRequest(open=opening, requests=requests)

        outcomes: dict[str, broker_service_pb2.RequestOutcome] = {}
        texts: dict[str, str] = {}
        report = None
        async with self.broker() as broker:
            async for message in broker.Exchange(messages(), timeout=100):
                for delta in message.deltas:
                    texts[delta.request_id] = texts.get(delta.request_id, "") + delta.delta.text
                for outcome in message.outcomes:
                    assert outcome.request_id not in outcomes, f"{outcome.request_id} ended twice"
                    outcomes[outcome.request_id] = outcome
                if message.HasField("report"):
                    report = message.report
        assert report is not None
        assert len(outcomes) == len(requests)
        return outcomes, report, texts

    async def stats(self) -> list[node_pb2.EngineStats]:
        """What the engines count, the one that generates first."""
        found = []
        for address in self.suite.workers:
            async with channel(address) as to_worker:
                stub = worker_service_pb2_grpc.WorkerServiceStub(to_worker)
                found.append((await stub.Describe(worker_service_pb2.DescribeRequest(), timeout=30)).stats)
        return found
