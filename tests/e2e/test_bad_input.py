# SPDX-License-Identifier: Apache-2.0
"""Each wrong kind of request, among 15 good neighbours: it gets a typed error, and they all finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric.engine.v1 import contract_pb2
from services.common.errors import (
    AlreadyExistsError,
    FabricError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
    from_status,
)
from services.common.rpc import channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.suite import RunningSuite

    Request = broker_service_pb2.GenerationRequest
    Spoil = Callable[[Request], object]

NEIGHBOURS = 15
LIMITS = {"max_input": 1024, "max_sequence": 1280, "max_output": 256, "vocabulary": 49152}


def good(number: int) -> Request:
    request = broker_service_pb2.GenerationRequest(request_id=f"good-{number}", max_tokens=2)
    request.prompt.text = f"Neighbour number {number} says"
    return request


def ids(*values: int) -> Spoil:
    tokens = broker_service_pb2.TokenIds(ids=values)
    return lambda request: request.prompt.tokens.CopyFrom(tokens)


def sampling(name: str, value: float) -> Spoil:
    return lambda request: setattr(request.sampling, name, value)


def plain(name: str, value: object) -> Spoil:
    return lambda request: setattr(request, name, value)


WRONG: dict[str, tuple[Spoil, str, tuple[str, ...]]] = {
    "no text": (lambda r: setattr(r.prompt, "text", ""), "prompt.text", ("1",)),
    "no ids": (ids(), "prompt.tokens.ids", ("0", "1")),
    "no prompt": (lambda r: r.ClearField("prompt"), "prompt", ()),
    "prompt too long by one": (ids(*[5] * 1025), "prompt.tokens.ids", ("1025", "1024")),
    "text too long": (lambda r: setattr(r.prompt, "text", "word " * 3000), "prompt.text", ("1024",)),
    "prompt and output too long": (
        lambda r: (ids(*[5] * 1024)(r), plain("max_tokens", 257)(r)),
        "max_tokens",
        ("257", "256"),
    ),
    "id beyond the vocabulary": (ids(1, 49152), "prompt.tokens.ids[1]", ("49152", "49151")),
    "negative id": (ids(1, 2, -1), "prompt.tokens.ids[2]", ("-1",)),
    "largest id": (ids(2**31 - 1), "prompt.tokens.ids[0]", ("2147483647", "49151")),
    "packed ids cut short": (
        lambda r: setattr(r.prompt, "packed_token_ids", b"\1\0\0"),
        "prompt.packed_token_ids",
        ("3", "4"),
    ),
    "packed id beyond the vocabulary": (
        lambda r: setattr(r.prompt, "packed_token_ids", (49152).to_bytes(4, "little")),
        "prompt.packed_token_ids[0]",
        ("49152",),
    ),
    "max_tokens 0": (plain("max_tokens", 0), "max_tokens", ("0", "256")),
    "max_tokens -1": (plain("max_tokens", -1), "max_tokens", ("-1", "256")),
    "max_tokens absent": (lambda r: r.ClearField("max_tokens"), "max_tokens", ("absent", "256")),
    "max_tokens largest": (plain("max_tokens", 2**31 - 1), "max_tokens", ("2147483647", "256")),
    "temperature below 0": (sampling("temperature", -0.5), "sampling.temperature", ("-0.5", "100")),
    "temperature not a number": (sampling("temperature", float("nan")), "sampling.temperature", ("nan",)),
    "temperature endless": (sampling("temperature", float("inf")), "sampling.temperature", ("inf", "100")),
    "top_k below 0": (sampling("top_k", -1), "sampling.top_k", ("-1",)),
    "top_p 0": (sampling("top_p", 0.0), "sampling.top_p", ("0", "1")),
    "min_p above 1": (sampling("min_p", 1.5), "sampling.min_p", ("1.5", "1")),
    "repetition_penalty 0": (sampling("repetition_penalty", 0.0), "sampling.repetition_penalty", ("0", "10")),
    "presence_penalty above 2": (sampling("presence_penalty", 3.0), "sampling.presence_penalty", ("3", "2")),
    "stop empty": (lambda r: r.stop.append(""), "stop[0]", ("0", "256")),
    "stop too long": (lambda r: r.stop.append("x" * 257), "stop[0]", ("257", "256")),
    "too many stops": (lambda r: r.stop.extend(["a"] * 17), "stop", ("17", "16")),
    "too many stop ids": (lambda r: r.stop_token_ids.extend([1] * 65), "stop_token_ids", ("65", "64")),
    "stop id beyond the vocabulary": (lambda r: r.stop_token_ids.append(49152), "stop_token_ids[0]", ("49152",)),
    "negative stop id": (lambda r: r.stop_token_ids.append(-5), "stop_token_ids[0]", ("-5",)),
    "no samples": (plain("samples", 0), "samples", ("0", "1")),
    "too many samples": (plain("samples", 9), "samples", ("9", "8")),
    "priority too high": (plain("priority", 101), "priority", ("101", "100")),
    "no such lane": (plain("lane", 9), "lane", ("9",)),
    "tenant too long": (plain("tenant", "t" * 65), "tenant", ("65", "64")),
    "salt too long": (plain("cache_salt", "s" * 65), "cache_salt", ("65", "64")),
    "guide of no kind": (lambda r: setattr(r.guide, "text", "x"), "guide.kind", ("0",)),
    "id too long": (plain("request_id", "i" * 129), "request_id", ("129", "128")),
    "no request id": (plain("request_id", ""), "request_id", ("0", "128")),
}


async def exchange(
    suite: RunningSuite, requests: list[Request], *, in_one_message: bool = True
) -> list[broker_service_pb2.RequestOutcome]:
    """Runs requests over one stream and returns all outcomes."""

    async def messages() -> AsyncIterator[broker_service_pb2.ExchangeRequest]:
        yield broker_service_pb2.ExchangeRequest(open=broker_service_pb2.ExchangeOpen(job_id="bad-input"))
        size = len(requests) if in_one_message else 1
        for start in range(0, len(requests), size):
            yield broker_service_pb2.ExchangeRequest(requests=requests[start : start + size])

    async with channel(suite.broker) as to_broker:
        stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
        call = stub.Exchange(messages(), timeout=100)
        return [outcome async for message in call for outcome in message.outcomes]


async def spoiled(suite: RunningSuite, wrong: Request, *, among: int = 7) -> FabricError:
    """Runs `wrong` among good neighbours; they must all finish. Returns its error."""
    requests = [good(number) for number in range(NEIGHBOURS)]
    requests.insert(among, wrong)
    outcomes = await exchange(suite, requests)
    assert len(outcomes) == NEIGHBOURS + 1
    finished = {outcome.request_id for outcome in outcomes if outcome.HasField("finished")}
    assert finished == {f"good-{number}" for number in range(NEIGHBOURS)}
    [failed] = [outcome for outcome in outcomes if outcome.HasField("failed")]
    return from_status(failed.failed)


@pytest.mark.parametrize("kind", WRONG)
async def test_a_wrong_request_names_field_value_and_limit_and_harms_nobody(suite: RunningSuite, kind: str) -> None:
    spoil, field, figures = WRONG[kind]
    wrong = good(99)
    spoil(wrong)
    error = await spoiled(suite, wrong)
    assert isinstance(error, InvalidArgumentError), error
    by_field = {violation.field: violation.description for violation in error.violations}
    assert field in by_field, by_field
    for figure in figures:
        assert figure in by_field[field], by_field


@pytest.mark.slow
async def test_the_longest_prompts_are_served(suite: RunningSuite) -> None:
    requests = []
    for length, most in ((1023, 1), (1024, 1), (1, 256)):
        request = broker_service_pb2.GenerationRequest(request_id=f"{length}", max_tokens=most)
        request.prompt.tokens.ids.extend([5] * length)
        requests.append(request)
    outcomes = await exchange(suite, requests)
    assert {outcome.request_id: outcome.WhichOneof("outcome") for outcome in outcomes} == {
        "1": "finished",
        "1023": "finished",
        "1024": "finished",
    }


async def test_several_faults_are_told_at_once(suite: RunningSuite) -> None:
    wrong = good(99)
    wrong.max_tokens = 0
    wrong.sampling.top_p = 2
    wrong.stop_token_ids.append(-1)
    error = await spoiled(suite, wrong)
    assert {violation.field for violation in error.violations} == {
        "max_tokens",
        "sampling.top_p",
        "stop_token_ids[0]",
    }


async def test_an_id_in_flight_is_refused_and_the_first_one_lives(suite: RunningSuite) -> None:
    first, second = good(0), good(0)
    outcomes = await exchange(suite, [first, second, *[good(number) for number in range(1, NEIGHBOURS)]])
    by_kind = [(each.request_id, each.WhichOneof("outcome")) for each in outcomes]
    assert sorted(by_kind) == sorted(
        [("good-0", "failed"), *((f"good-{number}", "finished") for number in range(NEIGHBOURS))]
    )
    [failed] = [each for each in outcomes if each.HasField("failed")]
    assert isinstance(from_status(failed.failed), AlreadyExistsError)


async def test_what_is_not_served_is_refused_by_name(suite: RunningSuite) -> None:
    async with channel(suite.broker) as to_broker:
        stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
        listed = await stub.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=30)
    served = set(listed.engines[0].contract.capabilities.guided_decoding)
    unserved = [kind for kind in contract_pb2.GuideKind.values() if kind and kind not in served]
    for kind in unserved:
        wrong = good(99)
        wrong.guide.kind = kind
        wrong.guide.text = "{}"
        error = await spoiled(suite, wrong)
        assert isinstance(error, UnimplementedError)
        assert "guide" in error.message


async def test_an_engine_that_nobody_has_is_not_found(suite: RunningSuite) -> None:
    wrong = good(99)
    wrong.engine.engine_id = "no-such-engine"
    error = await spoiled(suite, wrong)
    assert isinstance(error, NotFoundError)
    assert "no-such-engine" in error.message
