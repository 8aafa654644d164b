# SPDX-License-Identifier: Apache-2.0
"""Describe, Probe and FetchFile over real sockets and a real engine."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from engines.simulated import StepFault
from ifabric.engine.v1 import contract_pb2
from ifabric.worker.v1 import worker_service_pb2 as wire
from ifabric.worker.v1 import worker_service_pb2_grpc
from services.common import reasons
from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from services.common.rpc import channel, translated
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker.made import work
from tests.worker.running import LONG, LONG_TOKENS, MINING, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.worker.running import Running


@asynccontextmanager
async def caller(worker: Running) -> AsyncIterator[worker_service_pb2_grpc.WorkerServiceAsyncStub]:
    """A stub whose failures are ours."""
    async with channel(worker.address) as made:
        with translated():
            yield worker_service_pb2_grpc.WorkerServiceStub(made)


async def test_describe_says_what_was_registered_what_is_loaded_and_what_it_did(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, worker.broker() as broker, caller(worker) as stub:
        await broker.dispatch(work(1, range(10), max_tokens=3))
        await broker.finish_of(1)
        said = await stub.Describe(wire.DescribeRequest(), timeout=PATIENCE_S)
        assert said.node.node_id == "node-1"
        assert said.node.engine_digest == said.report.engine_digest == worker.digest
        assert said.report.limits == said.node.contract.limits
        assert said.report.capabilities == said.node.contract.capabilities
        assert (said.report.vocab_size, said.report.kv_pool_blocks) == (1000, 128)
        assert said.stats.generated_tokens >= 3
        assert said.node.card.family == "cpu"
        assert said.node.card.memory_bytes > 0


async def test_nothing_is_said_of_an_engine_that_is_not_loaded(tmp_path: Path) -> None:
    async with running(tmp_path, load=False) as worker:
        for method, request in (("Describe", wire.DescribeRequest()), ("Probe", wire.ProbeRequest())):
            async with channel(worker.address) as made:
                stub = worker_service_pb2_grpc.WorkerServiceStub(made)
                with pytest.raises(FailedPreconditionError) as caught, translated():
                    await getattr(stub, method)(request, timeout=PATIENCE_S)
                assert caught.value.reason == reasons.ENGINE_NOT_LOADED


async def test_a_probe_of_a_generating_engine_brings_tokens_and_no_payload(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, caller(worker) as stub:
        probed = await stub.Probe(wire.ProbeRequest(), timeout=PATIENCE_S)
        assert probed.usage.prompt_tokens == 8
        assert probed.usage.computed_tokens >= 1
        assert probed.usage.generated_tokens == 2
        assert probed.payload.not_applicable
        assert probed.payload_bytes == 0
        assert probed.report.engine_digest == worker.digest


async def test_a_probe_of_a_mining_engine_brings_the_payload_that_the_contract_states(tmp_path: Path) -> None:
    async with running(tmp_path, MINING) as worker, caller(worker) as stub:
        probed = await stub.Probe(wire.ProbeRequest(token_ids=[1, 2, 3]), timeout=PATIENCE_S)
        stated = contract_pb2.PayloadForm(shape=[64], dtype=contract_pb2.PAYLOAD_DTYPE_FLOAT32, layers=[-1])
        assert probed.payload.value == stated
        assert probed.payload_bytes == 256
        assert (probed.usage.prompt_tokens, probed.usage.generated_tokens) == (3, 0)


async def test_a_probe_with_a_wrong_prompt_names_the_token(tmp_path: Path) -> None:
    async with running(tmp_path) as worker:
        with pytest.raises(InvalidArgumentError) as caught:
            async with caller(worker) as stub:
                await stub.Probe(wire.ProbeRequest(token_ids=[1, 5000]), timeout=PATIENCE_S)
        assert caught.value.violations[0].field == "token_ids[1]"


async def test_a_probe_runs_beside_work_and_one_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running(tmp_path, slots=1, step_us=10_000, **LONG) as worker, worker.broker() as broker:
        await broker.dispatch(work(1, max_tokens=LONG_TOKENS))
        await wait_until(lambda: worker.host.in_flight)
        async with channel(worker.address) as made:
            call = worker_service_pb2_grpc.WorkerServiceStub(made).Probe(wire.ProbeRequest(), timeout=PATIENCE_S)
            await wait_until(lambda: worker.host.in_flight == 2)
            call.cancel()
            await wait_until(lambda: worker.host.in_flight == 1)
        await broker.cancel(1)
        await broker.finish_of(1)


async def test_a_probe_of_an_engine_that_fails_is_unavailable(tmp_path: Path) -> None:
    async with running(tmp_path, step_faults=(StepFault("throw", 2),)) as worker:
        with pytest.raises(UnavailableError):
            async with caller(worker) as stub:
                await stub.Probe(wire.ProbeRequest(), timeout=PATIENCE_S)
        await wait_until(lambda: worker.failures)


async def fetch(worker: Running, digest: str, path: str) -> bytes:
    async with caller(worker) as stub:
        return b"".join([chunk.data async for chunk in stub.FetchFile(
            wire.FetchFileRequest(engine_digest=digest, path=path), timeout=PATIENCE_S)])  # fmt: skip


async def test_the_tokenizer_arrives_with_the_digest_that_the_contract_states(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, caller(worker) as stub:
        contract = (await stub.Describe(wire.DescribeRequest(), timeout=PATIENCE_S)).node.contract
        stated = {file.path: file.sha256 for file in contract.files}
        data = await fetch(worker, worker.digest, contract.tokenizer.file)
        assert hashlib.sha256(data).hexdigest() == stated["tokenizer.json"]


async def test_files_are_served_for_this_engine_only_and_for_no_other_name(tmp_path: Path) -> None:
    async with running(tmp_path / "engine") as worker:
        (tmp_path / "secret").write_text("secret")
        with pytest.raises(FailedPreconditionError) as caught:
            await fetch(worker, "0" * 64, "tokenizer.json")
        assert caught.value.reason == reasons.ENGINE_DIFFERS
        for path in ("../secret", "contract.json", "simulated.json/../tokenizer.json", str(tmp_path / "secret")):
            with pytest.raises(NotFoundError) as missing:
                await fetch(worker, worker.digest, path)
            assert missing.value.reason == reasons.FILE_UNKNOWN


async def test_many_probes_and_fetches_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as worker, caller(worker) as stub:
        probes = [stub.Probe(wire.ProbeRequest(), timeout=PATIENCE_S) for _ in range(8)]
        fetches = [fetch(worker, worker.digest, "tokenizer.json") for _ in range(4)]
        assert len({len(data) for data in await asyncio.gather(*fetches)}) == 1
        for probe in probes:
            assert (await probe).usage.generated_tokens == 2
