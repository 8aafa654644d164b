# SPDX-License-Identifier: Apache-2.0
"""A client of the broker for tests of whole suites: one stream with many requests, or one live call."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.common.errors import FabricError, from_status
from services.common.rpc import channel, translated
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from tests.jobs.running import Fabric

Request = broker_service_pb2.GenerationRequest
Outcome = broker_service_pb2.GenerationResult | FabricError


def request(request_id: str, ids: Sequence[int], max_tokens: int | None = 4, **more: Any) -> Request:
    """A request on token ids."""
    made = Request(request_id=request_id, max_tokens=max_tokens, **more)
    made.prompt.tokens.ids.extend(ids)
    return made


class Client:
    """A client on one channel.

    Args:
        stub: Of the broker.
    """

    def __init__(self, stub: broker_service_pb2_grpc.BrokerServiceAsyncStub) -> None:
        self.stub = stub

    async def exchange(
        self,
        requests: Iterable[Request],
        *,
        within_s: float = 2 * PATIENCE_S,
        cancel: Sequence[str] = (),
        batch: int = 10_000,
    ) -> dict[str, list[Outcome]]:
        """Runs requests over one stream; all outcomes of each id, of which there should be one."""
        listed = list(requests)

        async def messages() -> AsyncIterator[broker_service_pb2.ExchangeRequest]:
            yield broker_service_pb2.ExchangeRequest(open=broker_service_pb2.ExchangeOpen())
            for start in range(0, len(listed), batch):
                yield broker_service_pb2.ExchangeRequest(requests=listed[start : start + batch])
            if cancel:
                yield broker_service_pb2.ExchangeRequest(cancel_request_ids=cancel)

        outcomes: dict[str, list[Outcome]] = {}
        call = self.stub.Exchange(messages(), timeout=within_s)
        try:
            with translated():
                async for message in call:
                    for outcome in message.outcomes:
                        outcomes.setdefault(outcome.request_id, []).append(result_of(outcome))
        finally:
            call.cancel()
        return outcomes

    async def one(self, made: Request, *, within_s: float = PATIENCE_S) -> broker_service_pb2.GenerationResult:
        """One live call."""
        with translated():
            answer = await self.stub.Generate(broker_service_pb2.GenerateRequest(request=made), timeout=within_s)
        return answer.result

    async def refusal(self, made: Request) -> FabricError:
        """The error of one live call, which must have one."""
        try:
            await self.one(made)
        except FabricError as error:
            return error
        raise AssertionError("the request was served")

    async def engines(self) -> int:
        """How many nodes serve."""
        listed = await self.stub.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=PATIENCE_S)
        return sum(len(engine.node_ids) for engine in listed.engines)


@asynccontextmanager
async def client_of(fabric: Fabric, *, nodes: int = 1) -> AsyncIterator[Client]:
    """A client, once so many nodes serve."""
    async with channel(fabric.brokers[0].address) as made:
        client = Client(broker_service_pb2_grpc.BrokerServiceStub(made))

        async def ready() -> bool:
            try:
                with translated():
                    return await client.engines() >= nodes
            except FabricError:
                return False

        await wait_until(ready, within_s=2 * PATIENCE_S, what=f"{nodes} nodes serve")
        yield client


def result_of(outcome: broker_service_pb2.RequestOutcome) -> Outcome:
    """What became of a request."""
    return from_status(outcome.failed) if outcome.HasField("failed") else outcome.finished
