# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything leaves, and what a request becomes when it is not."""

from __future__ import annotations

import math
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import contract_pb2, generation_pb2
from services.broker.frontdoor.intake import Intake, Plan
from services.broker.frontdoor.selection import EngineDirectory
from services.broker.frontdoor.tokenization import CodecStore
from services.broker.work import Lane
from services.common.errors import (
    FabricError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from tests.broker_front.fakes import EchoCore, ShelfCatalog
from tests.broker_front.made import byte_level, contract, ids_of, mining_contract, request, vocab_size

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB = vocab_size(byte_level())
PACKED = struct.pack("<3i", 5, 6, 7)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Door:
    """Intake over a catalog that a test fills."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.catalog = ShelfCatalog()
        self.intake = Intake(
            EngineDirectory(self.catalog), CodecStore(self.catalog, executor, capacity=4, fetch_timeout_s=0.1)
        )

    async def plan(self, made: broker_service_pb2.GenerationRequest, **how: Any) -> Plan | FabricError:
        (plan,) = await self.intake.plan([made], **how)
        return plan

    async def refused(self, made: broker_service_pb2.GenerationRequest) -> FabricError:
        plan = await self.plan(made)
        assert isinstance(plan, FabricError), "it was taken"
        return plan

    async def taken(self, made: broker_service_pb2.GenerationRequest) -> Plan:
        plan = await self.plan(made)
        assert isinstance(plan, Plan), str(plan)
        return plan


@pytest.fixture
def door(executor: ThreadPoolExecutor) -> Door:
    made = Door(executor)
    made.catalog.put(contract(), byte_level())
    return made


def sampled(**values: Any) -> broker_service_pb2.GenerationRequest:
    return request(sampling=values)


WRONG = {
    # name: (request, field at fault, parts of the description)
    "empty ids": (request([]), "prompt.tokens.ids", ["0 ids", "at least 1"]),
    "empty packed ids": (request(b""), "prompt.packed_token_ids", ["0 ids"]),
    "empty text": (request(""), "prompt.text", ["empty"]),
    "no prompt": (
        broker_service_pb2.GenerationRequest(request_id="r", max_tokens=1), "prompt", ["packed_token_ids"]),
    "packed size": (request(b"\0" * 6), "prompt.packed_token_ids", ["6 bytes", "multiple of 4"]),
    "negative id": (request([5, -1]), "prompt.tokens.ids[1]", ["is -1", f"0 to {VOCAB - 1}"]),
    "negative packed id": (request(struct.pack("<2I", 5, 2**32 - 1)), "prompt.packed_token_ids[1]", ["is -1"]),
    "id of vocabulary size": (request([5, 6, VOCAB]), "prompt.tokens.ids[2]", [f"is {VOCAB}", f"{VOCAB - 1}"]),
    "id of 2^31": (request(struct.pack("<I", 2**31)), "prompt.packed_token_ids[0]", ["is -2147483648"]),
    "stop id outside": (request(stop_token_ids=[3, VOCAB]), "stop_token_ids[1]", [f"is {VOCAB}"]),
    "negative stop id": (request(stop_token_ids=[-1]), "stop_token_ids[0]", ["is -1"]),
    "too many stop ids": (request(stop_token_ids=[3] * 65), "stop_token_ids", ["65", "64"]),
    "max_tokens absent": (request(max_tokens=None), "max_tokens", ["absent", "1 to 48"]),
    "max_tokens 0": (request(max_tokens=0), "max_tokens", ["is 0", "1 to 48"]),
    "max_tokens -1": (request(max_tokens=-1), "max_tokens", ["is -1", "1 to 48"]),
    "max_tokens above the contract": (request(max_tokens=49), "max_tokens", ["is 49", "1 to 48"]),
    "prompt too long": (request([5] * 65), "prompt.tokens.ids", ["65 tokens", "at most 64"]),
    "prompt and output too long": (request([5] * 60, max_tokens=37), "max_tokens", ["60 tokens", "97", "96"]),
    "samples 0": (request(samples=0), "samples", ["is 0", "at least 1"]),
    "samples above the contract": (request(samples=5), "samples", ["is 5", "at most 4"]),
    "temperature NaN": (sampled(temperature=math.nan), "sampling.temperature", ["nan", "at most 100"]),
    "temperature infinite": (sampled(temperature=math.inf), "sampling.temperature", ["inf"]),
    "temperature negative": (sampled(temperature=-0.5), "sampling.temperature", ["-0.5"]),
    "top_k negative": (sampled(top_k=-1), "sampling.top_k", ["-1"]),
    "top_p 0": (sampled(top_p=0), "sampling.top_p", ["is 0", "above 0"]),
    "top_p above 1": (sampled(top_p=1.5), "sampling.top_p", ["1.5"]),
    "min_p negative": (sampled(min_p=-0.1), "sampling.min_p", ["-0.1"]),
    "repetition_penalty 0": (sampled(repetition_penalty=0), "sampling.repetition_penalty", ["above 0"]),
    "presence_penalty": (sampled(presence_penalty=2.5), "sampling.presence_penalty", ["2.5", "-2"]),
    "frequency_penalty": (sampled(frequency_penalty=-math.inf), "sampling.frequency_penalty", ["-inf"]),
    "empty stop": (request(stop=["a", ""]), "stop[1]", ["0 bytes", "1 to 256"]),
    "long stop": (request(stop=["ä" * 129]), "stop[0]", ["258 bytes"]),
    "too many stops": (request(stop=["a"] * 17), "stop", ["17", "16"]),
    "id empty": (request(request_id=""), "request_id", ["0 characters", "1 to 128"]),
    "id long": (request(request_id="x" * 129), "request_id", ["129 characters"]),
    "tenant long": (request(tenant="x" * 65), "tenant", ["65", "64"]),
    "salt long": (request(cache_salt="x" * 65), "cache_salt", ["65", "64"]),
    "lane unknown": (request(lane=7), "lane", ["7"]),
    "priority high": (request(priority=101), "priority", ["101", "100"]),
    "priority low": (request(priority=-101), "priority", ["-101"]),
    "traceparent": (request(traceparent="00-abc"), "traceparent", ["W3C"]),
    "guide empty": (
        request(guide=generation_pb2.Guide(kind=contract_pb2.GUIDE_KIND_REGEX)), "guide.text", ["0 bytes"]),
    "guide long": (
        request(guide=generation_pb2.Guide(kind=contract_pb2.GUIDE_KIND_REGEX, text="a" * (2**20 + 1))), "guide.text",
        ["1048577"]),
    "guide without kind": (request(guide=generation_pb2.Guide(text="a")), "guide.kind", ["is 0"]),
    "guide of unknown kind": (
        request(guide=generation_pb2.Guide.FromString(b"\x08\x09\x12\x01a")), "guide.kind", ["is 9"]),
    "text too long to tokenize": (request("ab " * 5000), "prompt.text", ["15000 bytes", "64 tokens"]),
    "text too long in tokens": (request("q " * 60), "prompt.text", ["tokens; engine small", "64"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_is_named_with_value_and_limit(door: Door, name: str) -> None:
    made, field, parts = WRONG[name]
    error = await door.refused(made)
    assert isinstance(error, InvalidArgumentError), error
    assert [violation.field for violation in error.violations] == [field], error.violations
    for part in parts:
        assert part in error.violations[0].description


async def test_one_bad_item_harms_none_of_its_fifteen_neighbours(door: Door) -> None:
    for name, (wrong, _, _) in WRONG.items():
        batch = [request(request_id=f"good-{index}") for index in range(15)]
        batch.insert(7, wrong)
        plans = await door.intake.plan(batch)
        assert isinstance(plans.pop(7), FabricError), name
        assert [plan.request_id for plan in plans if isinstance(plan, Plan)] == [f"good-{i}" for i in range(15)]


async def test_limits_themselves_are_allowed(door: Door) -> None:
    for made in (
        request([5] * 64, max_tokens=32), request([0, VOCAB - 1]), request(max_tokens=48), request(samples=4),
        request(stop=["x" * 256] * 16), request(stop_token_ids=[0, VOCAB - 1] * 32), request(priority=-100),
        request(request_id="x" * 128), sampled(temperature=100, top_k=2**31 - 1, top_p=1, min_p=1),
        sampled(temperature=0, top_k=0, min_p=0, presence_penalty=-2, frequency_penalty=2, repetition_penalty=10),
    ):  # fmt: skip
        assert (await door.taken(made)).max_tokens


async def test_max_tokens_of_two_to_the_31_on_the_wire(door: Door) -> None:
    wire = request(max_tokens=None).SerializeToString() + b"\x18\x80\x80\x80\x80\x08"
    error = await door.refused(broker_service_pb2.GenerationRequest.FromString(wire))
    assert error.violations[0].field == "max_tokens"
    assert "-2147483648" in error.violations[0].description


async def test_all_violations_at_once(door: Door) -> None:
    error = await door.refused(
        request([5, -1, VOCAB], request_id="", max_tokens=0, samples=9, stop=[""], sampling={"top_p": 0.0})
    )
    assert [violation.field for violation in error.violations] == [
        "request_id",
        "stop[0]",
        "sampling.top_p",
        "samples",
        "max_tokens",
        "prompt.tokens.ids[1]",
        "prompt.tokens.ids[2]",
    ]
    assert "and 6 more" in error.message


async def test_all_violations_at_once_of_a_text_too(door: Door) -> None:
    error = await door.refused(request("q " * 60, max_tokens=0, priority=200))
    assert [violation.field for violation in error.violations] == ["priority", "max_tokens", "prompt.text"]


async def test_of_many_wrong_ids_the_first_are_named_and_the_others_counted(door: Door) -> None:
    error = await door.refused(request([-1] * 40))
    assert len(error.violations) == 17
    assert "24 more" in error.violations[-1].description


async def test_text_that_the_vocabulary_lacks_is_refused_with_a_sentence(executor: ThreadPoolExecutor) -> None:
    door = Door(executor)
    document = byte_level(without="Ġ")
    door.catalog.put(contract(document), document)
    error = await door.refused(request("a fox"))
    assert error.violations[0].field == "prompt.text"
    assert "no token for" in error.violations[0].description
    assert "fox" not in error.message


async def test_prompt_text_is_in_no_message(door: Door) -> None:
    error = await door.refused(request("secret " * 5000, max_tokens=0, stop=["secret" * 99], samples=-1))
    assert "secret" not in error.message + "".join(v.description for v in error.violations)


# Engines that generate nothing


async def test_an_engine_that_generates_nothing_takes_max_tokens_absent_or_0(executor: ThreadPoolExecutor) -> None:
    door = Door(executor)
    digest = door.catalog.put(mining_contract(), byte_level())
    for limit in (None, 0):
        plan = await door.taken(request(max_tokens=limit))
        assert (plan.max_tokens, plan.payload_bytes, plan.codec) == (0, 32, None)
        assert plan.engine_digests == {digest}
    assert (await door.taken(request(max_tokens=None, omit_payload=True))).payload_bytes == 0
    assert not door.catalog.fetches, "ids need no tokenizer where no text is made"
    assert (await door.taken(request("fox", max_tokens=None))).tokens.tolist() == ids_of(byte_level(), "fox")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1}, {"max_tokens": -1}, {"stop": ["a"]}, {"stop_token_ids": [1]}, {"logprobs": True},
        {"ignore_end": True}, {"sampling": {"top_k": 1}}, {"samples": 2},
        {"guide": generation_pb2.Guide(kind=contract_pb2.GUIDE_KIND_REGEX, text="a")},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
async def test_what_makes_no_sense_without_generation_is_refused(executor: ThreadPoolExecutor, fields: Any) -> None:
    door = Door(executor)
    door.catalog.put(mining_contract(), byte_level())
    error = await door.refused(request(**{"max_tokens": None} | fields))
    assert isinstance(error, InvalidArgumentError)
    assert [violation.field for violation in error.violations] == [next(iter(fields))]


# What is not served


async def test_guides_and_scoring_are_served_where_the_contract_lists_them(executor: ThreadPoolExecutor) -> None:
    guide = generation_pb2.Guide(kind=contract_pb2.GUIDE_KIND_JSON_SCHEMA, text="{}")
    door = Door(executor)
    digest = door.catalog.put(contract(scoring=False), byte_level())
    error = await door.refused(request(guide=guide, prompt_logprobs=True))
    assert isinstance(error, UnimplementedError)
    assert error.metadata["fields"] == "guide,prompt_logprobs"
    assert "GUIDE_KIND_JSON_SCHEMA" in error.message
    door.catalog.remove(digest)
    door.catalog.put(contract(guided_decoding=[contract_pb2.GUIDE_KIND_JSON_SCHEMA]), byte_level())
    plan = await door.taken(request(guide=guide, prompt_logprobs=True))
    assert plan.guide == guide


# Which engine


async def test_an_unknown_engine_is_not_found(door: Door) -> None:
    for selector in ({"engine_id": "large"}, {"engine_digest": "0" * 64}):
        error = await door.refused(request(engine=broker_service_pb2.EngineSelector(**selector)))
        assert isinstance(error, NotFoundError)
        assert next(iter(selector.values())) in error.message
        assert "small" in error.message


async def test_a_selector_holds_in_all_its_parts(door: Door) -> None:
    digest = door.catalog.put(contract(engine_id="other"), byte_level())
    both = broker_service_pb2.EngineSelector(engine_digest=digest, engine_id="small")
    assert isinstance(await door.refused(request(engine=both)), NotFoundError)
    both.engine_id = "other"
    assert (await door.taken(request(engine=both))).engine_digests == {digest}


async def test_before_anything_is_known_everything_is_unavailable(executor: ThreadPoolExecutor) -> None:
    door = Door(executor)
    door.catalog.synced = False
    named = request(engine=broker_service_pb2.EngineSelector(engine_id="small"))
    for made in (request(), named):
        error = await door.refused(made)
        assert isinstance(error, UnavailableError)
        assert error.retry_after_s
    door.catalog.synced = True
    assert isinstance(await door.refused(request()), UnavailableError)
    assert isinstance(await door.refused(named), NotFoundError)
    door.catalog.put(contract(), byte_level())
    assert (await door.taken(named)).engine_digests


async def test_tiers_of_one_model_serve_what_each_admits(door: Door) -> None:
    small = door.catalog.engines()[0].digest
    long = door.catalog.put(contract(engine_id="long", max_input_tokens=80), byte_level())
    assert (await door.taken(request([5] * 64))).engine_digests == {small, long}
    assert (await door.taken(request([5] * 65))).engine_digests == {long}
    error = await door.refused(request([5] * 81))
    assert "engine long takes at most 80" in error.message
    assert (await door.taken(request("q " * 33))).engine_digests == {long}


async def test_several_models_need_a_selector_only_where_both_could_serve(door: Door) -> None:
    other = byte_level(size=300)
    digest = door.catalog.put(contract(other, engine_id="other", max_output_tokens=12), other)
    for made in (request([5]), request("fox")):
        error = await door.refused(made)
        assert isinstance(error, FailedPreconditionError)
        assert "other, small" in error.message
        assert "engine_id" in error.message
    only_small = await door.taken(request([5], max_tokens=13))
    assert digest not in only_small.engine_digests
    assert len((await door.taken(request("fox", max_tokens=13))).engine_digests) == 1
    named = broker_service_pb2.EngineSelector(engine_id="other")
    plan = await door.taken(request("fox", engine=named))
    assert plan.tokens.tolist() == ids_of(other, "fox")
    assert isinstance(await door.refused(request("fox", max_tokens=99)), InvalidArgumentError)


async def test_generation_and_mining_are_told_apart_by_what_is_asked(door: Door) -> None:
    miner = door.catalog.put(mining_contract(), byte_level())
    assert (await door.taken(request(max_tokens=None))).engine_digests == {miner}
    assert miner not in (await door.taken(request(max_tokens=1))).engine_digests


async def test_a_tokenizer_that_is_not_to_be_had_is_unavailable(door: Door) -> None:
    door.catalog.reachable.clear()
    for made in (request("fox"), request([5])):
        assert isinstance(await door.refused(made), UnavailableError)
    error = await door.refused(request("fox", max_tokens=0))
    assert [violation.field for violation in error.violations] == ["max_tokens"]


# What it becomes


async def test_a_full_request_becomes_work(door: Door) -> None:
    made = request(
        PACKED,
        request_id="r",
        tenant="t",
        max_tokens=7,
        samples=2,
        stop=["x"],
        stop_token_ids=[9],
        ignore_end=True,
        logprobs=True,
        prompt_logprobs=True,
        priority=-3,
        cache_salt="s",
        lane=broker_service_pb2.LANE_BULK,
        traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        sampling={"temperature": 0.5, "seed": 2**64 - 1},
    )
    core = EchoCore()
    plan = await door.taken(made)
    work = plan.work(core, lane=Lane.INTERACTIVE, stream_tokens=False, job="j")  # type: ignore[arg-type]
    assert work.key == ("t", "r")
    assert work.tokens.tolist() == [5, 6, 7]
    assert work.tokens.dtype == np.int32
    assert (work.max_tokens, work.samples, work.priority, work.lane, work.job) == (7, 2, -3, Lane.BULK, "j")
    assert work.stop_token_ids == (9,)
    assert work.ignore_end
    assert work.logprobs
    assert work.prompt_logprobs
    assert work.sampling == made.sampling
    assert work.traceparent == made.traceparent
    assert work.stream_tokens, "stop strings are found as tokens come"
    assert work.salt
    assert not len(plan.tokens), "the prompt lies in memory once"


async def test_defaults(door: Door) -> None:
    plan = await door.taken(request())
    work = plan.work(EchoCore(), lane=Lane.INTERACTIVE, stream_tokens=False)  # type: ignore[arg-type]
    assert (work.lane, work.priority, work.samples, work.salt, work.job) == (Lane.INTERACTIVE, 0, 1, 0, "")
    assert not work.stream_tokens
    assert work.guide is None


async def test_rows_that_sample_alike_share_one_message(door: Door) -> None:
    plans = await door.intake.plan([request(request_id=str(i), sampling={"top_k": 40}) for i in range(3)])
    assert len({id(plan.sampling) for plan in plans if isinstance(plan, Plan)}) == 1


async def test_salts_differ_as_their_texts_do(door: Door) -> None:
    salts = {(await door.taken(request(cache_salt=salt))).salt for salt in ("", "a", "b", "ab")}
    assert len(salts) == 4
    assert (await door.taken(request(cache_salt="a"))).salt in salts


async def test_an_id_is_made_up_only_where_that_is_allowed(door: Door) -> None:
    made = [await door.plan(request(request_id=""), id_required=False) for _ in range(2)]
    ids = {plan.request_id for plan in made if isinstance(plan, Plan)}
    assert len(ids) == 2
    assert "" not in ids


async def test_texts_and_ids_of_one_batch_keep_their_order(door: Door) -> None:
    texts = ["fox", "dog", "lazy"]
    batch = [request(text, request_id=text) for text in texts]
    batch.insert(1, request([5], request_id="ids"))
    plans = await door.intake.plan(batch)
    assert [plan.request_id for plan in plans if isinstance(plan, Plan)] == ["fox", "ids", "dog", "lazy"]
    got = [plan.tokens.tolist() for plan in plans if isinstance(plan, Plan)]
    assert got == [ids_of(byte_level(), "fox"), [5], ids_of(byte_level(), "dog"), ids_of(byte_level(), "lazy")]
