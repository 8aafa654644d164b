# SPDX-License-Identifier: Apache-2.0
"""What callers may do: scopes, tenants, quotas, and what is kept to this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf import descriptor_pb2

from ifabric.broker.v1 import broker_service_pb2, job_service_pb2
from services.common import reasons
from services.common.errors import PermissionDeniedError, ResourceExhaustedError, StartError
from services.common.security import Caller, check_exposure
from services.common.security.access_file import Quota
from services.common.security.exposure import is_local_peer
from services.common.security.needs import named_services, need_of
from services.common.security.quotas import Quotas
from services.common.security.tenants import impose, request_count
from tests.security.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
ACME = Caller("key:a", "acme", frozenset({"generate"}))
ANYBODY = Caller("key:b", "house", frozenset({"generate", "any-tenant"}))


def services() -> set[str]:
    """Every service of the protos."""
    described = descriptor_pb2.FileDescriptorSet.FromString((ROOT / "build/proto/ifabric.protoset").read_bytes())
    return {f"{file.package}.{service.name}" for file in described.file for service in file.service}


def test_the_table_names_every_service_that_is_not_for_operators_alone() -> None:
    closed = {name for name in services() if need_of(f"{name}/Any").operators}
    assert services() - closed <= named_services()
    assert {name for name in closed if name.startswith("ifabric.") and "Operator" not in name} == set()


def test_a_method_that_nobody_named_is_for_operators() -> None:
    assert need_of("no.such.Service/Method").operators
    assert need_of("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo").operators
    assert need_of("grpc.health.v1.Health/Check").anybody


@pytest.mark.parametrize("named", ["", "acme"])
def test_the_tenant_is_the_callers(named: str) -> None:
    single = broker_service_pb2.GenerateRequest(request=broker_service_pb2.GenerationRequest(tenant=named))
    many = broker_service_pb2.ExchangeRequest(
        requests=[broker_service_pb2.GenerationRequest(tenant=tenant) for tenant in ("", named)]
    )
    spec = job_service_pb2.CreateJobRequest(spec=job_service_pb2.JobSpec(tenant=named))
    plain = job_service_pb2.GetJobRequest(tenant=named)
    for message in (single, many, spec, plain):
        impose(message, ACME)
    tenants = [single.request.tenant, *(each.tenant for each in many.requests), spec.spec.tenant, plain.tenant]
    assert set(tenants) == {"acme"}


def test_rows_of_a_job_and_later_messages_of_a_stream_stay_as_they_are() -> None:
    first = job_service_pb2.UploadRowsRequest(rows=[job_service_pb2.JobRow()])
    impose(first, ACME)
    assert first.tenant == "acme"
    assert not first.rows[0].request.tenant
    later = job_service_pb2.UploadRowsRequest()
    impose(later, ACME, first=False)
    assert not later.tenant


@pytest.mark.parametrize(
    "make",
    [
        lambda: broker_service_pb2.GenerateRequest(request=broker_service_pb2.GenerationRequest(tenant="b")),
        lambda: broker_service_pb2.ExchangeRequest(requests=[broker_service_pb2.GenerationRequest(tenant="b")]),
        lambda: job_service_pb2.CreateJobRequest(spec=job_service_pb2.JobSpec(tenant="b")),
        lambda: job_service_pb2.DeleteJobRequest(tenant="b"),
        lambda: broker_service_pb2.CancelRequestsRequest(tenant="b"),
    ],
)
def test_nobody_speaks_for_another_tenant(make: Callable[[], object]) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        impose(make(), ACME)
    assert caught.value.reason == reasons.TENANT_DIFFERS
    impose(make(), ANYBODY)


def test_requests_are_counted_wherever_they_come() -> None:
    request = broker_service_pb2.GenerationRequest()
    assert request_count(broker_service_pb2.GenerateRequest(request=request)) == 1
    assert request_count(broker_service_pb2.ExchangeRequest(requests=[request] * 5)) == 5
    assert request_count(job_service_pb2.UploadRowsRequest(rows=[job_service_pb2.JobRow()] * 3)) == 3
    assert request_count(broker_service_pb2.ListEnginesRequest()) == 0
    assert request_count(b"bytes") == 0


def test_open_calls_of_a_tenant_are_bounded_and_of_others_are_not() -> None:
    quotas = Quotas({"acme": Quota(calls=2), "other": Quota()}.__getitem__)
    with quotas.call("acme"), quotas.call("acme"):
        with pytest.raises(ResourceExhaustedError) as caught, quotas.call("acme"):
            pass
        assert (caught.value.reason, caught.value.metadata["limit"]) == (reasons.QUOTA_EXCEEDED, "2")
        assert caught.value.retry_after_s
        for _ in range(10):
            with quotas.call("other"):
                pass
    with quotas.call("acme"):
        pass


def test_a_minutes_worth_of_requests_is_refilled_evenly() -> None:
    clock = Clock()
    quotas = Quotas(lambda _: Quota(requests_a_minute=60), clock=clock)
    for _ in range(60):
        quotas.take("acme", 1)
    with pytest.raises(ResourceExhaustedError) as caught:
        quotas.take("acme", 1)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    clock.now += 0.5
    with pytest.raises(ResourceExhaustedError):
        quotas.take("acme", 1)
    clock.now += 0.5
    quotas.take("acme", 1)
    with pytest.raises(ResourceExhaustedError):
        quotas.take("acme", 1)


async def test_a_stream_is_slowed_down_and_not_ended() -> None:
    quotas = Quotas(lambda _: Quota(requests_a_minute=60_000))
    loop = asyncio.get_running_loop()
    began = loop.time()  # what is taken is refilled from then on, however late the next message
    await quotas.pace("acme", 60_000)
    await quotas.pace("acme", 200)  # passes once one is there, and leaves a debt
    await quotas.pace("acme", 1)
    assert loop.time() - began >= 0.19


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0", "127.1.2.3:9"])
def test_loopback_may_listen_in_the_clear(listen: str) -> None:
    check_exposure("grpc", listen, protected=False, allowed=(), setting="listen")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "broker:7600"])
def test_nothing_else_does_unless_a_setting_says_so(listen: str) -> None:
    with pytest.raises(StartError, match="would speak in the clear there: give tls_cert") as caught:
        check_exposure("grpc", listen, protected=False, allowed=("metrics", "health"), setting="listen")
    assert "name grpc in allow_cleartext" in str(caught.value)
    check_exposure("grpc", listen, protected=True, allowed=(), setting="listen")
    check_exposure("grpc", listen, protected=False, allowed=("grpc",), setting="listen")


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4711", True),
        ("unix:/run/socket", True),
        ("ipv4:10.1.2.3:4711", False),
        ("ipv6:%5Bfe80::1%5D:4711", False),
        ("unknown", False),
    ],
)
def test_peers_of_this_machine_are_told_from_others(peer: str, local: bool) -> None:
    assert is_local_peer(peer) is local
