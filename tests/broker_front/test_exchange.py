# SPDX-License-Identifier: Apache-2.0
"""Batched streams over real gRPC: many rows a message, failures as items, windows, disconnects, the report."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.broker.work import Lane
from services.common import reasons
from services.common.errors import FabricError, UnavailableError, from_status
from services.common.rpc import call_error
from tests.broker_front.conftest import House, house
from tests.broker_front.made import byte_level, ids_of, mining_contract, request
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.logged import LogLines

Message = broker_service_pb2.ExchangeRequest
Open = broker_service_pb2.ExchangeOpen
LENGTH, CANCELLED = generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_CANCELLED


class Client:
    """One stream, seen from its client."""

    def __init__(self, home: House, **opening: Any) -> None:
        self._home = home
        self.call = home.stub.Exchange()
        self._open: Open | None = Open(**opening)
        self.finished: dict[str, broker_service_pb2.GenerationResult] = {}
        self.failed: dict[str, FabricError] = {}
        self.order: list[str] = []
        self.deltas: dict[str, str] = {}
        self.sizes: list[int] = []
        self.report: broker_service_pb2.JobReport | None = None
        self._ended = False

    async def send(self, requests: Sequence[Any] = (), cancel: Sequence[str] = ()) -> None:
        message = Message(requests=requests, cancel_request_ids=cancel)
        if self._open is not None:
            message.open.CopyFrom(self._open)
            self._open = None
        await asyncio.wait_for(self.call.write(message), PATIENCE_S)

    async def read(self) -> bool:
        """Reads one message; returns whether there was one."""
        reply = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        if not isinstance(reply, broker_service_pb2.ExchangeResponse):
            return False
        self.sizes.append(len(reply.outcomes))
        for fresh in reply.deltas:
            assert fresh.request_id not in self.finished, "a delta after its result"
            self.deltas[fresh.request_id] = self.deltas.get(fresh.request_id, "") + fresh.delta.text
        for outcome in reply.outcomes:
            self.order.append(outcome.request_id)
            if outcome.WhichOneof("outcome") == "finished":
                assert outcome.request_id not in self.finished, "a second result"
                self.finished[outcome.request_id] = outcome.finished
            else:
                self.failed[outcome.request_id] = from_status(outcome.failed)
        if reply.HasField("report"):
            self.report = reply.report
        return True

    async def read_until(self, condition: Any) -> None:
        while not condition():
            assert await self.read(), "the stream ended"

    async def end(self) -> broker_service_pb2.JobReport:
        """Half-closes, reads to the end and returns the report."""
        await self.call.done_writing()
        while await self.read():
            assert self.report is None or not self._ended, "something after the report"
            self._ended = self.report is not None
        assert self.report is not None, "no report"
        assert await self.call.code() is grpc.StatusCode.OK
        return self.report

    async def error(self) -> FabricError:
        """Reads to the error that ends the stream."""
        try:
            while await self.read():
                pass
        except grpc.aio.AioRpcError as error:
            return call_error(error)
        raise AssertionError("the stream ended well")

    def text(self, request_id: str) -> str:
        return self.deltas.get(request_id, "") + self.finished[request_id].samples[0].text


def rows(count: int, prefix: str = "row", **fields: Any) -> list[broker_service_pb2.GenerationRequest]:
    return [request([5 + i % 50, 6, 7], request_id=f"{prefix}-{i}", **fields) for i in range(count)]


async def test_every_row_ends_once_and_the_report_adds_up(log_lines: LogLines) -> None:
    async with house() as home:
        client = Client(home, job_id="sorting")
        for part in range(4):
            await client.send(rows(300, f"part{part}"))
        report = await client.end()
        assert len(client.finished) == 1200
        assert not client.failed
        assert all(result.samples[0].finish_reason == LENGTH for result in client.finished.values())
        assert (report.job_id, report.requests, report.failed) == ("sorting", 1200, 0)
        assert report.prompt_tokens_logical == 3600
        assert report.generated_tokens == 9600
        assert max(client.sizes) > 16, "results travel in batches"
        (line,) = log_lines.all("job.ended")
        assert (line["job_id"], line["requests"], line["complete"]) == ("sorting", 1200, True)
        assert not log_lines.all("row.failed")
        (job,) = home.core.ended_jobs
        assert job.startswith("sorting/")


async def test_a_bad_row_is_an_item_and_harms_no_neighbour(log_lines: LogLines) -> None:
    async with house() as home:
        client = Client(home, job_id="mixed")
        batch = rows(15)
        batch.insert(3, request([], request_id="empty"))
        batch.insert(9, request([5, -1], request_id="negative", max_tokens=0))
        await client.send(batch)
        report = await client.end()
        assert set(client.finished) == {f"row-{i}" for i in range(15)}
        assert client.failed["empty"].violations[0].field == "prompt.tokens.ids"
        assert len(client.failed["negative"].violations) == 2
        assert (report.requests, report.failed) == (17, 2)
        lines = log_lines.all("row.failed")
        assert [(line["job_id"], line["request_id"], line["code"]) for line in lines] == [
            ("mixed", "empty", "INVALID_ARGUMENT"),
            ("mixed", "negative", "INVALID_ARGUMENT"),
        ]


async def test_text_and_ids_in_one_message() -> None:
    async with house() as home:
        client = Client(home)
        await client.send([request("The fox", request_id="text"), request([5], request_id="ids")])
        await client.end()
        assert client.text("text").startswith("The fox")
        assert home.core.accepted == [("", "text"), ("", "ids")]


async def test_deltas_and_result_make_the_text() -> None:
    async with house() as home:
        text = "Grüße, 聪明的狐狸 👩‍🚀 and a tail"
        home.core.generate = lambda _prompt, _sample, _count: np.array(ids_of(byte_level(), text), np.int32)
        home.core.tokens_a_step = 1
        home.core.steps.close()
        client = Client(home, stream_deltas=True)
        await client.send(rows(3, max_tokens=48))
        for _ in range(4):
            home.core.steps.admit(3)
            before = len("".join(client.deltas.values()))
            await client.read_until(lambda before=before: len("".join(client.deltas.values())) > before)
        home.core.steps.admit()
        await client.end()
        assert all(client.text(f"row-{i}") == text for i in range(3))
        assert all(client.deltas[f"row-{i}"] for i in range(3))


async def test_without_deltas_nothing_comes_before_the_result() -> None:
    async with house() as home:
        client = Client(home)
        await client.send(rows(5, stop=["never"]))
        await client.end()
        assert not client.deltas


async def test_stop_strings_end_rows_early() -> None:
    async with house() as home:
        home.core.generate = lambda _prompt, _sample, _count: np.array(ids_of(byte_level(), "ab. cd"), np.int32)
        home.core.tokens_a_step = 1
        client = Client(home)
        await client.send(rows(4, stop=[". "]))
        await client.end()
        assert [client.text(f"row-{i}") for i in range(4)] == ["ab"] * 4
        assert client.finished["row-0"].samples[0].stop == ". "


async def test_a_repeated_id_fails_and_its_first_row_finishes() -> None:
    async with house() as home:
        home.core.steps.close()
        client, other = Client(home), Client(home)
        await client.send([*rows(1), *rows(1)])
        await client.read_until(lambda: client.failed)
        await other.send(rows(2))
        await other.read_until(lambda: other.failed)
        assert client.failed["row-0"].reason == other.failed["row-0"].reason == reasons.ID_IN_FLIGHT
        home.core.steps.admit()
        await client.end()
        await other.end()
        assert set(client.finished) == {"row-0"}
        assert set(other.finished) == {"row-1"}
        again = Client(home)
        await again.send(rows(1))
        await again.end()
        assert set(again.finished) == {"row-0"}


async def test_cancelled_rows_end_once_each_and_the_others_go_on() -> None:
    async with house() as home:
        home.core.steps.close()
        client, other = Client(home), Client(home)
        await client.send(rows(3))
        await other.send(rows(1, "other"))
        await wait_until(lambda: len(home.core.works) == 4)
        await client.send(cancel=["row-1", "other-0", "unknown"])
        await client.read_until(lambda: client.finished)
        assert client.finished["row-1"].samples[0].finish_reason == CANCELLED
        assert home.core.cancelled == [("", "row-1")], "another stream's row is not ours to cancel"
        await home.stub.CancelRequests(
            broker_service_pb2.CancelRequestsRequest(request_ids=["row-2", "other-0"]), timeout=PATIENCE_S
        )
        home.core.steps.admit()
        await client.end()
        await other.end()
        assert client.finished["row-0"].samples[0].finish_reason == LENGTH
        assert client.finished["row-2"].samples[0].finish_reason == CANCELLED
        assert other.finished["other-0"].samples[0].finish_reason == CANCELLED


async def test_a_client_that_goes_away_cancels_what_is_left(log_lines: LogLines) -> None:
    async with house() as home:
        home.core.steps.close()
        client = Client(home, job_id="left")
        await client.send(rows(8))
        await wait_until(lambda: len(home.core.works) == 8)
        client.call.cancel()
        await wait_until(lambda: not home.core.works)
        assert len(home.core.cancelled) == 8
        await wait_until(lambda: home.core.ended_jobs)
        (line,) = log_lines.all("job.ended")
        assert (line["job_id"], line["complete"]) == ("left", False)


async def test_a_client_that_vanishes_while_it_is_not_reading() -> None:
    async with house(result_bytes=20_000) as home:
        opened = home.connect()
        home.stub = type(home.stub)(opened)
        client = Client(home)
        await client.send(rows(600, max_tokens=48, return_token_ids=True))
        await wait_until(lambda: home.core.pauses)
        await opened.close()
        await wait_until(lambda: not home.core.works)
        await wait_until(lambda: home.core.ended_jobs)


async def test_a_slow_reader_stops_itself_and_nobody_else() -> None:
    """8 KB a row: what the broker holds for the slow one stays bounded, the other stream runs to its end."""
    size, bound = 8192, 200_000
    async with house(result_bytes=bound, prompt_tokens=64 * 100) as home:
        made = mining_contract()
        made.capabilities.payload.value.shape[:] = [size // 4]
        home.catalog.put(made, byte_level())
        home.core.payload = lambda _prompt: generation_pb2.Payload(data=bytes(size))
        slow, quick = Client(home, job_id="slow"), Client(home, job_id="quick")

        async def feed() -> None:
            for part in range(40):
                await slow.send(rows(50, f"slow{part}", max_tokens=None))

        feeding = asyncio.create_task(feed())
        taken, still = 0, 0
        for part in range(200):
            await quick.send(rows(50, f"quick{part}", max_tokens=None))
            await quick.read_until(lambda part=part: len(quick.finished) == 50 * (part + 1))
            before, taken = taken, sum(key[1].startswith("slow") for key in home.core.accepted)
            # One that is paused stands still; one that is not may only be slow, as everything is now and then.
            still = still + 1 if taken == before and home.core.paused else 0
            if still == 10:
                break
        assert still == 10, "it was read on and on"
        await quick.end()
        assert taken < 1500
        reading = asyncio.create_task(slow.read_until(lambda: len(slow.finished) == 2000))
        await asyncio.wait_for(feeding, PATIENCE_S)
        await asyncio.wait_for(reading, PATIENCE_S)
        await slow.end()
        assert not slow.failed
        assert not home.core.paused


async def test_rows_wait_where_the_core_has_no_room() -> None:
    async with house() as home:
        home.core.waiting_max = 10
        client = Client(home)
        await client.send(rows(500))
        await client.end()
        assert len(client.finished) == 500
        assert [key[1] for key in home.core.accepted] == [f"row-{i}" for i in range(500)], "in their order"


async def test_interactive_rows_do_not_wait_for_room() -> None:
    async with house() as home:
        home.core.waiting_max = 1
        home.core.steps.close()
        client = Client(home, lane=broker_service_pb2.LANE_INTERACTIVE)
        await client.send(rows(2))
        await client.read_until(lambda: client.failed)
        assert client.failed["row-1"].reason == reasons.BOUND_REACHED
        assert client.failed["row-1"].retry_after_s
        home.core.steps.admit()
        await client.end()


async def test_patience_at_the_door_has_an_end() -> None:
    async with house(room_patience_s=0.1) as home:
        home.core.waiting_max = 1
        home.core.steps.close()
        client = Client(home)
        await client.send(rows(3))
        await client.read_until(lambda: len(client.failed) == 2)
        assert {error.reason for error in client.failed.values()} == {reasons.BOUND_REACHED}
        home.core.steps.admit()
        report = await client.end()
        assert (report.requests, report.failed) == (3, 2)


async def test_a_stream_has_no_more_prompts_in_the_core_than_its_window() -> None:
    async with house(prompt_tokens=64 * 20) as home:
        home.core.steps.close()
        client = Client(home)
        await client.send(rows(100))
        await wait_until(lambda: len(home.core.works) >= 20)
        other = Client(home)
        await other.send(rows(1, "other"))
        await wait_until(lambda: ("", "other-0") in home.core.works)
        assert len(home.core.works) == 21
        home.core.steps.admit()
        await client.end()
        await other.end()
        assert len(client.finished) == 100


async def test_lost_workers_fail_rows_that_were_read_and_restart_the_others() -> None:
    async with house() as home:
        home.core.tokens_a_step = 1
        home.core.steps.close()
        client = Client(home, stream_deltas=True)
        await client.send(rows(2, max_tokens=48))
        home.core.steps.admit(1)
        await client.read_until(lambda: client.deltas)
        (read,) = client.deltas
        lost = UnavailableError("the worker is lost", reason=reasons.WORKER_LOST)
        assert not home.core.lose_attempt(("", read), lost)
        await client.read_until(lambda: client.failed)
        assert client.failed[read].reason == reasons.WORKER_LOST
        home.core.steps.admit()
        await client.end()
        assert len(client.finished) == 1


async def test_the_first_message_opens_the_stream_and_no_other_does() -> None:
    async with house() as home:
        call = home.stub.Exchange()
        await call.write(Message(requests=rows(1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert call_error(caught.value).violations[0].field == "open"
        twice = Client(home)
        await twice.send(rows(1))
        await twice.call.write(Message(open=Open()))
        assert (await twice.error()).violations[0].field == "open"
        wrong = Client(home, lane=9, job_id="x" * 129)
        await wrong.send()
        assert [violation.field for violation in (await wrong.error()).violations] == ["open.job_id", "open.lane"]
        assert not home.core.works


async def test_an_empty_stream_has_a_report() -> None:
    async with house() as home:
        client = Client(home, job_id="nothing")
        await client.send()
        report = await client.end()
        assert (report.job_id, report.requests, report.wall_ms) == ("nothing", 0, 0)


async def test_lanes_come_from_the_row_or_the_stream() -> None:
    async with house() as home:
        home.core.steps.close()
        client = Client(home)
        await client.send([*rows(1), request(request_id="now", lane=broker_service_pb2.LANE_INTERACTIVE)])
        await wait_until(lambda: len(home.core.works) == 2)
        assert home.core.works["", "row-0"].lane is Lane.BULK
        assert home.core.works["", "now"].lane is Lane.INTERACTIVE
        assert home.core.works["", "row-0"].job == home.core.works["", "now"].job != ""
        home.core.steps.admit()
        await client.end()


async def test_a_draining_broker_refuses_new_rows_and_ends_the_stream_after_the_old_ones() -> None:
    async with house() as home:
        home.core.steps.close()
        client, idle = Client(home), Client(home)
        await client.send(rows(2))
        await idle.send()
        await wait_until(lambda: len(home.core.works) == 2)
        await home.servicer.drain()
        await client.send(rows(1, "late"))
        await client.read_until(lambda: client.failed)
        assert client.failed["late-0"].reason == reasons.DRAINING
        assert (await idle.error()).reason == reasons.DRAINING
        home.core.steps.admit()
        assert (await client.error()).reason == reasons.DRAINING
        assert set(client.finished) == {"row-0", "row-1"}
        refused = Client(home)
        await refused.send()
        assert (await refused.error()).reason == reasons.DRAINING


async def test_messages_stay_within_what_clients_take() -> None:
    async with house() as home:
        made = mining_contract()
        made.capabilities.payload.value.shape[:] = [50_000]
        home.catalog.put(made, byte_level())
        home.core.payload = lambda _prompt: generation_pb2.Payload(data=bytes(200_000))
        home.core.steps.close()
        home.core.open.clear()
        client = Client(home)
        await client.send(rows(40, max_tokens=None))
        await wait_until(lambda: len(home.core.works) == 40)
        home.core.open.set()
        await client.end()
        assert len(client.finished) == 40
        assert max(client.sizes) <= 6


async def test_a_result_that_no_message_carries_fails_alone(log_lines: LogLines) -> None:
    async with house(message_bytes=64 * 1024) as home:
        made = mining_contract()
        made.capabilities.payload.value.shape[:] = [50_000]
        home.catalog.put(made, byte_level())
        home.core.payload = lambda prompt: generation_pb2.Payload(data=bytes(200_000 if prompt[0] == 6 else 100))
        client = Client(home)
        await client.send(rows(3, max_tokens=None))
        report = await client.end()
        assert set(client.finished) == {"row-0", "row-2"}
        assert "at most 64512" in client.failed["row-1"].message
        assert report.failed == 1
        assert [line["request_id"] for line in log_lines.all("row.failed")] == ["row-1"]


async def test_one_stream_tells_its_rows_apart_by_id_alone() -> None:
    async with house() as home:
        home.core.steps.close()
        client = Client(home)
        await client.send([*rows(1, tenant="a"), *rows(1, tenant="b")])
        await client.read_until(lambda: client.failed)
        assert client.failed["row-0"].reason == reasons.ID_IN_FLIGHT
        home.core.steps.admit()
        await client.end()
        assert home.core.accepted == [("a", "row-0")]


async def test_streams_are_counted() -> None:
    async with house(streams_max=1) as home:
        client = Client(home)
        await client.send(rows(1))
        await client.read()
        error = await Client(home).error()
        assert error.reason == reasons.BOUND_REACHED
        assert error.retry_after_s
        await client.end()
        third = Client(home)
        await third.send(rows(1))
        await third.end()
