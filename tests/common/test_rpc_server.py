# SPDX-License-Identifier: Apache-2.0
"""The server as clients see it: errors, outcomes, health, limits and the drain, over real sockets."""

from __future__ import annotations

import asyncio
import functools
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.errors import (
    DeadlineExceededError,
    FabricError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    StartError,
    UnavailableError,
)
from services.common.process import Stop
from services.common.rpc import Server, call_error, channel, translated
from services.common.rpc.requests import only
from services.common.telemetry import Telemetry
from tests.common.behaviour import FULL_NAME, KINDS, Behaviour, call, register
from tests.support.logged import captured_logs
from tests.support.servers import LoopbackSettings, serving
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry("test")
    yield made
    made.close()


@pytest.fixture
async def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
async def server(behaviour: Behaviour, telemetry: Telemetry) -> AsyncIterator[Server]:
    async with serving(register, behaviour, FULL_NAME, telemetry=telemetry) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with channel(server.address) as made:
        yield made


@pytest.fixture
def scrape(telemetry: Telemetry) -> Callable[[], str]:
    address = telemetry.serve_metrics("127.0.0.1:0")

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    return read


async def health(client: grpc.aio.Channel, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(client)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
    return int(answer.status)


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_through(client: grpc.aio.Channel, kind: str) -> None:
    answers = await call(client, kind, b"ok")
    assert answers == ([b"first", b"ok"] if kind == "UnaryStream" else [b"ok"])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_typed_error_arrives_with_every_detail(client: grpc.aio.Channel, kind: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught, translated():
        await call(client, kind, b"typed")
    assert [v.field for v in caught.value.violations] == ["a.b", "c"]
    assert caught.value.reason == "INVALID_FIELDS"
    with pytest.raises(ResourceExhaustedError) as full, translated():
        await call(client, kind, b"exhausted")
    assert full.value.retry_after_s == 1.5
    assert full.value.metadata == {"limit": "7"}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_says_nothing_but_a_correlation_id(client: grpc.aio.Channel, kind: str) -> None:
    with captured_logs() as lines, pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(client, kind, b"crash")
    error = call_error(caught.value)
    assert isinstance(error, InternalError)
    assert "secret-path" not in (caught.value.details() or "") + str(caught.value.trailing_metadata())
    correlation = error.metadata["correlation_id"]
    (line,) = lines.all("call.failed")
    assert line["correlation_id"] == correlation
    assert line["method"] == f"{FULL_NAME}/{kind}"
    assert line["exception"][0]["exc_type"] == "KeyError"
    assert "locals" not in line["exception"][0]["frames"][0]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_context_abort_is_left_as_it_is(client: grpc.aio.Channel, kind: str) -> None:
    with pytest.raises(NotFoundError, match="gone"), translated():
        await call(client, kind, b"abort")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_ends_the_handler_and_its_clean_up_runs(
    client: grpc.aio.Channel,
    behaviour: Behaviour,
    scrape: Callable[[], str],
    kind: str,
) -> None:
    line = f'rpc_method="{FULL_NAME}/{kind}",rpc_status_code="DEADLINE_EXCEEDED"'

    async def told() -> bool:
        # The client began to count first: its giving up may reach the handler before that has begun, or before the
        # server's own count is over.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(client, kind, b"wait", timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until(lambda: behaviour.cleaned == behaviour.calls, what="the handler was cancelled")
        return behaviour.cleaned > 0 and line in scrape()

    await wait_until(told, what=f"the outcome {line}")


async def test_a_client_that_goes_away_ends_its_stream(client: grpc.aio.Channel, behaviour: Behaviour) -> None:
    make: Any = client.unary_stream(f"/{FULL_NAME}/UnaryStream")
    stream = make(b"wait", timeout=2 * PATIENCE_S)
    assert await stream.read() == b"first"
    await behaviour.waiting.wait()
    stream.cancel()
    await wait_until(lambda: behaviour.cleaned == 1, what="the handler was cancelled")


async def test_a_stream_that_ends_between_two_responses_cleans_up_in_its_own_task(
    client: grpc.aio.Channel,
    behaviour: Behaviour,
) -> None:
    make: Any = client.unary_stream(f"/{FULL_NAME}/UnaryStream")
    stream = make(b"flood", timeout=2 * PATIENCE_S)
    assert await stream.read() == b"first"
    stream.cancel()
    assert await wait_until(lambda: behaviour.cleaned_by_itself is not None, what="the handler ended")
    assert behaviour.cleaned_by_itself


async def test_outcomes_are_counted_by_method_and_code(client: grpc.aio.Channel, scrape: Callable[[], str]) -> None:
    await call(client, "UnaryUnary", b"ok")
    for wish in (b"typed", b"crash"):
        with pytest.raises(FabricError), translated():
            await call(client, "UnaryUnary", wish)

    def shows(line: str) -> bool:
        return line in scrape()

    for code in ("OK", "INVALID_ARGUMENT", "INTERNAL"):
        line = (
            f'rpc_server_call_duration_seconds_count{{rpc_method="{FULL_NAME}/UnaryUnary",'
            f'rpc_status_code="{code}"}} 1.0'
        )
        # Counted once the answer is on its way.
        await wait_until(functools.partial(shows, line), what=line)
    assert f'ifabric_rpc_server_active{{rpc_method="{FULL_NAME}/UnaryUnary"}} 0.0' in scrape()


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream"])
async def test_a_single_call_without_its_message_is_refused(client: grpc.aio.Channel, kind: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        for part in list[bytes]():
            yield part

    make: Any = client.stream_stream(f"/{FULL_NAME}/{kind}")
    with pytest.raises(InvalidArgumentError, match="request: is absent"), translated():
        _ = [answer async for answer in make(nothing(), timeout=PATIENCE_S)]


async def test_a_message_that_does_not_come_whole_is_waited_for_so_long() -> None:
    async def waits() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(DeadlineExceededError, match=r"did not come whole within 0\.01 s"):
        await only(waits(), 0.01)


async def test_an_unknown_method_is_unimplemented_and_makes_no_label(
    client: grpc.aio.Channel,
    scrape: Callable[[], str],
) -> None:
    unknown: Any = client.unary_unary("/no.such.Service/Method")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unknown(b"", timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "no.such" not in scrape()


async def test_a_long_refusal_arrives_cut_but_whole_enough(client: grpc.aio.Channel) -> None:
    with pytest.raises(InvalidArgumentError) as caught, translated():
        await call(client, "UnaryUnary", b"many")
    kept = caught.value.violations
    assert len(kept) > 100
    assert kept[-1].description == f"and {2_000 - len(kept) + 1} more violations"


async def test_a_message_over_the_limit_is_refused_and_the_connection_survives(behaviour: Behaviour) -> None:
    settings = LoopbackSettings(message_bytes_max=100 * 1024, drain_grace_s=1.0)
    async with serving(register, behaviour, FULL_NAME, settings=settings) as server, channel(server.address) as client:
        with pytest.raises(ResourceExhaustedError, match="larger than max"), translated():
            await call(client, "UnaryUnary", b"big")
        with pytest.raises(ResourceExhaustedError, match="larger than max"), translated():
            await call(client, "UnaryUnary", b"x" * (200 * 1024))
        assert await call(client, "UnaryUnary", b"ok") == [b"ok"]


async def test_calls_beyond_a_connections_share_wait_and_other_connections_do_not(behaviour: Behaviour) -> None:
    settings = LoopbackSettings(calls_per_connection_max=1, drain_grace_s=1.0)
    apart = (("grpc.use_local_subchannel_pool", 1),)
    async with (
        serving(register, behaviour, FULL_NAME, settings=settings) as server,
        channel(server.address) as client,
        grpc.aio.insecure_channel(server.address, options=apart) as other,
    ):
        first = asyncio.create_task(call(client, "UnaryUnary", b"wait", timeout=2 * PATIENCE_S))
        await behaviour.waiting.wait()
        second = asyncio.create_task(call(client, "UnaryUnary", b"second", timeout=2 * PATIENCE_S))
        assert await call(other, "UnaryUnary", b"other") == [b"other"]
        assert behaviour.calls == 2
        assert not second.done()
        behaviour.release.set()
        assert await first == [b"wait"]
        assert await second == [b"second"]


async def test_health_is_not_serving_until_ready(behaviour: Behaviour, telemetry: Telemetry) -> None:
    server = Server(LoopbackSettings(drain_grace_s=1.0), telemetry)
    server.add(register, behaviour, FULL_NAME)
    async with channel(await server.start()) as client:
        assert [await health(client, name) for name in ("", FULL_NAME, "liveness")] == [
            NOT_SERVING,
            NOT_SERVING,
            SERVING,
        ]
        await server.set_health("engine/x", True)
        await server.ready()
        assert [await health(client, name) for name in ("", FULL_NAME, "engine/x")] == [SERVING] * 3
        await server.set_health("engine/x", False)
        assert [await health(client, name) for name in ("", "engine/x")] == [SERVING, NOT_SERVING]
        await server.not_ready()
        assert await health(client, "") == NOT_SERVING
        await server.close()


@pytest.mark.parametrize("shown", [True, False])
async def test_reflection_lists_our_services_where_it_is_on(behaviour: Behaviour, shown: bool) -> None:
    settings = LoopbackSettings(reflection=shown, drain_grace_s=1.0)
    async with serving(register, behaviour, FULL_NAME, settings=settings) as server, channel(server.address) as client:
        make: Any = reflection_pb2_grpc.ServerReflectionStub
        stub = make(client)
        asked = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE_S
        )
        if not shown:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        answer = await asked.read()
        names = [service.name for service in answer.list_services_response.service]
        assert set(names) >= {FULL_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_what_is_for_operators_is_closed_where_others_may_come_by_way_of_this_machine(
    behaviour: Behaviour,
) -> None:
    """Behind a proxy beside the server every caller is of the same machine."""
    settings = LoopbackSettings(listen="0.0.0.0:0", allow_cleartext=("grpc",), drain_grace_s=1.0)
    async with serving(register, behaviour, FULL_NAME, settings=settings) as server:
        beside = server.address.replace("0.0.0.0", "127.0.0.1")
        async with channel(beside) as client:
            assert await health(client, "") == SERVING
            with pytest.raises(PermissionDeniedError, match="on loopback only") as caught, translated():
                await call(client, "UnaryUnary", b"ok")
    assert (caught.value.reason, behaviour.calls) == ("LOCAL_ONLY", 0)


async def test_a_taken_port_is_one_sentence(server: Server, telemetry: Telemetry) -> None:
    second = Server(LoopbackSettings(listen=server.address), telemetry)
    with pytest.raises(StartError, match=f"cannot listen on {server.address}: the port is in use") as caught:
        await second.start()
    assert "\n" not in str(caught.value)


async def test_a_drain_lets_calls_end_and_refuses_new_ones(behaviour: Behaviour, telemetry: Telemetry) -> None:
    server, stop, order = Server(LoopbackSettings(drain_grace_s=PATIENCE_S), telemetry), Stop(), []
    server.add(register, behaviour, FULL_NAME)

    async def note(what: str) -> None:
        order.append(what)

    server.on_drain("first", lambda: note("drain 1"))
    server.on_drain("second", lambda: note("drain 2"))
    server.on_close("engine", lambda: note("close 1"))
    server.on_close("outer", lambda: note("close 2"))
    async with channel(await server.start()) as client, channel(server.address) as late:
        await server.ready()
        served = asyncio.create_task(server.serve(stop))
        running = asyncio.create_task(call(client, "StreamStream", b"wait", timeout=2 * PATIENCE_S))
        await behaviour.waiting.wait()
        stop.request("the test says so")
        await wait_until(lambda: order == ["drain 1", "drain 2"], what="the drain hooks ran in order")
        assert server.draining.is_set()

        async def refused() -> bool:
            try:
                await call(late, "UnaryUnary", b"ok", timeout=1)
            except grpc.aio.AioRpcError as error:
                return isinstance(call_error(error), UnavailableError)
            return False

        await wait_until(refused, what="new calls are UNAVAILABLE")
        assert not running.done()
        behaviour.release.set()
        assert await running == [b"wait"]
        await asyncio.wait_for(served, PATIENCE_S)
    assert order == ["drain 1", "drain 2", "close 2", "close 1"]


async def test_a_drain_turns_health_off_for_good_and_keeps_liveness(behaviour: Behaviour, telemetry: Telemetry) -> None:
    server = Server(LoopbackSettings(drain_grace_s=PATIENCE_S), telemetry)
    server.add(register, behaviour, FULL_NAME)
    going, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        going.set()
        await go_on.wait()

    server.on_drain("hold", hold)
    async with channel(await server.start()) as client:
        await server.set_health("engine/x", True)
        await server.ready()
        closing = asyncio.create_task(server.close())
        await going.wait()
        await server.ready()
        await server.set_health("engine/x", True)
        assert [await health(client, name) for name in ("", FULL_NAME, "engine/x", "liveness")] == [
            NOT_SERVING,
            NOT_SERVING,
            NOT_SERVING,
            SERVING,
        ]
        go_on.set()
        await asyncio.wait_for(closing, PATIENCE_S)


async def test_a_failing_or_slow_hook_stops_no_other(behaviour: Behaviour, telemetry: Telemetry) -> None:
    server, ran = Server(LoopbackSettings(drain_grace_s=0.2), telemetry), []
    server.add(register, behaviour, FULL_NAME)

    async def fail() -> None:
        raise OSError("hook")

    async def hang() -> None:
        await asyncio.Event().wait()

    async def note() -> None:
        ran.append("yes")

    for name, hook in (("fail", fail), ("hang", hang), ("note", note)):
        server.on_drain(name, hook)
    await server.start()
    await asyncio.wait_for(server.close(), PATIENCE_S)
    assert ran == ["yes"]


async def test_a_call_that_outlives_the_grace_is_cancelled(behaviour: Behaviour, telemetry: Telemetry) -> None:
    server = Server(LoopbackSettings(drain_grace_s=0.2), telemetry)
    server.add(register, behaviour, FULL_NAME)
    async with channel(await server.start()) as client:
        running = asyncio.create_task(call(client, "UnaryUnary", b"wait", timeout=2 * PATIENCE_S))
        await behaviour.waiting.wait()
        await server.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await wait_until(lambda: behaviour.cleaned == 1, what="the handler was cancelled")


async def test_an_open_health_watch_does_not_hold_up_the_drain(behaviour: Behaviour, telemetry: Telemetry) -> None:
    server = Server(LoopbackSettings(drain_grace_s=2 * PATIENCE_S), telemetry)
    server.add(register, behaviour, FULL_NAME)
    async with channel(await server.start()) as client:
        await server.ready()
        stub: Any = health_pb2_grpc.HealthStub(client)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=2 * PATIENCE_S)
        seen = [(await watch.read()).status]
        started = time.monotonic()
        closing = asyncio.create_task(server.close())
        while (answer := await watch.read()) is not grpc.aio.EOF:
            seen.append(answer.status)
        await closing
    assert seen == [SERVING, NOT_SERVING]
    assert time.monotonic() - started < PATIENCE_S
