# SPDX-License-Identifier: Apache-2.0
"""The first calls of a bulk command: a broker that is about to start is waited for, a wrong address is not for long."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ifabric.broker.v1 import broker_service_pb2_grpc, job_service_pb2_grpc
from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.connection import channel
from services.cli.jobs.calls import FIRST_S, Jobs, Patience, outlasted
from services.common.errors import NotFoundError, UnavailableError
from tests.cli.test_job import scripted
from tests.support.ports import held_port
from tests.support.spoken import until
from tests.support.suite import end, start
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 20


class _Absent(job_service_pb2_grpc.JobServiceServicer):
    """Is away for the first calls of each method, whatever gRPC makes of that; then it has no job."""

    def __init__(self, away: int) -> None:
        self.calls: list[str] = []
        self._away = away

    async def _count(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.calls.append(name)
        if self.calls.count(name) <= self._away:
            code = grpc.StatusCode.UNAVAILABLE if self.calls.count(name) % 2 else grpc.StatusCode.CANCELLED
            await context.abort(code, "gone")

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        await self._count("GetJob", context)
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such job")
        raise AssertionError

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        await self._count("CreateJob", context)
        return pb.CreateJobResponse(job=pb.Job(spec=request.spec))


def _rows(path: Path) -> str:
    path.write_text("".join(json.dumps({"id": f"r{n}", "prompt": f"{n}", "max_tokens": 1}) + "\n" for n in range(ROWS)))
    return str(path)


@pytest.mark.e2e
async def test_a_run_waits_for_a_broker_that_is_about_to_start(tmp_path: Path) -> None:
    with held_port() as address:
        command = start("bulk", "run", _rows(tmp_path / "in"), "-o", str(tmp_path / "out"), "--broker", address)
        try:
            said = await asyncio.to_thread(until, command, "nothing answers")
            assert said.startswith(f"ifab: waiting for the broker: nothing answers at {address}")
            server = grpc.aio.server()
            broker_service_pb2_grpc.add_BrokerServiceServicer_to_server(scripted(), server)
            assert server.add_insecure_port(address)
            await server.start()
            _, more = await asyncio.to_thread(command.communicate, timeout=PATIENCE_S)
            await server.stop(0)
        finally:
            end(command)
    assert command.returncode == 0, more
    assert "waiting for the broker" not in more, "it is said once"
    assert len((tmp_path / "out").read_text().splitlines()) == ROWS


@pytest.mark.e2e
async def test_what_does_not_speak_tls_is_not_waited_for(tmp_path: Path) -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    words = ("bulk", "run", _rows(tmp_path / "in"), "-o", str(tmp_path / "out"), "--broker", address)
    command = start("--tls", *words)
    try:
        _, said = await asyncio.to_thread(command.communicate, timeout=0.8 * FIRST_S)
    finally:
        end(command)
        await server.stop(0)
    assert command.returncode == 1
    assert said.splitlines()[-1].startswith(f"ifab: what answers at {address} speaks no TLS")


async def test_the_first_calls_are_made_again_one_by_one() -> None:
    server, servicer = grpc.aio.server(), _Absent(2)  # type: ignore[abstract]
    job_service_pb2_grpc.add_JobServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    said: list[str] = []
    patience = Patience(PATIENCE_S, said.append, first_s=PATIENCE_S)
    try:
        async with channel(f"127.0.0.1:{port}") as to_broker:
            jobs = Jobs(to_broker)
            assert await outlasted(patience, lambda: jobs.find("job")) is None
            made = await outlasted(patience, lambda: jobs.create(pb.JobSpec(job_id="job")))
            assert made.spec.job_id == "job"
            with pytest.raises(NotFoundError):
                await outlasted(patience, lambda: jobs.get("job"))
    finally:
        await server.stop(0)
    assert servicer.calls == ["GetJob"] * 3 + ["CreateJob"] * 3 + ["GetJob"]
    assert said


async def test_who_never_answered_is_given_up_and_who_has_is_waited_for_longer() -> None:
    """A limit of the first calls; it is not for a broker that goes away later."""
    with held_port() as address:
        async with channel(address) as to_broker:
            jobs = Jobs(to_broker)
            patience = Patience(300.0, first_s=0.3)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(UnavailableError) as caught:
                    await outlasted(patience, lambda: jobs.get("job"))
            patience.progress()
            for _ in range(5):  # longer than a third of a second
                await patience.wait(caught.value)
