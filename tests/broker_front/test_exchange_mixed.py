# SPDX-License-Identifier: Apache-2.0
"""Many streams with everything at once: whatever a client does, each request that it sent ends exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import pytest

from ifabric.broker.v1 import broker_service_pb2
from tests.broker_front.conftest import House, house
from tests.broker_front.made import byte_level, ids_of, request
from tests.support.waiting import PATIENCE_S, wait_until

Message = broker_service_pb2.ExchangeRequest
WORDS = ["fox", "dog", "Grüße", "聪明", "👩‍🚀", "the lazy", "int i"]


def made(draw: random.Random, tenant: str, number: int) -> broker_service_pb2.GenerationRequest:
    """A request of one of many kinds; some of them wrong."""
    kinds: list[list[int] | str] = [[5, 6, 7], " ".join(draw.choices(WORDS, k=3)), [], [5, -1], [9] * 70]
    return request(
        draw.choice(kinds),
        request_id=f"{tenant}-{draw.randrange(number + 1) if draw.random() < 0.05 else number}",
        tenant=tenant,
        max_tokens=draw.choice([1, 8, 48, 0]) if draw.random() < 0.2 else 8,
        stop=draw.choice([[], [], ["fox"], ["o", " d"]]),
        samples=draw.choice([1, 1, 3]),
        return_token_ids=draw.random() < 0.5,
        lane=draw.choice([0, 1, 2]),
    )


async def client(home: House, draw: random.Random, tenant: str, *, leaves: bool) -> None:
    call = home.stub.Exchange()
    sent: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    failed = 0
    deltas: dict[tuple[str, int], str] = {}
    report: broker_service_pb2.JobReport | None = None

    async def write() -> None:
        await call.write(
            Message(open=broker_service_pb2.ExchangeOpen(job_id=tenant, stream_deltas=draw.random() < 0.5))
        )
        number = 0
        for _ in range(12):
            batch = [made(draw, tenant, number := number + 1) for _ in range(draw.randrange(30))]
            sent.update(item.request_id for item in batch)
            cancel = [f"{tenant}-{draw.randrange(number + 1)}"] if draw.random() < 0.3 else []
            await call.write(Message(requests=batch, cancel_request_ids=cancel))
        await call.done_writing()

    writing = asyncio.create_task(write())
    messages = 0
    while True:
        reply = await asyncio.wait_for(call.read(), PATIENCE_S)
        if not isinstance(reply, broker_service_pb2.ExchangeResponse):
            break
        assert report is None, "something after the report"
        messages += 1
        if leaves and messages == 3:
            call.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            return
        for delta in reply.deltas:
            key = (delta.request_id, delta.delta.sample)
            deltas[key] = deltas.get(key, "") + delta.delta.text
        for outcome in reply.outcomes:
            ended[outcome.request_id] += 1
            failed += outcome.WhichOneof("outcome") == "failed"
            for index, sample in enumerate(outcome.finished.samples):
                text = deltas.pop((outcome.request_id, index), "") + sample.text
                if index == 0 and sample.stop:  # the others start in the middle of the prompt's echo
                    assert sample.stop not in text
                    assert "\N{REPLACEMENT CHARACTER}" not in text
        report = reply.report if reply.HasField("report") else None
        if draw.random() < 0.3:
            await asyncio.sleep(draw.random() * 0.01)  # a client that takes its time
    await writing
    assert await call.code() is grpc.StatusCode.OK
    assert ended == sent
    assert report is not None
    assert (report.requests, report.failed) == (sent.total(), failed)


@pytest.mark.parametrize("seed", range(4))
async def test_every_request_of_every_stream_ends_once(seed: int) -> None:
    draw = random.Random(seed)
    async with house(result_bytes=20_000, prompt_tokens=64 * 60) as home:
        home.core.waiting_max = 100
        home.core.tokens_a_step = 3
        home.core.end_tokens = frozenset(ids_of(byte_level(), "!"))
        await asyncio.gather(
            *(client(home, random.Random(draw.random()), f"t{index}", leaves=index % 4 == 3) for index in range(8))
        )
        await wait_until(lambda: not home.core.works)
        await wait_until(lambda: len(home.core.ended_jobs) == 8)
        assert not home.core.paused - set(home.core.ended_jobs)
