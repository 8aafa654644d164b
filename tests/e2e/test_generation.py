# SPDX-License-Identifier: Apache-2.0
"""Generation through three real services: sharing, reproducibility, streams, cancellation."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric.engine.v1 import generation_pb2, node_pb2
from ifabric.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.common.rpc import channel
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.suite import RunningSuite

HEAD_TOKENS, BLOCK = 400, 64


@asynccontextmanager
async def broker_of(suite: RunningSuite) -> AsyncIterator[broker_service_pb2_grpc.BrokerServiceAsyncStub]:
    async with channel(suite.broker) as to_broker:
        yield broker_service_pb2_grpc.BrokerServiceStub(to_broker)


async def engine_stats(suite: RunningSuite) -> node_pb2.EngineStats:
    async with channel(suite.workers[0]) as to_worker:
        stub = worker_service_pb2_grpc.WorkerServiceStub(to_worker)
        return (await stub.Describe(worker_service_pb2.DescribeRequest(), timeout=30)).stats


def text_request(text: str, *, most: int, name: str = "") -> broker_service_pb2.GenerationRequest:
    request = broker_service_pb2.GenerationRequest(request_id=name, max_tokens=most, return_token_ids=True)
    request.prompt.text = text
    return request


async def job(
    suite: RunningSuite, requests: list[broker_service_pb2.GenerationRequest], *, deltas: bool = False
) -> tuple[dict[str, broker_service_pb2.GenerationResult], broker_service_pb2.JobReport, dict[str, str]]:
    """Runs requests over one stream; all must finish. Returns results, report and streamed texts."""

    async def messages() -> AsyncIterator[broker_service_pb2.ExchangeRequest]:
        opening = broker_service_pb2.ExchangeOpen(job_id="e2e", stream_deltas=deltas)
        yield broker_service_pb2.ExchangeRequest(open=opening, requests=requests)

    results: dict[str, broker_service_pb2.GenerationResult] = {}
    texts: dict[str, str] = {}
    report = None
    async with broker_of(suite) as broker:
        async for message in broker.Exchange(messages(), timeout=100):
            for delta in message.deltas:
                texts[delta.request_id] = texts.get(delta.request_id, "") + delta.delta.text
            for outcome in message.outcomes:
                assert outcome.HasField("finished"), outcome
                results[outcome.request_id] = outcome.finished
            if message.HasField("report"):
                report = message.report
    assert report is not None
    assert len(results) == len(requests)
    return results, report, texts


async def test_a_head_that_32_prompts_share_is_computed_once(suite: RunningSuite) -> None:
    head = [(7 * position) % 40_000 + 100 for position in range(HEAD_TOKENS)]
    requests = []
    for number in range(32):
        request = broker_service_pb2.GenerationRequest(request_id=f"r{number}", max_tokens=2)
        request.prompt.tokens.ids.extend([*head, *(1000 + 31 * number + step for step in range(20))])
        requests.append(request)
    before = await engine_stats(suite)
    results, report, _ = await job(suite, requests)
    after = await engine_stats(suite)

    # What is shared is whole blocks: the rest of the head belongs to each prompt's own tail.
    shared = HEAD_TOKENS // BLOCK * BLOCK
    least = shared + 32 * (HEAD_TOKENS + 20 - shared)
    assert report.prompt_tokens_logical == 32 * (HEAD_TOKENS + 20)
    assert report.prompt_tokens_bound == least
    assert report.prompt_tokens_computed == least
    assert after.prompt_tokens_computed - before.prompt_tokens_computed == least, "the engine's own counter"
    cached = sorted(result.usage.cached_tokens for result in results.values())
    assert cached == [0, *[shared] * 31]


async def test_the_same_request_gives_the_same_tokens_alone_and_in_a_batch(suite: RunningSuite) -> None:
    prompts = [f"Question {number}: name a city by the sea.\nAnswer:" for number in range(12)]
    requests = [text_request(prompt, most=12, name=f"r{number}") for number, prompt in enumerate(prompts)]
    for request in requests[::2]:
        request.sampling.temperature = 0.9
        request.sampling.seed = 11
    together, _, _ = await job(suite, requests)
    async with broker_of(suite) as broker:
        for request in requests[:4]:
            alone = await broker.Generate(broker_service_pb2.GenerateRequest(request=request), timeout=PATIENCE_S)
            batched = together[request.request_id].samples[0]
            assert alone.result.samples[0].token_ids == batched.token_ids
            assert alone.result.samples[0].text == batched.text


async def test_deltas_add_up_to_the_answer(suite: RunningSuite) -> None:
    prompts = ["Wörter mit Umlauten: ä, ö, ü,", "Emoji: 😀 😁 😂", "漢字：東京、京都、", "Greek: α, β, γ,"]  # noqa: RUF001
    requests = [text_request(prompt, most=24, name=f"r{number}") for number, prompt in enumerate(prompts)]
    whole, _, _ = await job(suite, requests)
    _, _, streamed = await job(suite, requests, deltas=True)
    assert streamed == {name: result.samples[0].text for name, result in whole.items() if result.samples[0].text}


async def test_a_stop_string_ends_the_text_before_itself(suite: RunningSuite) -> None:
    free = text_request("One, two, three, four,", most=24, name="free")
    results, _, _ = await job(suite, [free])
    text = results["free"].samples[0].text
    assert len(text) > 8
    stop = text[4:8]  # crosses token borders wherever those are
    stopped = text_request("One, two, three, four,", most=24, name="stopped")
    stopped.stop.append(stop)
    results, _, _ = await job(suite, [stopped])
    sample = results["stopped"].samples[0]
    assert sample.text == text[: text.index(stop)]
    assert (sample.finish_reason, sample.stop) == (generation_pb2.FINISH_REASON_STOP, stop)


async def test_a_stream_has_one_start_numbered_messages_and_one_end(suite: RunningSuite) -> None:
    async with broker_of(suite) as broker:
        request = broker_service_pb2.GenerateStreamRequest(request=text_request("Once upon a time", most=12))
        messages = [message async for message in broker.GenerateStream(request, timeout=PATIENCE_S)]
    assert [message.sequence_number for message in messages] == list(range(len(messages)))
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    assert messages[0].started.prompt_tokens == messages[-1].finished.usage.prompt_tokens
    assert messages[-1].finished.usage.generated_tokens <= 12


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_client_that_goes_away_leaves_nothing_in_the_engine(suite: RunningSuite, after: int) -> None:
    request = text_request("Count as far as you can: 1, 2, 3,", most=256)
    request.ignore_end = True
    async with broker_of(suite) as broker:
        call = broker.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=request), timeout=40)
        for _ in range(after + 1):
            assert await call.read() is not grpc.aio.EOF
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()

    async def idle() -> bool:
        stats = await engine_stats(suite)
        return stats.active == 0 and stats.queued == 0

    await wait_until(idle, what="an idle engine")


async def test_cancel_by_id_ends_a_request_with_its_reason(suite: RunningSuite) -> None:
    request = text_request("Count as far as you can: 1, 2, 3,", most=256, name="to-cancel")
    request.ignore_end = True
    async with broker_of(suite) as broker:
        call = broker.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=request), timeout=40)
        async for message in call:
            if message.HasField("delta"):
                break
        cancel = broker_service_pb2.CancelRequestsRequest(request_ids=["to-cancel", "unknown"])
        assert (await broker.CancelRequests(cancel, timeout=30)).cancelled_count == 1
        last = [message async for message in call][-1]
        assert last.finished.samples[0].finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        assert (await broker.CancelRequests(cancel, timeout=30)).cancelled_count == 0
