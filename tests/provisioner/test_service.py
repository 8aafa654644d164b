# SPDX-License-Identifier: Apache-2.0
"""The provisioner over real sockets: workers that register, brokers that watch, operators that ask."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ifabric.engine.v1 import node_pb2
from ifabric.provisioner.v1 import provisioner_service_pb2 as wire
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common import reasons
from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.rpc import call_error, channel, translated
from tests.provisioner import made
from tests.provisioner.conftest import HEARTBEAT_MS, Running, running_provisioner
from tests.provisioner.fake_worker import FakeWorker, fake_worker
from tests.support.logged import captured_logs
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator


@pytest.fixture
async def worker(provisioner: Running) -> AsyncIterator[FakeWorker]:
    async with fake_worker(provisioner.address) as made_worker:
        yield made_worker


async def metrics(provisioner: Running) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{provisioner.metrics}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


async def watch(client: grpc.aio.Channel, resume_token: str = "") -> AsyncGenerator[wire.WatchNodesResponse, None]:
    request = wire.WatchNodesRequest(resume_token=resume_token)
    call = provisioner_service_pb2_grpc.ProvisionerServiceStub(client).WatchNodes(request, timeout=PATIENCE_S)
    try:
        with translated():
            async for message in call:
                yield message
    finally:
        call.cancel()


@pytest.mark.parametrize("payload", [False, True])
async def test_a_good_node_is_accepted_after_its_probe(provisioner: Running, payload: bool) -> None:
    async with fake_worker(provisioner.address, payload=payload) as worker:
        before = time.time()
        first = await worker.register()
        assert (first.state, first.heartbeat_interval_ms) == (wire.NODE_STATE_MAY_LOAD, HEARTBEAT_MS)
        assert worker.servicer.probes == 0
        second = await worker.register(loaded=True)
        assert second.state == wire.NODE_STATE_ACCEPTED
        assert worker.servicer.probes == 1
        (node,) = await worker.listed()
        assert node.state == wire.NODE_STATE_ACCEPTED
        assert node.description == worker.node
        assert node.report == made.report(worker.node)
        assert not node.HasField("stats")
        now = time.time()
        since, until = node.register_time.ToNanoseconds() / 1e9, node.expire_time.ToNanoseconds() / 1e9
        lease_s = 3 * HEARTBEAT_MS / 1000
        assert before <= since <= now
        assert before + lease_s <= until <= now + lease_s


async def test_a_node_without_a_token_budget_is_refused_everywhere_it_can_be_seen(provisioner: Running) -> None:
    async with fake_worker(provisioner.address) as worker:
        worker.node.contract.limits.ClearField("step_token_budget")
        worker.node.contract.limits.ClearField("slots")
        worker.node.card.memory_bytes = 7
        with captured_logs() as lines:
            with pytest.raises(InvalidArgumentError) as caught:
                await worker.register()
            with pytest.raises(InvalidArgumentError):
                await worker.register()
        error = caught.value
        assert error.reason == reasons.NODE_DESCRIPTION_REFUSED
        assert [v.field for v in error.violations] == [
            "contract.limits.slots",
            "contract.limits.step_token_budget",
            "card.memory_bytes",
        ]
        assert "found absent, expected integer from 1 to" in error.violations[1].description

        (node,) = await worker.listed(wire.NODE_STATE_REFUSED)
        assert [v.path for v in node.violations] == [v.field for v in error.violations]
        refused = lines.all("node.refused")
        assert len(refused) == 1, "the same refusal again is not news"
        assert refused[0]["violations"][1] == {
            "path": "contract.limits.step_token_budget",
            "found": "absent",
            "expected": "integer from 1 to 16777216",
        }
        text = await metrics(provisioner)
        assert 'ifabric_provisioner_nodes{state="refused"} 1.0' in text
        assert 'ifabric_provisioner_registrations_total{outcome="refused"} 2.0' in text
        assert 'ifabric_provisioner_violations_total{field="contract.limits.step_token_budget"} 1.0' in text
        assert worker.servicer.probes == 0


async def test_a_field_that_a_node_makes_up_makes_no_label(provisioner: Running, worker: FakeWorker) -> None:
    worker.node.findings.add(path="limits.made_up_by_a_node", found="1", expected="no such field")
    with pytest.raises(InvalidArgumentError):
        await worker.register()
    text = await metrics(provisioner)
    assert "made_up" not in text
    assert 'violations_total{field="other"} 1.0' in text


async def test_a_mended_node_is_accepted_without_a_restart(worker: FakeWorker) -> None:
    worker.node.contract.limits.ClearField("step_token_budget")
    with pytest.raises(InvalidArgumentError):
        await worker.register()
    worker.node.contract.limits.step_token_budget = 512
    assert (await worker.register()).state == wire.NODE_STATE_MAY_LOAD
    assert (await worker.register(loaded=True)).state == wire.NODE_STATE_ACCEPTED
    (node,) = await worker.listed()
    assert not node.violations


async def test_fields_that_disagree_are_a_failed_precondition(worker: FakeWorker) -> None:
    worker.node.card.family = "nvidia-h200"
    with pytest.raises(FailedPreconditionError) as caught:
        await worker.register()
    assert caught.value.reason == reasons.NODE_DISAGREES
    assert [v.field for v in caught.value.violations] == ["card.family"]


@pytest.mark.parametrize(("field", "value"), [("node_id", ""), ("incarnation", ""), ("address", "nowhere")])
async def test_a_node_that_cannot_be_listed_is_not(worker: FakeWorker, field: str, value: str) -> None:
    setattr(worker.node, field, value)
    with pytest.raises(InvalidArgumentError) as caught:
        await worker.register()
    assert [v.field for v in caught.value.violations] == [field]
    assert await worker.listed() == []


async def test_a_description_too_long_to_pass_on_is_refused(worker: FakeWorker) -> None:
    worker.node.suite_version = "x" * 300_000
    with pytest.raises(InvalidArgumentError, match="at most 262144 bytes"):
        await worker.register()
    assert await worker.listed() == []


async def test_a_probe_that_disagrees_refuses_and_a_later_one_mends(worker: FakeWorker) -> None:
    worker.servicer.answer = made.answer(worker.node)
    worker.servicer.answer.usage.computed_tokens = 0
    with pytest.raises(FailedPreconditionError) as caught:
        await worker.register(loaded=True)
    assert [v.field for v in caught.value.violations] == ["probe.usage.computed_tokens"]
    (node,) = await worker.listed()
    assert node.state == wire.NODE_STATE_REFUSED
    worker.servicer.answer.usage.computed_tokens = 4
    assert (await worker.register(loaded=True)).state == wire.NODE_STATE_ACCEPTED
    assert worker.servicer.probes == 2


async def test_a_worker_that_refuses_its_probe_is_refused_with_its_words(worker: FakeWorker) -> None:
    worker.servicer.answer = worker_answer = made.answer(worker.node)
    worker.node.address, port = "127.0.0.1:1", worker.node.address
    with pytest.raises(FailedPreconditionError) as caught:
        await worker.register(loaded=True)
    (violation,) = caught.value.violations
    assert violation.field == "probe"
    assert "PEER_UNREACHABLE" in violation.description
    assert "WorkerService.Probe at 127.0.0.1:1" in violation.description
    assert worker_answer.report.engine_digest == made.DIGEST
    worker.node.address = port
    assert (await worker.register(loaded=True)).state == wire.NODE_STATE_ACCEPTED


@pytest.mark.parametrize("address", ["exämple.test:1", "a b:1", "\x00:1", "%zz:1", "x" * 5_000 + ":1"])
async def test_an_address_that_cannot_be_is_that_nodes_trouble_alone(worker: FakeWorker, address: str) -> None:
    good, worker.node.address = worker.node.address, address
    with pytest.raises(InvalidArgumentError) as caught:
        await worker.register(loaded=True)
    assert [v.field for v in caught.value.violations] == ["address"]
    worker.node.address = good
    assert (await worker.register(loaded=True)).state == wire.NODE_STATE_ACCEPTED


async def test_a_probe_has_a_limit() -> None:
    async with (
        running_provisioner(probe_timeout_s=0.2) as provisioner,
        fake_worker(provisioner.address) as worker,
    ):
        worker.servicer.go.clear()
        with pytest.raises(FailedPreconditionError) as caught:
            await worker.register(loaded=True)
        assert "DEADLINE" in caught.value.violations[0].description


async def test_a_registration_that_is_sent_again_waits_for_the_same_probe(worker: FakeWorker) -> None:
    worker.servicer.go.clear()
    first = asyncio.create_task(worker.register(loaded=True))
    await wait_until(lambda: worker.servicer.probes == 1, what="the probe arrived")
    first.cancel()  # the worker gave up waiting; its probe goes on
    second = asyncio.create_task(worker.register(loaded=True))
    (node,) = await wait_until(worker.listed)
    assert node.state == wire.NODE_STATE_LOADED
    worker.servicer.go.set()
    assert (await second).state == wire.NODE_STATE_ACCEPTED
    assert worker.servicer.probes == 1


async def test_a_node_that_is_withdrawn_while_probed_stays_out(worker: FakeWorker) -> None:
    worker.servicer.go.clear()
    registering = asyncio.create_task(worker.register(loaded=True))
    await wait_until(lambda: worker.servicer.probes == 1, what="the probe arrived")
    await worker.withdraw()
    worker.servicer.go.set()
    with pytest.raises(FailedPreconditionError) as caught:
        await registering
    assert caught.value.reason == reasons.NODE_OVERTAKEN
    assert await worker.listed() == []


async def test_a_lease_ends_without_heartbeats_and_lives_with_them() -> None:
    async with (
        running_provisioner(heartbeat_interval_ms=500) as provisioner,
        fake_worker(provisioner.address, "quiet") as quiet,
        fake_worker(provisioner.address, "alive") as alive,
    ):
        await quiet.register(loaded=True)
        await alive.register(loaded=True)

        async def only_alive() -> bool:
            answer = await alive.heartbeat(stats=node_pb2.EngineStats(steps=7))
            assert answer.state == wire.NODE_STATE_ACCEPTED
            return [node.description.node_id for node in await alive.listed()] == ["alive"]

        await wait_until(only_alive, what="the quiet node's lease ended")
        (node,) = await alive.listed()
        assert node.stats.steps == 7
        with pytest.raises(NotFoundError) as caught:
            await quiet.heartbeat()
        assert caught.value.reason == reasons.NODE_UNKNOWN
        assert (await quiet.register(loaded=True)).state == wire.NODE_STATE_ACCEPTED


async def test_a_restarted_worker_keeps_its_name(provisioner: Running) -> None:
    async with (
        fake_worker(provisioner.address, incarnation="i-1") as old,
        fake_worker(provisioner.address, incarnation="i-2") as new,
    ):
        await old.register(loaded=True)
        await new.register(loaded=True)
        with pytest.raises(FailedPreconditionError) as caught:
            await old.heartbeat()
        assert caught.value.reason == reasons.NODE_SUPERSEDED
        await old.withdraw()
        (node,) = await new.listed()
        assert node.description.incarnation == "i-2"


async def test_a_watcher_sees_every_state_a_node_goes_through(worker: FakeWorker, provisioner: Running) -> None:
    async with channel(provisioner.address) as client:
        stream = watch(client)
        first = await anext(stream)
        assert (first.snapshot, list(first.nodes)) == (True, [])
        seen: list[str] = []
        await worker.register()
        seen.append(wire.NodeState.Name((await anext(stream)).nodes[0].state))
        worker.servicer.go.clear()
        registering = asyncio.create_task(worker.register(loaded=True))
        seen.append(wire.NodeState.Name((await anext(stream)).nodes[0].state))
        worker.servicer.go.set()
        await registering
        seen.append(wire.NodeState.Name((await anext(stream)).nodes[0].state))
        await worker.heartbeat(draining=True)
        seen.append(wire.NodeState.Name((await anext(stream)).nodes[0].state))
        await worker.withdraw()
        gone = await anext(stream)
        assert list(gone.gone_node_ids) == ["node-1"]
        assert gone.revision == first.revision + 5
        await stream.aclose()
    assert [state.removeprefix("NODE_STATE_") for state in seen] == ["MAY_LOAD", "LOADED", "ACCEPTED", "DRAINING"]


async def test_a_watcher_whose_connection_broke_goes_on_where_it_was() -> None:
    async with (
        running_provisioner(heartbeat_interval_ms=1_000) as provisioner,
        fake_worker(provisioner.address, "a") as a,
        fake_worker(provisioner.address, "b") as b,
    ):
        async with channel(provisioner.address) as client:
            stream = watch(client)
            await anext(stream)
            await a.register()
            await anext(stream)
            await b.register()
            before = await anext(stream)
            assert [node.description.node_id for node in before.nodes] == ["b"]
            await stream.aclose()
        await b.register(loaded=True)
        await a.withdraw()
        async with channel(provisioner.address) as client:
            stream = watch(client, before.resume_token)
            since = await anext(stream)
            assert not since.snapshot
            states = [(node.description.node_id, node.state) for node in since.nodes]
            assert states == [("b", wire.NODE_STATE_ACCEPTED)]
            assert list(since.gone_node_ids) == ["a"]
            await stream.aclose()


async def test_a_restarted_provisioner_tells_watchers_nothing_before_the_workers_told_it(address: str) -> None:
    async with fake_worker("127.0.0.1:1") as worker:
        worker.servicer.answer = made.answer(worker.node)
        for _ in range(2):
            async with (
                running_provisioner(heartbeat_interval_ms=500, listen=address),
                channel(address) as client,
            ):
                stream = watch(client)
                first = asyncio.ensure_future(anext(stream))
                again = FakeWorker(client, worker.servicer, worker.node)
                with pytest.raises(NotFoundError):
                    await again.heartbeat()
                await again.register(loaded=True)
                snapshot = await first
                assert [node.state for node in snapshot.nodes] == [wire.NODE_STATE_ACCEPTED]
                await stream.aclose()


async def test_the_first_snapshot_waits_for_probes_that_have_begun() -> None:
    async with (
        running_provisioner(heartbeat_interval_ms=200) as provisioner,
        channel(provisioner.address) as client,
        fake_worker(provisioner.address) as worker,
    ):
        worker.servicer.go.clear()
        registering = asyncio.create_task(worker.register(loaded=True))
        stream = watch(client)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.wait({first}, timeout=1.5)
        assert not first.done()
        worker.servicer.go.set()
        assert [node.state for node in (await first).nodes] == [wire.NODE_STATE_ACCEPTED]
        await registering
        await stream.aclose()


async def test_watchers_are_sent_away_when_the_provisioner_drains() -> None:
    settings = {"heartbeat_interval_ms": 200, "drain_grace_s": 60.0}
    async with running_provisioner(**settings) as provisioner, channel(provisioner.address) as client:
        stream = watch(client)
        await anext(stream)
        started = time.monotonic()
        provisioner.stop.request("the test says so")
        with pytest.raises(UnavailableError) as caught:
            await anext(stream)
        assert caught.value.reason == reasons.DRAINING
    assert time.monotonic() - started < 30, "it did not wait for its grace to be over"


async def test_bounds_are_told(worker: FakeWorker) -> None:
    settings = {"heartbeat_interval_ms": 500, "nodes_max": 1, "watchers_max": 1}
    async with running_provisioner(**settings) as small, channel(small.address) as client:
        async with fake_worker(small.address, "a") as first, fake_worker(small.address, "b") as second:
            await first.register()
            with pytest.raises(ResourceExhaustedError) as caught:
                await second.register()
            assert (caught.value.reason, caught.value.retry_after_s is not None) == (reasons.NODES_FULL, True)
        one, two = watch(client), watch(client)
        await anext(one)
        with pytest.raises(ResourceExhaustedError) as full:
            await anext(two)
        assert full.value.reason == reasons.WATCHERS_FULL
        await one.aclose()


async def test_explanations_are_sentences(worker: FakeWorker) -> None:
    async def explain() -> wire.ExplainNodeResponse:
        with translated():
            return await worker.stub.ExplainNode(wire.ExplainNodeRequest(node_id="node-1"), timeout=5)

    with pytest.raises(NotFoundError, match="no node 'node-1' has a live lease"):
        await explain()
    await worker.register()
    assert (await explain()).sentences[0] == (
        "Node node-1 may load smollm2-135m-instruct-q8_0-cpu: its description holds, and nothing is loaded yet."
    )
    worker.node.contract.limits.ClearField("step_token_budget")
    with pytest.raises(InvalidArgumentError):
        await worker.register()
    told = await explain()
    assert told.state == wire.NODE_STATE_REFUSED
    assert told.sentences[1] == ("contract.limits.step_token_budget is absent; expected is integer from 1 to 16777216.")
    assert all(sentence.endswith(".") for sentence in told.sentences)


async def test_an_unknown_state_in_a_filter_is_refused_with_its_place(worker: FakeWorker) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await worker.listed(wire.NODE_STATE_REFUSED, 17)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == ["states[1]"]


async def test_the_probe_belongs_to_the_trace_of_its_registration(worker: FakeWorker) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    worker.servicer.answer = made.answer(worker.node)
    await worker.stub.RegisterNode(
        wire.RegisterNodeRequest(description=worker.node, loaded=made.report(worker.node)),
        timeout=5,
        metadata=(("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),),
    )
    assert worker.servicer.traceparent.split("-")[1] == trace


def test_every_rpc_of_the_proto_is_served() -> None:
    from services.provisioner.servicer import FULL_NAME, ProvisionerServicer

    service: Any = wire.DESCRIPTOR.services_by_name["ProvisionerService"]
    assert service.full_name == FULL_NAME
    for method in service.methods:
        assert method.name in vars(ProvisionerServicer), method.name


def test_call_errors_keep_their_type() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "no")
    assert isinstance(call_error(error), UnavailableError)
