# SPDX-License-Identifier: Apache-2.0
"""TLS between services: who gets in, and certificates that change while everything runs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from services.common.errors import FabricError, PermissionDeniedError, StartError, UnauthenticatedError
from services.common.rpc import Dialer, Server, channel, translated
from services.common.security import Credentials
from services.common.security import certificates as module
from services.common.telemetry import Telemetry
from tests.common.behaviour import Behaviour, call, register
from tests.security.clock import Clock
from tests.support.authority import Authority
from tests.support.logged import captured_logs
from tests.support.servers import LoopbackSettings
from tests.support.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WORKER_SERVICE = "ifabric.worker.v1.WorkerService"


@contextlib.asynccontextmanager
async def tls_server(credentials: Credentials, behaviour: Behaviour | None = None) -> AsyncIterator[Server]:
    """A server that wants certificates, with the test's service."""
    telemetry = Telemetry("test")
    server = Server(LoopbackSettings(drain_grace_s=1.0), telemetry, credentials=credentials)
    server.add(register, behaviour or Behaviour(), "ifabric.test.v1.BehaviourService")
    await server.start()
    await server.ready()
    try:
        yield server
    finally:
        await server.close()
        telemetry.close()


async def test_a_peer_with_a_certificate_of_ours_gets_in_and_others_do_not(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    strangers = Authority(other, "strangers")
    async with tls_server(Credentials(ours.issue("worker").files)) as server:
        async with Dialer(Credentials(ours.issue("operator").files)).channel(server.address, role="worker") as good:
            assert await call(good, "UnaryUnary", b"ok") == [b"ok"]
            assert await call(good, "StreamStream", b"ok") == [b"ok"]
        authorities, _, _ = ours.issue("operator").pem()
        _, foreign_key, foreign = strangers.issue("operator").pem()
        name = (("grpc.ssl_target_name_override", "worker.ifabric"),)
        for credentials in (
            grpc.ssl_channel_credentials(authorities),
            grpc.ssl_channel_credentials(authorities, foreign_key, foreign),
        ):
            async with grpc.aio.secure_channel(server.address, credentials, options=name) as bad:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(bad, "UnaryUnary", b"ok", timeout=PATIENCE_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with channel(server.address) as clear:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(clear, "UnaryUnary", b"ok", timeout=PATIENCE_S)


async def test_a_client_refuses_a_server_of_another_role_or_authority(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    async with tls_server(Credentials(ours.issue("worker").files)) as server:
        mine = Credentials(ours.issue("operator").files)
        async with Dialer(mine).channel(server.address, role="provisioner") as wrong_role:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(wrong_role, "UnaryUnary", b"ok", timeout=PATIENCE_S)
        theirs = Credentials(Authority(other, "strangers").issue("operator").files)
        async with Dialer(theirs).channel(server.address, role="worker") as wrong_authority:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(wrong_authority, "UnaryUnary", b"ok", timeout=PATIENCE_S)


async def test_a_role_opens_its_methods_and_no_others(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    async with tls_server(Credentials(ours.issue("worker").files)) as server:
        for role, error in (("client", PermissionDeniedError), ("stranger", UnauthenticatedError)):
            identity = Credentials(ours.issue(role).files)
            async with Dialer(identity).channel(server.address, role="worker") as made:
                # What no row of the table names is for operators.
                with pytest.raises(error), translated():
                    await call(made, "UnaryUnary", b"ok")


async def test_new_files_come_into_force_with_the_next_connection_and_break_no_call(tmp_path: Path) -> None:
    ours, clock = Authority(tmp_path), Clock()
    behaviour = Behaviour()
    worker = Credentials(ours.issue("worker").files, clock=clock)
    operator = Credentials(ours.issue("operator").files, clock=clock)
    before = worker.current()
    async with tls_server(worker, behaviour) as server, Dialer(operator).channel(server.address, role="worker") as made:
        running = asyncio.create_task(call(made, "StreamStream", b"wait", timeout=2 * PATIENCE_S))
        await behaviour.waiting.wait()
        fresh = Authority(tmp_path, "successor")  # everything changes: the authority, too
        fresh.issue("worker")
        fresh.issue("operator")
        clock.now += module.CHECK_S
        assert await call(made, "UnaryUnary", b"new") == [b"new"]
        assert worker.current() is not before
        assert (worker.reloads, operator.reloads) == (1, 1)
        old = grpc.ssl_channel_credentials(before.authorities, before.key, before.certificate)
        name = (("grpc.ssl_target_name_override", "worker.ifabric"),)
        async with grpc.aio.secure_channel(server.address, old, options=name) as late:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(late, "UnaryUnary", b"ok", timeout=PATIENCE_S)
        behaviour.release.set()
        assert await running == [b"wait"]
        retired = next(iter(made._retired))  # type: ignore[attr-defined]
        await wait_until(lambda: retired.closed, what="the old connection is closed after its last call")


@pytest.mark.parametrize("harm", ["half", "garbage", "gone", "ended", "early"])
def test_a_set_that_cannot_be_used_leaves_the_old_one_in_force(tmp_path: Path, harm: str) -> None:
    ours, clock = Authority(tmp_path), Clock()
    identity = ours.issue("worker")
    credentials = Credentials(identity.files, clock=clock)
    before, old_key = credentials.current(), identity.files.key.read_bytes()
    match harm:
        case "half":
            ours.issue("worker")
            identity.files.key.write_bytes(old_key)
        case "garbage":
            identity.files.certificate.write_text("-----BEGIN NOTHING-----")
        case "gone":
            identity.files.key.unlink()
        case "ended":
            ours.issue("worker", lives=datetime.timedelta(seconds=-1))
        case "early":
            ours.issue("worker", begins=datetime.timedelta(hours=1))
    clock.now += module.CHECK_S
    with captured_logs() as lines:
        assert credentials.current() is before
    assert credentials.failures == 1
    assert len(lines.all("certificate.refused")) == 1
    assert "PRIVATE" not in lines.text()
    ours.issue("worker")
    clock.now += module.CHECK_S
    assert credentials.current() is not before


def test_a_certificate_is_taken_when_its_time_comes(tmp_path: Path) -> None:
    ours, clock = Authority(tmp_path), Clock()
    later = [0.0]
    credentials = Credentials(ours.issue("worker").files, clock=clock, now=lambda: time.time() + later[0])
    before = credentials.current()
    ours.issue("worker", begins=datetime.timedelta(hours=1))
    for _ in range(3):
        clock.now += module.CHECK_S
        assert credentials.current() is before
    assert credentials.failures == 1, "it is told once"
    later[0] = 3601.0
    clock.now += module.CHECK_S
    assert credentials.current() is not before
    assert (credentials.reloads, credentials.failures) == (1, 1)


def test_metrics_are_served_whatever_is_written_beside_the_certificates(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    files = ours.issue("worker").files
    files.authorities.write_bytes("# Autorité de l'équipe\n".encode() + files.authorities.read_bytes())
    telemetry = Telemetry("test")
    address = telemetry.serve_metrics("127.0.0.1:0", credentials=Credentials(files))
    context = ssl.create_default_context(cafile=str(ours.path))
    context.load_cert_chain(files.certificate, files.key)
    url = f"https://{address.replace('127.0.0.1', 'localhost')}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_S, context=context) as answer:
        assert b"ifabric_process_info" in answer.read()
    telemetry.close()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("absent", "cannot read"),
        ("garbage", "no private key in PEM"),
        ("other", "is not the key of the certificate"),
        ("ended", "ended at"),
    ],
)
def test_a_service_does_not_start_with_a_set_that_cannot_be_used(tmp_path: Path, harm: str, said: str) -> None:
    ours = Authority(tmp_path)
    files = ours.issue("worker").files
    match harm:
        case "absent":
            files.key.unlink()
        case "garbage":
            files.key.write_text("no key")
        case "other":
            files.key.write_bytes(ours.issue("broker").files.key.read_bytes())
        case "ended":
            ours.issue("worker", lives=datetime.timedelta(seconds=-1))
    with pytest.raises(StartError, match=said) as caught:
        Credentials(files)
    assert "\n" not in str(caught.value)


async def test_health_asks_for_no_role(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    ours = Authority(tmp_path)
    async with tls_server(Credentials(ours.issue("worker").files)) as server:
        stranger = Dialer(Credentials(ours.issue("stranger").files)).channel(server.address, role="worker")
        async with stranger as made:
            stub: Any = health_pb2_grpc.HealthStub(made)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_errors_of_a_call_are_translated_through_a_following_channel(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    dialer = Dialer(Credentials(ours.issue("operator").files))
    async with (
        tls_server(Credentials(ours.issue("worker").files)) as server,
        dialer.channel(server.address, role="worker") as made,
    ):
        with pytest.raises(FabricError) as caught, translated():
            await call(made, "UnaryUnary", b"exhausted")
    assert caught.value.retry_after_s == 1.5
