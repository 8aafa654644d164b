# SPDX-License-Identifier: Apache-2.0
"""Live calls over real gRPC: answers, streams, errors, disconnects, deadlines, draining."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.broker.frontdoor.servicer import BrokerServicer
from services.common import reasons
from services.common.errors import FabricError, UnavailableError
from services.common.rpc import call_error
from tests.broker_front.conftest import house
from tests.broker_front.made import byte_level, ids_of, mining_contract, request
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from tests.support.logged import LogLines

Generate = broker_service_pb2.GenerateRequest
Stream = broker_service_pb2.GenerateStreamRequest
STOP, LENGTH, CANCELLED = (
    generation_pb2.FINISH_REASON_STOP,
    generation_pb2.FINISH_REASON_LENGTH,
    generation_pb2.FINISH_REASON_CANCELLED,
)


def ids(text: str) -> list[int]:
    return ids_of(byte_level(), text)


async def refusal(call: Any) -> FabricError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return call_error(caught.value)


def says(text: str) -> Any:
    """Makes the core answer with a text instead of echoing."""
    return lambda _prompt, _sample, _count: np.array(ids(text), np.int32)


async def events(
    call: AsyncIterable[broker_service_pb2.GenerateStreamResponse],
) -> list[broker_service_pb2.GenerateStreamResponse]:
    return [event async for event in call]


async def next_event(call: Any) -> broker_service_pb2.GenerateStreamResponse:
    event = await call.read()
    assert isinstance(event, broker_service_pb2.GenerateStreamResponse), "the stream ended"
    return event


async def test_an_answer_whole() -> None:
    async with house() as home:
        home.core.generate = says("The fox sleeps")
        reply = await home.stub.Generate(
            Generate(request=request("The dog", max_tokens=40, return_token_ids=True, logprobs=True)),
            timeout=PATIENCE_S,
        )
        (sample,) = reply.result.samples
        assert sample.text == "The fox sleeps"
        assert list(sample.token_ids) == ids("The fox sleeps")
        assert list(sample.logprobs) == [-0.5] * len(sample.token_ids)
        assert sample.finish_reason == LENGTH
        assert reply.result.engine_digest == home.digest
        assert reply.result.usage.prompt_tokens == len(ids("The dog"))
        assert reply.result.request_id == "r1"


async def test_ids_and_log_probabilities_only_where_asked_for() -> None:
    async with house() as home:
        reply = await home.stub.Generate(Generate(request=request()), timeout=PATIENCE_S)
        assert not reply.result.samples[0].token_ids
        assert not reply.result.samples[0].logprobs
        assert not reply.result.prompt_logprobs
        scored = await home.stub.Generate(Generate(request=request(prompt_logprobs=True)), timeout=PATIENCE_S)
        assert list(scored.result.prompt_logprobs) == [-1.0] * 3


async def test_a_request_written_as_json() -> None:
    """What grpcurl sends: names in JSON form, no id."""
    async with house() as home:
        wire = json_format.ParseDict(
            {"request": {"prompt": {"text": "The fox"}, "maxTokens": 6, "sampling": {"temperature": 0.7}}}, Generate()
        )
        reply = await home.stub.Generate(wire, timeout=PATIENCE_S)
        assert reply.result.request_id
        assert json_format.MessageToDict(reply)["result"]["samples"][0]["finishReason"] == "FINISH_REASON_LENGTH"


async def test_a_stream_starts_grows_and_finishes() -> None:
    async with house() as home:
        text = "Grüße, 聪明的狐狸 👩‍🚀!"
        home.core.generate = says(text)
        home.core.tokens_a_step = 1
        home.core.steps.close()
        call = home.stub.GenerateStream(
            Stream(request=request([5, 6], max_tokens=48, return_token_ids=True)), timeout=PATIENCE_S
        )
        got = [await next_event(call)]
        for _ in ids(text):
            home.core.steps.admit(1)
            got.append(await next_event(call))
        assert [event.sequence_number for event in got] == list(range(len(got)))
        assert got[0].started.prompt_tokens == 2
        assert got[0].started.engine_digest == home.digest
        assert all(event.WhichOneof("event") == "delta" for event in got[1:-1])
        (rest,) = got[-1].finished.samples
        assert "".join(event.delta.text for event in got[1:-1]) + rest.text == text
        assert [token for event in got[1:-1] for token in event.delta.token_ids] + list(rest.token_ids) == ids(text)
        assert not any("\N{REPLACEMENT CHARACTER}" in event.delta.text for event in got)
        assert rest.finish_reason == LENGTH


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_request_on_the_engine(stream: bool) -> None:
    async with house() as home:
        home.core.generate = says("The quick fox. The lazy dog sleeps on")
        home.core.tokens_a_step = 2
        made = request([5], max_tokens=48, stop=["nothing", "fox. T"], return_token_ids=True)
        if stream:
            got = await events(home.stub.GenerateStream(Stream(request=made), timeout=PATIENCE_S))
            text = "".join(event.delta.text for event in got[1:-1]) + got[-1].finished.samples[0].text
            tokens = [t for event in got[1:-1] for t in event.delta.token_ids]
            tokens += got[-1].finished.samples[0].token_ids
            sample = got[-1].finished.samples[0]
        else:
            reply = await home.stub.Generate(Generate(request=made), timeout=PATIENCE_S)
            (sample,) = reply.result.samples
            text, tokens = sample.text, list(sample.token_ids)
        assert text == "The quick "
        assert (sample.stop, sample.finish_reason) == ("fox. T", STOP)
        assert home.core.early == [("", "r1")]
        assert not home.core.works
        whole = ids("The quick fox. The lazy dog sleeps on")
        assert tokens == whole[: len(tokens)]
        assert len(tokens) < len(whole)


async def test_stop_tokens_are_no_text() -> None:
    async with house() as home:
        home.core.generate = says("ab cd")
        stop = ids("ab cd")[-1]
        reply = await home.stub.Generate(Generate(request=request(stop_token_ids=[stop])), timeout=PATIENCE_S)
        (sample,) = reply.result.samples
        assert "ab cd".startswith(sample.text)
        assert sample.text != "ab cd"
        assert (sample.finish_reason, sample.stop) == (STOP, "")


async def test_samples_end_each_in_their_own_way() -> None:
    texts = ["one fox END and more of it", "two foxes and no end"]
    async with house() as home:
        home.core.generate = lambda _prompt, sample, _count: np.array(ids(texts[sample]), np.int32)
        reply = await home.stub.Generate(
            Generate(request=request(samples=2, max_tokens=48, stop=["END"])), timeout=PATIENCE_S
        )
        first, second = reply.result.samples
        assert (first.text, first.finish_reason, first.stop) == ("one fox ", STOP, "END")
        assert (second.text, second.finish_reason, second.stop) == (texts[1], LENGTH, "")
        assert not home.core.early, "one sample still wanted its tokens"


async def test_an_engine_that_generates_nothing_answers_with_its_payload() -> None:
    async with house() as home:
        home.catalog.put(mining_contract(), byte_level())
        home.core.payload = lambda prompt: generation_pb2.Payload(data=bytes(32), position=len(prompt) - 1)
        reply = await home.stub.Generate(Generate(request=request(max_tokens=None)), timeout=PATIENCE_S)
        assert not reply.result.samples
        assert reply.result.payload.data == bytes(32)
        got = await events(home.stub.GenerateStream(Stream(request=request(max_tokens=None)), timeout=PATIENCE_S))
        assert [event.WhichOneof("event") for event in got] == ["started", "finished"]


async def test_refusals_are_statuses_with_details() -> None:
    async with house() as home:
        bad = request([5, -1], max_tokens=0)
        for call in (
            home.stub.Generate(Generate(request=bad), timeout=PATIENCE_S),
            events(home.stub.GenerateStream(Stream(request=bad), timeout=PATIENCE_S)),
        ):
            error = await refusal(call)
            assert error.reason == reasons.INVALID_FIELDS
            assert [violation.field for violation in error.violations] == ["max_tokens", "prompt.tokens.ids[1]"]
        assert not home.core.accepted


async def test_an_id_in_flight_is_refused_and_runs_anew_afterwards() -> None:
    async with house() as home:
        home.core.steps.close()
        first = asyncio.ensure_future(home.stub.Generate(Generate(request=request()), timeout=PATIENCE_S))
        await wait_until(lambda: home.core.works)
        error = await refusal(home.stub.Generate(Generate(request=request()), timeout=PATIENCE_S))
        assert error.reason == reasons.ID_IN_FLIGHT
        home.core.steps.admit()
        assert (await first).result.samples
        assert (await home.stub.Generate(Generate(request=request()), timeout=PATIENCE_S)).result.samples


async def test_tenants_have_ids_of_their_own() -> None:
    async with house() as home:
        home.core.steps.close()
        calls = [
            asyncio.ensure_future(home.stub.Generate(Generate(request=request(tenant=tenant)), timeout=PATIENCE_S))
            for tenant in ("a", "b")
        ]
        await wait_until(lambda: len(home.core.works) == 2)
        reply = await home.stub.CancelRequests(
            broker_service_pb2.CancelRequestsRequest(request_ids=["r1", "unknown"], tenant="a"), timeout=PATIENCE_S
        )
        assert reply.cancelled_count == 1
        assert (await calls[0]).result.samples[0].finish_reason == CANCELLED
        home.core.steps.admit()
        assert (await calls[1]).result.samples[0].finish_reason == LENGTH


async def test_a_client_that_goes_away_ends_its_request_at_once() -> None:
    async with house() as home:
        home.core.steps.close()
        calls: list[grpc.aio.Call] = [
            home.stub.Generate(Generate(request=request(request_id="gone-0")), timeout=2 * PATIENCE_S),
            home.stub.GenerateStream(Stream(request=request(request_id="gone-1")), timeout=2 * PATIENCE_S),
        ]
        await wait_until(lambda: len(home.core.works) == 2)
        for call in calls:
            call.cancel()
        await wait_until(lambda: not home.core.works)
        assert sorted(home.core.cancelled) == [("", "gone-0"), ("", "gone-1")]


async def test_a_client_that_leaves_in_the_middle_of_a_stream() -> None:
    async with house() as home:
        home.core.tokens_a_step = 1
        home.core.steps.close()
        home.core.steps.admit(1)
        call = home.stub.GenerateStream(Stream(request=request(max_tokens=48)), timeout=2 * PATIENCE_S)
        await call.read()
        assert (await next_event(call)).delta.text
        call.cancel()
        await wait_until(lambda: not home.core.works)
        assert home.core.cancelled == [("", "r1")]


async def test_the_clients_deadline_ends_the_request() -> None:
    async with house() as home:
        home.core.steps.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await home.stub.Generate(Generate(request=request()), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until(lambda: not home.core.works)


async def test_a_call_without_deadline_has_ours() -> None:
    async with house(live_timeout_s=0.1) as home:
        home.core.steps.close()
        for call in (
            home.stub.Generate(Generate(request=request())),
            events(home.stub.GenerateStream(Stream(request=request(request_id="r2")))),
        ):
            error = await refusal(call)
            assert error.reason == reasons.DEADLINE
            assert "0.1 s" in error.message
        await wait_until(lambda: not home.core.works)


async def test_a_lost_worker_ends_a_stream_that_was_read() -> None:
    async with house() as home:
        home.core.generate = says("The quick fox jumps over")
        home.core.tokens_a_step = 1
        home.core.steps.close()
        home.core.steps.admit(1)
        call = home.stub.GenerateStream(Stream(request=request(max_tokens=48)), timeout=PATIENCE_S)
        await call.read()
        assert (await next_event(call)).delta.text
        lost = UnavailableError("the worker is lost", reason=reasons.WORKER_LOST, retry_after_s=1)
        assert not home.core.lose_attempt(("", "r1"), lost)
        error = await refusal(call.read())
        assert (error.reason, error.retry_after_s) == (reasons.WORKER_LOST, 1)


async def test_a_lost_worker_is_not_noticed_where_nothing_was_read() -> None:
    async with house() as home:
        home.core.generate = says("The quick fox. The end")
        home.core.tokens_a_step = 1
        home.core.steps.close()
        home.core.steps.admit(2)
        call = asyncio.ensure_future(
            home.stub.Generate(Generate(request=request(max_tokens=48, stop=["The end"])), timeout=PATIENCE_S)
        )
        await wait_until(lambda: home.core.works and home.core.steps.waiting)
        assert home.core.lose_attempt(("", "r1"), UnavailableError("lost"))
        home.core.steps.admit()
        (sample,) = (await call).result.samples
        assert (sample.text, sample.stop) == ("The quick fox. ", "The end")


async def test_no_room_is_told_with_a_delay() -> None:
    async with house() as home:
        home.core.waiting_max = 0
        error = await refusal(home.stub.Generate(Generate(request=request()), timeout=PATIENCE_S))
        assert error.reason == reasons.BOUND_REACHED
        assert error.retry_after_s == pytest.approx(0.01)


async def test_a_draining_broker_takes_nothing_new_and_finishes_what_it_has() -> None:
    async with house() as home:
        home.core.steps.close()
        running = asyncio.ensure_future(home.stub.Generate(Generate(request=request()), timeout=PATIENCE_S))
        await wait_until(lambda: home.core.works)
        await home.servicer.drain()
        error = await refusal(home.stub.Generate(Generate(request=request(request_id="r2")), timeout=PATIENCE_S))
        assert error.reason == reasons.DRAINING
        home.core.steps.admit()
        assert (await running).result.samples[0].finish_reason == LENGTH


async def test_engines_are_listed_with_their_contracts() -> None:
    async with house() as home:
        home.catalog.put(mining_contract(), byte_level(), nodes=("node-2", "node-3"))
        home.catalog.put(mining_contract(engine_id="gone"), byte_level(), nodes=())
        listed = await home.stub.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=PATIENCE_S)
        assert [(engine.contract.engine_id, list(engine.node_ids)) for engine in listed.engines] == [
            ("miner", ["node-2", "node-3"]),
            ("small", ["node-1"]),
        ]
        assert listed.engines[1].engine_digest == home.digest


def test_every_rpc_of_the_proto_is_served() -> None:
    methods = broker_service_pb2.DESCRIPTOR.services_by_name["BrokerService"].methods_by_name
    assert set(methods) <= set(vars(BrokerServicer))


async def test_one_line_a_live_request_and_no_prompt_text(log_lines: LogLines) -> None:
    async with house() as home:
        home.core.generate = says("answer words")
        await home.stub.Generate(Generate(request=request("secret words", request_id="good")), timeout=PATIENCE_S)
        await home.stub.Generate(
            Generate(request=request("secret words", request_id="stopped", stop=["ans"])), timeout=PATIENCE_S
        )
        await refusal(
            home.stub.Generate(
                Generate(request=request("secret words", request_id="bad", max_tokens=0)), timeout=PATIENCE_S
            )
        )
        home.core.steps.close()
        call = home.stub.GenerateStream(Stream(request=request("secret words", request_id="left")), timeout=PATIENCE_S)
        await wait_until(lambda: home.core.works)
        call.cancel()
        await wait_until(lambda: len(log_lines.all("request.ended")) == 3)
        ended = {line["request_id"]: line for line in log_lines.all("request.ended")}
        assert ended["good"]["outcome"] == "finished"
        assert ended["good"]["node_id"] == "node-1"
        assert ended["good"]["generated_token_count"] == len(ids("answer words")[:8])
        assert ended["good"]["duration_ms"] > 0
        assert ended["stopped"]["outcome"] == "finished"
        assert ended["left"]["outcome"] == "gone"
        (refused,) = log_lines.all("request.refused")
        assert (refused["request_id"], refused["code"]) == ("bad", "INVALID_ARGUMENT")
        assert "secret" not in log_lines.text()
        assert "answer words" not in log_lines.text()


async def test_requests_are_counted_by_how_they_ended() -> None:
    async with house() as home:
        address = home.telemetry.serve_metrics("127.0.0.1:0")
        await home.stub.Generate(Generate(request=request()), timeout=PATIENCE_S)
        await events(home.stub.GenerateStream(Stream(request=request()), timeout=PATIENCE_S))
        await refusal(home.stub.Generate(Generate(request=request(max_tokens=0)), timeout=PATIENCE_S))
        page = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S).read()
        )
        lines = page.decode().splitlines()
        assert 'ifabric_broker_requests_total{lane="interactive",outcome="finished"} 2.0' in lines
        assert 'ifabric_broker_requests_total{lane="interactive",outcome="failed"} 1.0' in lines
        assert 'ifabric_broker_first_token_duration_seconds_count{lane="interactive"} 1.0' in lines
