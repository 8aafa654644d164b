# SPDX-License-Identifier: Apache-2.0
"""Our broker, asked one request a stream, and in bulk with everything that a request can say."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.common.rpc import translated

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

    from engines.targets.target import OnTokens

_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer."""

    text: str
    tokens: int
    first_s: float
    """From sending to the first token, in seconds."""
    last_s: float
    """From sending to the last one."""
    finish_reason: int
    """Number of the proto's FinishReason."""

    @property
    def per_token_s(self) -> float:
        """Mean time between tokens; 0 where there are fewer than two."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


def _tokens_in(message: broker_service_pb2.GenerateStreamResponse) -> int:
    """Tokens that came with it; its end carries those that no delta had told."""
    return len(message.delta.token_ids) + sum(len(sample.token_ids) for sample in message.finished.samples)


class BrokerTarget:
    """One engine behind a broker.

    Args:
        channels: To the broker; streams are spread over them, since each carries a hundred well.
        engine_digest: Which engine; empty for any.
        limit_s: Deadline of a request, in seconds.
        at_once: Most calls that `answers` has open at a time.
    """

    def __init__(
        self,
        channels: Sequence[grpc.aio.Channel],
        *,
        engine_digest: str = "",
        limit_s: float = 120.0,
        at_once: int = _AT_ONCE,
    ) -> None:
        self._stubs = [broker_service_pb2_grpc.BrokerServiceStub(each) for each in channels]
        self._digest = engine_digest
        self._limit_s = limit_s
        self._at_once = at_once
        self._asked = 0

    @property
    def name(self) -> str:
        """See Target."""
        return "broker" + (f", engine {self._digest[:12]}" if self._digest else "")

    async def ask(self, prompt: str, max_tokens: int, on_tokens: OnTokens) -> None:
        """See Target."""
        request = broker_service_pb2.GenerationRequest(max_tokens=max_tokens, ignore_end=True, return_token_ids=True)
        request.prompt.text = prompt
        request.engine.engine_digest = self._digest
        self._asked += 1
        stub = self._stubs[self._asked % len(self._stubs)]
        call = stub.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=request), timeout=self._limit_s)
        try:
            with translated():
                async for message in call:
                    if tokens := _tokens_in(message):
                        on_tokens(tokens)
        finally:
            call.cancel()

    async def timed(self, request: broker_service_pb2.GenerationRequest) -> Timed:
        """One answer, with the times at which it came.

        Raises:
            FabricError: It was refused or failed.
        """
        request.engine.engine_digest = self._digest
        request.return_token_ids = True
        sent = time.monotonic()
        first = last = sent
        text, tokens, reason = "", 0, 0
        call = self._stubs[0].GenerateStream(
            broker_service_pb2.GenerateStreamRequest(request=request), timeout=self._limit_s
        )
        try:
            with translated():
                async for message in call:
                    text += message.delta.text + "".join(sample.text for sample in message.finished.samples)
                    if came := _tokens_in(message):
                        last = time.monotonic()
                        first = first if tokens else last
                        tokens += came
                    if message.HasField("finished"):
                        reason = message.finished.samples[0].finish_reason
        finally:
            call.cancel()
        return Timed(text, tokens, first - sent, last - sent, reason)

    async def answers(
        self, requests: Sequence[broker_service_pb2.GenerationRequest]
    ) -> list[broker_service_pb2.GenerationResult]:
        """Answers to many requests, in their order; all go to this target's engine.

        Raises:
            FabricError: One of them failed; the others are cancelled.
        """
        room = asyncio.Semaphore(self._at_once)

        async def one(
            number: int, request: broker_service_pb2.GenerationRequest
        ) -> broker_service_pb2.GenerationResult:
            request.engine.engine_digest = self._digest
            request.lane = broker_service_pb2.LANE_BULK
            stub = self._stubs[number % len(self._stubs)]
            async with room:
                with translated():
                    reply = await stub.Generate(
                        broker_service_pb2.GenerateRequest(request=request), timeout=self._limit_s
                    )
            return reply.result

        tasks = [asyncio.create_task(one(number, request)) for number, request in enumerate(requests)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
