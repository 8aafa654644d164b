# SPDX-License-Identifier: Apache-2.0
"""KServe streams at their edges: a broker that drains, a client that leaves, whom a request is for, bad messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ifabric.kserve.v2 import inference_pb2
from services.broker.kserve import servicer as kserve
from services.broker.kserve.servicer import InferenceServicer
from services.common.errors import InvalidArgumentError
from services.common.security import Caller
from services.common.security.caller import set_caller
from tests.broker_front.conftest import house
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.broker_front.conftest import House

Response = inference_pb2.ModelStreamInferResponse
CONTEXT: Any = None
"""Handlers read nothing from it."""


def call(name: str) -> inference_pb2.ModelInferRequest:
    made = inference_pb2.ModelInferRequest(model_name="small", id=name)
    made.parameters["max_tokens"].int64_param = 4
    made.inputs.add(name="input_ids", datatype="INT32", shape=[3]).contents.int_contents.extend([1, 2, 3])
    return made


def served(behind: House) -> InferenceServicer:
    return InferenceServicer(behind.servicer.live, behind.catalog)


def ended(responses: list[Response]) -> list[str]:
    """Ids of requests that ended, in that order."""
    answers = [each.infer_response for each in responses]
    return [each.id for each in answers if each.parameters["triton_final_response"].bool_param]


async def open_ended(*names: str) -> AsyncIterator[inference_pb2.ModelInferRequest]:
    """A client that sends and then keeps its side open."""
    for name in names:
        yield call(name)
    await asyncio.Event().wait()


async def test_a_stream_ends_with_the_drain_once_what_it_brought_has() -> None:
    async with house() as behind:
        inference = served(behind)
        behind.core.open.clear()
        heard: list[Response] = []

        async def listen() -> None:
            async for response in inference.ModelStreamInfer(open_ended("a", "b"), CONTEXT):
                heard.append(response)  # noqa: PERF401 -- what came is looked at while more may come

        listening = asyncio.create_task(listen())
        await wait_until(lambda: len(behind.core.accepted) == 2)
        await inference.drain()
        assert not (await inference.ServerReady(inference_pb2.ServerReadyRequest(), CONTEXT)).ready
        behind.core.open.set()
        async with asyncio.timeout(PATIENCE_S):
            await listening
    ended = [
        each.infer_response.id for each in heard if each.infer_response.parameters["triton_final_response"].bool_param
    ]
    assert sorted(ended) == ["a", "b"]


async def test_a_client_that_leaves_takes_its_work_along() -> None:
    async with house() as behind:
        behind.core.steps.close()
        responses: Any = served(behind).ModelStreamInfer(open_ended("a", "b"), CONTEXT)
        waiting = asyncio.create_task(anext(responses))
        await wait_until(lambda: behind.core.steps.waiting == 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await responses.aclose()
        assert sorted(behind.core.cancelled) == [("", "a"), ("", "b")]


async def test_a_request_is_for_the_callers_tenant() -> None:
    async with house() as behind:
        set_caller(Caller("key", tenant="search"))
        try:
            inference = served(behind)
            await inference.ModelInfer(call("whole"), CONTEXT)

            async def once() -> AsyncIterator[inference_pb2.ModelInferRequest]:
                yield call("streamed")

            assert [each async for each in inference.ModelStreamInfer(once(), CONTEXT)]
        finally:
            set_caller(None)
        assert behind.core.accepted == [("search", "whole"), ("search", "streamed")]


async def test_a_message_that_cannot_be_read_ends_the_stream_with_its_error() -> None:
    async with house() as behind:

        async def broken(*names: str) -> AsyncIterator[inference_pb2.ModelInferRequest]:
            for name in names:
                yield call(name)
            raise InvalidArgumentError("no message of this method")

        with pytest.raises(InvalidArgumentError, match="no message of this method"):
            [each async for each in served(behind).ModelStreamInfer(broken("a"), CONTEXT)]


async def test_a_stream_that_brings_more_than_run_at_once_gets_all_its_answers() -> None:
    count = 2 * kserve.AT_ONCE + 3

    async def many() -> AsyncIterator[inference_pb2.ModelInferRequest]:
        for number in range(count):
            yield call(f"r{number}")

    async with house() as behind:
        names = ended([each async for each in served(behind).ModelStreamInfer(many(), CONTEXT)])
    assert len(names) == len(set(names)) == count
