# SPDX-License-Identifier: Apache-2.0
"""Execute over real sockets and a real engine: what comes in, what goes out, and how streams end."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from array import array
from typing import TYPE_CHECKING

import pytest

from engines.simulated import RequestFault
from ifabric.engine.v1 import contract_pb2, generation_pb2
from ifabric.worker.v1 import worker_service_pb2 as wire
from services.common import reasons
from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    from_status,
)
from services.worker.servicer import STREAMS_MAX
from tests.support.waiting import wait_until
from tests.worker.made import unpacked, work
from tests.worker.running import LONG, LONG_TOKENS, MINING, running

if TYPE_CHECKING:
    from pathlib import Path

    from tests.worker.running import Running

LENGTH = generation_pb2.FINISH_REASON_LENGTH
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
COMPLETE = generation_pb2.FINISH_REASON_COMPLETE


def tokens_of(end: wire.ItemFinished, sample: int = 0) -> list[int]:
    return unpacked(end.samples[sample].token_ids)


async def test_an_item_ends_once_with_tokens_reason_and_usage(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, range(20), max_tokens=5))
        end = await broker.finish_of(1)
        assert tokens_of(end) == worker.simulation.tokens(range(20), 5)
        assert end.samples[0].finish_reason == LENGTH
        assert end.samples[0].stop_token_id == -1
        assert (end.usage.prompt_tokens, end.usage.computed_tokens, end.usage.generated_tokens) == (20, 20, 5)
        assert not broker.tokens


async def test_streamed_tokens_are_those_of_an_item_that_does_not_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as broker:
        await broker.dispatch(
            work(1, range(20), max_tokens=9),
            work(2, range(20), max_tokens=9, stream_tokens=True, report_context_done=True),
        )
        whole, streamed = await broker.finish_of(1), await broker.finish_of(2)
        assert broker.tokens[2, 0] == tokens_of(whole)
        assert tokens_of(streamed) == []
        of_streamed = [kind for kind, handle in broker.order if handle == 2]
        assert of_streamed == ["context", *["tokens"] * (len(of_streamed) - 2), "end"]


async def test_samples_logprobs_and_prompt_logprobs(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as broker:
        sampling = generation_pb2.SamplingParameters(temperature=1.0, seed=3)
        await broker.dispatch(
            work(1, range(20), samples=3, sampling=sampling, logprobs=True, prompt_logprobs=True),
            work(2, range(20), samples=3, sampling=sampling, logprobs=True, stream_tokens=True),
        )
        end = await broker.finish_of(1)
        await broker.finish_of(2)
        samples = [tokens_of(end, sample) for sample in range(3)]
        assert samples == [worker.simulation.tokens(range(20), 4, seed=3, sample=sample) for sample in range(3)]
        assert [broker.tokens[2, sample] for sample in range(3)] == samples
        for sample, part in enumerate(end.samples):
            assert list(array("f", part.logprobs)) == worker.simulation.logprobs(range(20), 4, seed=3, sample=sample)
        assert list(array("f", end.prompt_logprobs))[1:] == worker.simulation.prompt_logprobs(range(20))[1:]
        assert end.usage.generated_tokens == 12


async def test_a_shared_head_is_computed_once_and_usage_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as broker:
        head = list(range(100, 164))
        await broker.dispatch(work(1, [*head, 1], report_context_done=True, head_ends=[64]))
        await wait_until(lambda: 1 in broker.contexts)
        await broker.dispatch(*[work(handle, [*head, handle], head_ends=[64]) for handle in range(2, 6)])
        ends = [await broker.finish_of(handle) for handle in range(1, 6)]
        assert [end.usage.cached_tokens for end in ends] == [0, 64, 64, 64, 64]
        assert sum(end.usage.computed_tokens for end in ends) == 65 + 4


GOOD = 15
BAD_ITEMS: dict[str, tuple[wire.WorkItem, int, str]] = {
    "no token": (work(99, []), 3, "token_ids"),
    "half a token": (wire.WorkItem(handle=99, token_ids=b"abc", max_tokens=1, samples=1), 3, "token_ids"),
    "a negative id": (work(99, [1, -1, 2]), 3, r"token_ids[1]"),
    "the first id outside the vocabulary": (work(99, [1, 2, 1000]), 3, "token_ids[2]"),
    "the largest id": (work(99, [2**31 - 1]), 3, "token_ids[0]"),
    "a prompt too long": (work(99, range(193)), 3, "token_ids"),
    "prompt and output too long": (work(99, range(192), max_tokens=64, samples=1), 0, ""),
    "max_tokens 0": (work(99, max_tokens=0), 3, "max_tokens"),
    "max_tokens -1": (work(99, max_tokens=-1), 3, "max_tokens"),
    "max_tokens 2^31-1": (work(99, max_tokens=2**31 - 1), 3, "max_tokens"),
    "no sample": (work(99, samples=0), 3, "samples"),
    "too many samples": (work(99, samples=5), 3, "samples"),
    "a stop id outside the vocabulary": (work(99, stop_token_ids=[5, 1000]), 3, "stop_ids[1]"),
    "a negative stop id": (work(99, stop_token_ids=[-1]), 3, "stop_ids[0]"),
    "a temperature below 0": (
        work(99, sampling=generation_pb2.SamplingParameters(temperature=-0.5)), 3, "sampling.temperature"),
    "a temperature that is no number": (
        work(99, sampling=generation_pb2.SamplingParameters(temperature=float("nan"))), 3, "sampling.temperature"),
    "a guide that the engine does not enforce": (
        work(99, guide=generation_pb2.Guide(kind=contract_pb2.GUIDE_KIND_REGEX, text="a+")), 12, ""),
    "heads that do not ascend": (work(99, head_ends=[4, 2]), 3, "head_ends[1]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_ITEMS)
async def test_one_bad_item_among_good_ones_is_refused_by_name_and_harms_none(tmp_path: Path, kind: str) -> None:
    bad, code, field = BAD_ITEMS[kind]
    async with running(tmp_path, slots=16) as worker, worker.broker() as broker:
        good = [work(handle, max_tokens=2) for handle in range(GOOD)]
        await broker.dispatch(*good[:7], bad, *good[7:])
        for handle in range(GOOD):
            assert len(tokens_of(await broker.finish_of(handle))) == 2
        if not code:
            await broker.finish_of(99)
            return
        failure = await broker.failure_of(99)
        error = from_status(failure.status)
        assert error.code == code
        assert error.reason
        if field:
            assert [violation.field for violation in error.violations] == [field]
        assert worker.failures == []


async def test_a_handle_in_flight_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, step_us=5000) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, max_tokens=20), work(1, max_tokens=3))
        failure = await wait_until(lambda: broker.failed.get(1), what="the refusal")
        assert failure.status.code == 6
        assert len(tokens_of(await wait_until(lambda: broker.finished.get(1)))) == 20


async def test_two_streams_use_the_same_handles_and_never_meet(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as first, worker.broker() as second:
        await first.dispatch(work(1, range(10), max_tokens=8))
        await second.dispatch(work(1, range(10, 20), max_tokens=8))
        ends = [await first.finish_of(1), await second.finish_of(1)]
        await first.dispatch(work(2, range(10, 20), max_tokens=8))
        assert tokens_of(ends[0]) != tokens_of(ends[1])
        assert tokens_of(await first.finish_of(2)) == tokens_of(ends[1])


async def test_a_late_cancel_of_one_attempt_does_not_touch_the_next(tmp_path: Path) -> None:
    async with running(tmp_path, step_us=3000, **LONG) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, max_tokens=LONG_TOKENS, request_id="r", attempt=1))
        await broker.cancel(1)
        await broker.dispatch(work(2, max_tokens=30, request_id="r", attempt=2))
        await broker.cancel(1)
        first, second = await broker.finish_of(1), await broker.finish_of(2)
        assert first.samples[0].finish_reason == CANCELLED
        assert second.samples[0].finish_reason == LENGTH
        assert len(tokens_of(second)) == 30


async def test_cancel_is_safe_at_every_stage_and_ends_each_item_once(tmp_path: Path) -> None:
    async with running(tmp_path, slots=1, step_us=5000, **LONG) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, max_tokens=LONG_TOKENS, stream_tokens=True), work(2, max_tokens=60))
        await wait_until(lambda: broker.tokens[1, 0])
        await broker.cancel(2, 12345)  # waits for the only slot; nobody
        waiting = await broker.finish_of(2)
        assert (waiting.samples[0].finish_reason, tokens_of(waiting)) == (CANCELLED, [])
        await broker.cancel(1, 1)  # between tokens, twice
        await broker.cancel(1)
        running_ = await broker.finish_of(1)
        assert running_.samples[0].finish_reason == CANCELLED
        assert running_.usage.generated_tokens == len(broker.tokens[1, 0])
        await broker.cancel(1, 2)  # after the end
        await broker.dispatch(work(3, range(150)))
        await broker.cancel(3)  # on its way, or before the first token
        await broker.finish_of(3)
        await broker.dispatch(work(4))
        assert len(tokens_of(await broker.finish_of(4))) == 4
        assert worker.host.in_flight == 0

        def all_ended() -> bool:
            stats = worker.host.stats()
            return stats.requests_cancelled in (2, 3) and stats.requests_finished + stats.requests_cancelled == 4

        await wait_until(all_ended)


async def test_a_client_that_is_gone_frees_its_slot_within_two_steps(tmp_path: Path) -> None:
    async with running(tmp_path, slots=1, step_us=20_000, **LONG) as worker:
        async with worker.broker() as gone:
            await gone.dispatch(work(1, max_tokens=LONG_TOKENS, stream_tokens=True))
            await wait_until(lambda: gone.tokens[1, 0])
        async with worker.broker() as broker:
            await wait_until(lambda: worker.host.stats().requests_cancelled == 1)
            before = worker.host.stats().steps
            await broker.dispatch(work(1, max_tokens=1))
            await broker.finish_of(1)
            assert worker.host.stats().steps - before <= 2
        assert worker.host.stats().requests_cancelled == 1
        assert worker.host.in_flight == 0


async def test_a_broker_that_is_done_sending_gets_the_rest_and_a_good_end(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as broker:
        await broker.dispatch(*[work(handle) for handle in range(5)])
        await broker.call.done_writing()
        assert await broker.end() is None
        assert sorted(broker.finished) == list(range(5))


async def test_the_hello_carries_credit_and_what_is_loaded(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as broker:
        assert broker.hello is not None
        assert broker.hello.engine_digest == worker.digest
        assert (broker.hello.node_id, broker.hello.incarnation) == ("node-1", "one")
        assert (broker.credit.sequences, broker.credit.tokens) == (12, 12 * 256)


async def test_work_beyond_the_credit_is_refused_item_by_item(tmp_path: Path) -> None:
    async with running(tmp_path, step_us=2000) as worker, worker.broker() as broker:
        await broker.dispatch(*[work(handle) for handle in range(14)])
        refused = [await broker.failure_of(handle) for handle in (12, 13)]
        for failure in refused:
            error = from_status(failure.status)
            assert (error.code, error.reason) == (8, reasons.CREDIT_EXCEEDED)
            assert error.retry_after_s is not None
            assert "sequences: 12 outstanding and 1 more exceed the credit of 12" in error.message
        for handle in range(12):
            await broker.finish_of(handle)
        await broker.dispatch(*[work(handle) for handle in range(20, 32)])
        for handle in range(20, 32):
            await broker.finish_of(handle)


async def wrong_hello(worker: Running, **options: object) -> object:
    async with worker.broker(**options) as broker:
        return await broker.end()


async def test_a_hello_of_another_revision_or_engine_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as worker:
        error = await wrong_hello(worker, revision=99)
        assert isinstance(error, FailedPreconditionError)
        assert (error.reason, "99" in error.message) == (reasons.PROTOCOL_REVISION, True)
        worker.digest = "f" * 64
        error = await wrong_hello(worker)
        assert isinstance(error, FailedPreconditionError)
        assert error.reason == reasons.ENGINE_DIFFERS


@pytest.mark.parametrize("first", [wire.ExecuteRequest(), wire.ExecuteRequest(dispatch=wire.Dispatch(items=[work(1)]))])
async def test_a_stream_that_does_not_begin_with_a_hello_is_refused(tmp_path: Path, first: wire.ExecuteRequest) -> None:
    async with running(tmp_path) as worker, worker.broker(first=first) as broker:
        error = await broker.end()
        assert isinstance(error, FailedPreconditionError)
        assert error.reason == reasons.HELLO_MISSING


@pytest.mark.parametrize("frame", [wire.ExecuteRequest(), wire.ExecuteRequest(hello=wire.BrokerHello())])
async def test_a_frame_that_no_broker_sends_ends_the_stream_and_frees_what_it_had(
    tmp_path: Path, frame: wire.ExecuteRequest
) -> None:
    async with running(tmp_path, step_us=5000, **LONG) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, max_tokens=LONG_TOKENS))
        await broker.call.write(frame)
        assert isinstance(await broker.end(), InvalidArgumentError)
        await wait_until(lambda: worker.host.in_flight == 0)
        await wait_until(lambda: worker.host.stats().requests_cancelled == 1)


async def test_brokers_at_once_are_bounded_and_room_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, contextlib.AsyncExitStack() as brokers:
        first = await brokers.enter_async_context(worker.broker())
        for _ in range(STREAMS_MAX - 1):
            await brokers.enter_async_context(worker.broker())
        error = await wrong_hello(worker)
        assert isinstance(error, ResourceExhaustedError)
        assert error.retry_after_s
        first.call.cancel()

        async def again() -> bool:
            async with worker.broker() as late:
                return late.hello is not None

        await wait_until(again)


async def test_nothing_runs_before_the_engine_is_loaded(tmp_path: Path) -> None:
    async with running(tmp_path, load=False) as worker:
        error = await wrong_hello(worker)
        assert isinstance(error, FailedPreconditionError)
        assert error.reason == reasons.ENGINE_NOT_LOADED


async def test_a_mining_engine_ends_each_item_with_its_payload_and_no_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, MINING) as worker, worker.broker() as broker:
        await broker.dispatch(*[work(handle, range(handle, handle + 100), max_tokens=0) for handle in range(1, 9)])
        ends = [await broker.finish_of(handle) for handle in range(1, 9)]
        for end in ends:
            payload = end.payload
            assert (len(payload.data), list(payload.shape), list(payload.layers)) == (256, [64], [-1])
            assert payload.crc32 == zlib.crc32(payload.data)
            assert (payload.position, payload.failure) == (99, "")
            assert (tokens_of(end), end.samples[0].finish_reason) == ([], COMPLETE)
            prompt = range(end.handle, end.handle + 100)
            assert payload.data == worker.simulation.payload(prompt).tobytes()


async def test_a_payload_that_is_not_wanted_is_absent_and_what_a_mining_engine_cannot_do_is_refused(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, MINING) as worker, worker.broker() as broker:
        await broker.dispatch(
            work(1, max_tokens=0, return_payload=False), work(2, range(129), max_tokens=0), work(3, max_tokens=1)
        )
        assert not (await broker.finish_of(1)).HasField("payload")
        for handle, field, value in ((2, "token_ids", "129"), (3, "max_tokens", "1")):
            error = from_status((await broker.failure_of(handle)).status)
            assert error.code == 3
            assert error.violations[0].field == field
            assert value in error.violations[0].description


async def test_a_payload_that_cannot_be_extracted_ends_its_item_with_the_reason_only(tmp_path: Path) -> None:
    faults = [RequestFault("payload_fails", "prompt_token", 500, 1)]
    async with running(tmp_path, MINING, request_faults=faults) as worker, worker.broker() as broker:
        await broker.dispatch(*[work(handle, [handle, 500 if handle == 3 else 1], max_tokens=0) for handle in range(8)])
        for handle in range(8):
            payload = (await broker.finish_of(handle)).payload
            assert bool(payload.failure) == (handle == 3)
            assert len(payload.data) == (0 if handle == 3 else 256)
        assert worker.host.stats().payload_failures == 1


async def test_one_request_that_fails_in_the_engine_fails_alone(tmp_path: Path) -> None:
    faults = [RequestFault("fail_request", "prompt_token", 500, 1)]
    async with running(tmp_path, request_faults=faults) as worker, worker.broker() as broker:
        await broker.dispatch(*[work(handle, [handle, 500 if handle == 3 else 1]) for handle in range(8)])
        for handle in (0, 1, 2, 4, 5, 6, 7):
            await broker.finish_of(handle)
        assert (await broker.failure_of(3)).status.code == 13
        assert worker.failures == []


async def test_an_engine_that_fails_hands_everything_back_as_unavailable(tmp_path: Path) -> None:
    faults = [RequestFault("throw", "prompt_token", 500, 1)]
    async with running(tmp_path, request_faults=faults, step_us=5000, **LONG) as worker, worker.broker() as broker:
        await broker.dispatch(*[work(handle, max_tokens=LONG_TOKENS) for handle in range(6)])
        await wait_until(lambda: worker.host.stats().active)
        await broker.dispatch(work(6, [500]), work(7, [1]))
        for handle in range(8):
            error = from_status((await broker.failure_of(handle)).status)
            assert isinstance(error, UnavailableError)
            assert (error.reason, error.retry_after_s) == (reasons.ENGINE_FAILED, 0.0)
        assert len(worker.failures) == 1
        await broker.dispatch(work(8))
        assert (await broker.failure_of(8)).status.code == 14


async def test_a_reader_that_does_not_read_holds_back_only_itself(tmp_path: Path) -> None:
    engine = running(tmp_path, MINING, hidden_size=64 * 1024, slots=16, step_us=200)
    async with engine as worker, worker.broker(reading=False) as slow, worker.broker() as quick:
        credit = slow.credit.sequences
        size = 64 * 1024 * 4
        assert slow.credit.payload_bytes == credit * size
        sent = 0
        for _ in range(4):
            await slow.dispatch(
                *[work(handle, [1, handle % 900], max_tokens=0) for handle in range(sent, sent + credit)]
            )
            sent += credit
        await wait_until(lambda: worker.host.stats().requests_finished >= credit)
        for handle in range(200):
            await quick.dispatch(work(handle, [2, handle], max_tokens=0))
            assert len((await quick.finish_of(handle)).payload.data) == size
            quick.finished.clear()
        slow.read_on()
        ends = [await slow.end_of(handle) for handle in range(sent)]
        finished = [end for end in ends if isinstance(end, wire.ItemFinished)]
        refused = [end for end in ends if isinstance(end, wire.ItemFailed)]
        assert len(finished) >= credit
        assert {end.status.code for end in refused} == {8}, "beyond its credit, since it read no ends"
        assert all(end.payload.crc32 == zlib.crc32(end.payload.data) for end in finished)


async def test_draining_refuses_new_items_and_lets_old_ones_end(tmp_path: Path) -> None:
    async with running(tmp_path, step_us=5000, **LONG) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, max_tokens=30), work(3, max_tokens=LONG_TOKENS))
        await wait_until(lambda: worker.host.in_flight)
        drained = asyncio.get_running_loop().create_task(worker.servicer.drain(60.0))
        await asyncio.sleep(0)
        await broker.dispatch(work(2))
        error = from_status((await broker.failure_of(2)).status)
        assert (error.code, error.reason) == (14, reasons.DRAINING)
        assert len(tokens_of(await broker.finish_of(1))) == 30
        await broker.cancel(3)
        await drained
        end = await broker.end()
        assert isinstance(end, UnavailableError)
        assert end.reason == reasons.DRAINING
        late = await wrong_hello(worker)
        assert isinstance(late, UnavailableError)


async def test_what_does_not_end_within_the_grace_is_handed_back(tmp_path: Path) -> None:
    async with running(tmp_path, step_us=50_000) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, max_tokens=60))
        await wait_until(lambda: worker.host.in_flight)
        await worker.servicer.drain(0.1)
        assert isinstance(await broker.end(), UnavailableError)
        assert not broker.finished
        await wait_until(lambda: worker.host.in_flight == 0)


async def test_prompts_of_a_whole_batch_travel_unharmed(tmp_path: Path) -> None:
    """Tokens are a function of the whole prompt: crossed or cut prompts would show."""
    async with running(tmp_path, slots=16) as worker, worker.broker() as broker:
        prompts = {handle: [handle * 7 % 1000, *range(handle)] for handle in range(1, 17)}
        await broker.dispatch(*[work(handle, ids, max_tokens=6) for handle, ids in prompts.items()])
        for handle, ids in prompts.items():
            assert tokens_of(await broker.finish_of(handle)) == worker.simulation.tokens(ids, 6)
