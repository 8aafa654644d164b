# SPDX-License-Identifier: Apache-2.0
"""The Python client against a real suite, and its retries against a server that refuses."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric_client import AsyncClient, CallError, Client, Request, RetryPolicy, Sampling
from services.common.errors import (
    FabricError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    to_status,
)
from tests.support.servers import serving
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.door import Door

BROKER = "ifabric.broker.v1.BrokerService"


async def test_whole_streamed_and_listed_answers_agree(door: Door) -> None:
    async with AsyncClient(door.suite.broker) as client:
        request = Request("Hear, hear:", 12, engine_id="texts", sampling=Sampling(seed=3), return_token_ids=True)
        whole = await client.generate(request)
        pieces = [piece async for piece in client.stream(request)]
        [outcome] = [each async for each in client.run([request])]
    assert whole.text
    assert len(whole.token_ids) == whole.usage.generated_tokens <= 12
    last = pieces[-1].answer
    assert last is not None
    assert (last.text, last.token_ids) == (whole.text, whole.token_ids)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert (outcome.id, outcome.result().text) == ("0", whole.text)


def test_a_job_goes_on_in_another_process(door: Door) -> None:
    rows = [Request(f"Shared head. Row {number}", 4, id=f"r{number}") for number in range(40)]
    rows[7] = Request("a row without its limit", id="r7")
    with Client(door.suite.broker) as first:
        assert first.submit("client-job", rows, engine_id="texts").durable_rows == 40
    with Client(door.suite.broker) as second:
        outcomes = list(second.bulk("client-job", rows, engine_id="texts"))
        job = second.job("client-job")
        with pytest.raises(CallError) as other:
            second.submit("client-job", rows, engine_id="states")
    assert [outcome.id for outcome in outcomes] == [row.id for row in rows]
    assert [outcome.id for outcome in outcomes if outcome.error] == ["r7"]
    with pytest.raises(CallError, match="max_tokens"):
        outcomes[7].result()
    assert (job.state, job.finished_rows, job.failed_rows) == ("completed", 39, 1)
    assert 0 < job.prompt_tokens_computed < job.prompt_tokens_sent
    assert other.value.reason == "ID_IN_USE"


def test_hidden_states_are_the_brokers_bit_for_bit(door: Door) -> None:
    prompts = [np.array([3, 1, 4, number], np.int32) for number in range(200)]
    with Client(door.suite.broker) as client:
        [engine] = [each for each in client.engines() if each.id == "states"]
        mined = {
            outcome.id: outcome.result().hidden_state for outcome in client.mine(prompts, engine_id="states", window=16)
        }
        again = client.generate(Request([3, 1, 4, 17], engine_id="states")).hidden_state
    assert sorted(map(int, mined)) == list(range(200))
    state = mined["17"]
    assert state is not None
    assert again is not None
    assert state.values.shape == engine.hidden_shape
    assert state.values.tobytes() == again.values.tobytes()
    assert len({each.values.tobytes() for each in mined.values() if each is not None}) > 1


def test_a_stream_that_is_left_early_ends_its_request(door: Door) -> None:
    with Client(door.suite.broker) as client:
        pieces = client.stream("Go on and on", max_tokens=4096, engine_id="texts")
        assert next(pieces).answer is None
        pieces.close()  # type: ignore[attr-defined] # a generator
        assert client.generate("Next", max_tokens=1, engine_id="texts").usage.generated_tokens == 1


async def test_runs_beside_each_other_do_not_meet_in_positions(door: Door) -> None:
    async def run(client: AsyncClient) -> list[Any]:
        return [outcome async for outcome in client.run([Request(f"{n}", 20, engine_id="texts") for n in range(100)])]

    async with AsyncClient(door.suite.broker) as one, AsyncClient(door.suite.broker) as other:
        both = await asyncio.gather(run(one), run(other))
    for outcomes in both:
        assert [outcome.error for outcome in outcomes] == [None] * 100
        assert sorted(int(outcome.id) for outcome in outcomes) == list(range(100))


def test_two_open_requests_of_one_id_are_refused_here(door: Door) -> None:
    with Client(door.suite.broker) as client, pytest.raises(ValueError, match="'same'"):
        list(client.run([Request("a", 200, id="same", engine_id="texts")] * 2))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_takes_nothing_is_refused(door: Door, window: int) -> None:
    with Client(door.suite.broker) as client:
        with pytest.raises(ValueError, match=f"the window is {window}"):
            list(client.run([Request("a", 2)], window=window))
        with pytest.raises(ValueError, match=f"the window is {window}"):
            list(client.mine(["a"], window=window))


@pytest.mark.parametrize(
    ("rows", "words"),
    [(["text"], "row 0 is a str"), ((Request("x", 2) for _ in range(2)), "rows are a generator"), ("text", "is a str")],
)
def test_rows_that_are_none_are_refused_before_there_is_a_job(door: Door, rows: Any, words: str) -> None:
    with Client(door.suite.broker) as client:
        with pytest.raises(TypeError, match=words):
            client.submit("no-rows", rows)
        with pytest.raises(CallError, match="JOB_UNKNOWN"):
            client.job("no-rows")
        with pytest.raises(TypeError, match="row 0 is a str"):
            list(client.run("text"))  # type: ignore[arg-type]


def test_what_is_said_beside_a_request_is_refused(door: Door) -> None:
    request = Request("x", 2, engine_id="texts")
    with Client(door.suite.broker) as client:
        for call in (
            lambda: client.generate(request, max_tokens=3),
            lambda: list(client.stream(request, engine_id="states")),
        ):
            with pytest.raises(ValueError, match="stand in the Request"):
                call()


def test_the_inputs_own_error_ends_the_run(door: Door) -> None:
    def rows() -> Iterator[Request]:
        yield Request("a", 200, engine_id="texts")
        raise OSError("the disk is gone")

    with Client(door.suite.broker) as client, pytest.raises(OSError, match="the disk is gone"):
        list(client.run(rows()))


@pytest.mark.parametrize("host", ["broker.example", "localhost.example", "127.example", "127.0.0.1.example"])
def test_a_token_does_not_go_to_another_machine_in_the_clear(host: str) -> None:
    with pytest.raises(ValueError, match="in the clear"):
        Client(f"{host}:7600", token=lambda: "")  # what a function will say later nobody knows


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "", ":7600", "broker:", "broker:0", "broker:65536", "http://broker:7600", "grpc://b:1"]
)
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port with a port from 1 to 65535"):
        Client(address)


@pytest.mark.parametrize("address", ["dns:///broker.example:7600", "ipv4:127.0.0.1:1", "dns:7600", "broker.example:1"])
def test_what_grpc_resolves_is_an_address(address: str) -> None:
    with Client(address):
        pass


@pytest.mark.parametrize("address", ["localhost:7600", "127.0.0.2:7600", "[::1]:7600", "unix:/run/broker"])
def test_a_token_stays_on_this_machine(address: str) -> None:
    with Client(address, token="secret"):
        pass


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([Request("Other", 2), Request("B", 2)], "row 0 of job_id"),
        ([Request("A", 2), Request("Other", 2)], "row 1 of job_id"),
        ([Request("A", 2)], "a job of 2 rows, not of these 1"),
        ([Request("A", 2), Request("B", 2), Request("C", 2)], "a job of 2 rows, not of these 3"),
    ],
)
def test_a_job_of_other_rows_is_not_taken_for_this_one(door: Door, rows: list[Request], words: str) -> None:
    with Client(door.suite.broker) as client:
        client.submit("rows-a-b", [Request("A", 2), Request("B", 2)], engine_id="texts")
        with pytest.raises(CallError, match=words) as told:
            list(client.bulk("rows-a-b", rows, engine_id="texts"))
    assert (told.value.code, told.value.reason) == ("ALREADY_EXISTS", "ID_IN_USE")


UNSENDABLE: list[tuple[Any, str]] = [
    (Request([1.5, 2.5], 2), "prompt"),  # type: ignore[list-item]
    (Request([2**31], 2), "prompt"),
    (Request(np.zeros((2, 2), np.int32), 2), "prompt"),
    (Request(b"bytes", 2), "prompt"),
    (Request("half \ud800", 2), "prompt"),
    (Request("x" * 16_000_000, 2), "prompt"),
    (Request("x", 2**40), "max_tokens"),
    (Request("x", 2, sampling=Sampling(seed=-1)), "seed"),
    (Request("x", 2, stop="one text"), "stop"),  # type: ignore[arg-type]
]


def test_a_row_that_cannot_be_sent_is_an_error_in_its_place(door: Door) -> None:
    rows = [Request("before", 2), *(row for row, _ in UNSENDABLE), Request("after", 2)]
    with Client(door.suite.broker) as client:
        first, *between, last = client.bulk("unsendable", rows, engine_id="texts")
        over_a_stream = sorted(client.run(rows), key=lambda outcome: int(outcome.id))
        for row, field in UNSENDABLE:
            with pytest.raises(CallError) as told:
                client.generate(row)
            assert [violation.field for violation in told.value.violations] == [field]
    assert first.error is None
    assert last.error is None
    errors = [outcome.error for outcome in between]
    assert all(error is not None and error.reason == "INVALID_FIELDS" for error in errors)
    assert [error.violations[0].field for error in errors if error] == [field for _, field in UNSENDABLE]
    told_there = [outcome.error and outcome.error.violations[0].field for outcome in over_a_stream]
    assert told_there == [None, *(field for _, field in UNSENDABLE), None]


def test_long_rows_do_not_share_a_message_that_is_too_long(door: Door) -> None:
    with Client(door.suite.broker) as client:
        outcomes = list(client.run(Request("x" * 400_000, 2, engine_id="texts") for _ in range(48)))
    assert {outcome.error.code for outcome in outcomes if outcome.error} == {"INVALID_ARGUMENT"}
    assert len(outcomes) == 48


@pytest.mark.parametrize("token", ["from-a-file\n", "schlüssel"])
def test_a_token_that_no_header_carries_is_named_without_showing_it(token: str) -> None:
    with Client("127.0.0.1:1", token=token) as client:
        for call in (client.engines, lambda: list(client.run([Request("x", 1)])), lambda: client.job("any")):
            with pytest.raises(ValueError, match="the token holds a character") as told:
                call()
            assert token.strip() not in str(told.value)


class Reluctant:
    """A broker that refuses a few times first, as real ones do, and notes when it was asked and under which ids."""

    def __init__(self, *refusals: FabricError) -> None:
        self.refusals = list(refusals)
        self.asked_at: list[float] = []
        self.ids: set[str] = set()

    async def Generate(self, request: broker_service_pb2.GenerateRequest, context: Any) -> Any:
        self._ask(request.request.request_id)
        return broker_service_pb2.GenerateResponse(result=broker_service_pb2.GenerationResult(engine_digest="d"))

    async def Exchange(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Every stream loses one request to a refusal while there are any left."""
        async for message in requests:
            for request in message.requests:
                response = broker_service_pb2.ExchangeResponse()
                outcome = response.outcomes.add(request_id=request.request_id)
                try:
                    self._ask(request.request_id)
                    outcome.finished.engine_digest = "d"
                except FabricError as error:
                    outcome.failed.CopyFrom(to_status(error))
                yield response

    def __getattr__(self, name: str) -> Any:
        return None  # methods that no test calls

    def _ask(self, request_id: str) -> None:
        self.asked_at.append(time.monotonic())
        self.ids.add(request_id)
        if self.refusals:
            raise self.refusals.pop(0)


async def test_retries_wait_as_long_as_the_broker_asks_under_one_id() -> None:
    broker = Reluctant(ResourceExhaustedError("full", retry_after_s=0.4), UnavailableError("away"))
    async with (
        serving(broker_service_pb2_grpc.add_BrokerServiceServicer_to_server, broker, BROKER) as server,
        AsyncClient(server.address, retries=RetryPolicy(limit_s=PATIENCE_S, first_s=0.05)) as client,
    ):
        answer = await client.generate("x")
    assert answer.engine_digest == "d"
    first, second, third = broker.asked_at
    assert second - first >= 0.4
    assert third - second >= 0.05
    assert len(broker.ids) == 1


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (ResourceExhaustedError("no room for such a message"), "RESOURCE_EXHAUSTED"),
        (InvalidArgumentError("wrong"), "INVALID_ARGUMENT"),
        (ResourceExhaustedError("full", retry_after_s=3600), "RESOURCE_EXHAUSTED"),
    ],
    ids=["a bound that does not come free", "a wrong request", "a delay that is too long"],
)
async def test_what_a_retry_does_not_help_is_raised_at_once(refusal: FabricError, code: str) -> None:
    broker = Reluctant(refusal)
    async with (
        serving(broker_service_pb2_grpc.add_BrokerServiceServicer_to_server, broker, BROKER) as server,
        AsyncClient(server.address) as client,
    ):
        with pytest.raises(CallError) as told:
            await client.generate("x")
    assert (told.value.code, len(broker.asked_at)) == (code, 1)


async def test_rows_that_are_put_off_run_again_and_end_once() -> None:
    away = [UnavailableError("away", retry_after_s=0.05) for _ in range(5)]
    broker = Reluctant(*away)
    async with (
        serving(broker_service_pb2_grpc.add_BrokerServiceServicer_to_server, broker, BROKER) as server,
        AsyncClient(server.address, retries=RetryPolicy(limit_s=PATIENCE_S, first_s=0.01)) as client,
    ):
        ended = [outcome.id async for outcome in client.run([Request("x") for _ in range(50)], window=4)]
    assert sorted(map(int, ended)) == list(range(50))
