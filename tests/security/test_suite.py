# SPDX-License-Identifier: Apache-2.0
"""The secured suite end to end: who gets what, what is closed, certificates that change, nothing that leaks."""

from __future__ import annotations

import itertools
import json
import re
import ssl
import subprocess
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from ifabric.broker.v1 import (
    broker_service_pb2,
    broker_service_pb2_grpc,
    job_service_pb2,
    job_service_pb2_grpc,
    operator_service_pb2,
)
from ifabric.kserve.v2 import inference_pb2
from services.common import reasons
from services.common.errors import FabricError, from_status
from tests.security.secured import KEYS, SecuredSuite, authorization, key
from tests.support import suite as commands
from tests.support.processes import environment, run_to_end
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredSuite]:
    with SecuredSuite(tmp_path_factory.mktemp("secured")) as running:
        yield running


def error_of(call: grpc.RpcError) -> FabricError:
    status = rpc_status.from_call(call)  # type: ignore[arg-type]
    assert status is not None, call
    return from_status(status)


def lets_in(suite: SecuredSuite, token: str) -> bool:
    """Whether a token opens a call."""
    with suite.channel() as channel:
        stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
        carried = (("authorization", f"Bearer {token}"),)
        try:
            stub.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=PATIENCE_S, metadata=carried)
        except grpc.RpcError:
            return False
    return True


def metrics(suite: SecuredSuite, address: str) -> str:
    """What the endpoint shows to the operator's certificate."""
    files = suite.operator.files
    context = ssl.create_default_context(cafile=str(suite.authority.path))
    context.load_cert_chain(files.certificate, files.key)
    address = address.replace("127.0.0.1", "localhost")
    with urllib.request.urlopen(f"https://{address}/metrics", timeout=PATIENCE_S, context=context) as answer:
        return str(answer.read().decode())


def test_a_token_opens_what_its_scopes_name(suite: SecuredSuite) -> None:
    assert suite.generate("acme").result.samples
    with pytest.raises(grpc.RpcError) as caught:
        suite.generate("reader")
    error = error_of(caught.value)
    assert (error.reason, error.metadata["scopes"]) == (reasons.SCOPE_MISSING, "generate")


def test_nobody_gets_in_without_a_token_or_in_the_clear(suite: SecuredSuite) -> None:
    request = broker_service_pb2.ListEnginesRequest()
    with suite.channel() as channel:
        stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
        for metadata, reason in (
            ((), reasons.TOKEN_MISSING),
            ((("authorization", "Bearer guessed"),), reasons.TOKEN_INVALID),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListEngines(request, timeout=PATIENCE_S, metadata=metadata)
            assert error_of(caught.value).reason == reason
    with suite.channel(plain=True) as channel:
        stub = broker_service_pb2_grpc.BrokerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListEngines(request, timeout=PATIENCE_S, metadata=authorization("acme"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer guessed"),)], ids=["none", "guessed"])
def test_nobodys_message_is_not_waited_for(suite: SecuredSuite, metadata: tuple[tuple[str, str], ...]) -> None:
    """A message takes memory for as long as it comes: callers are asked who they are before there is any of it."""
    heard = threading.Event()

    def never() -> Iterator[bytes]:
        heard.wait(2 * PATIENCE_S)
        yield from ()

    with suite.channel() as channel:
        call: Any = channel.stream_unary("/ifabric.broker.v1.BrokerService/Generate")
        try:
            with pytest.raises(grpc.RpcError) as caught:
                call(never(), timeout=PATIENCE_S, metadata=metadata)
        finally:
            heard.set()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_jobs_of_one_tenant_are_nothing_to_another(suite: SecuredSuite) -> None:
    with suite.channel() as channel:
        stub: Any = job_service_pb2_grpc.JobServiceStub(channel)
        spec = job_service_pb2.JobSpec(job_id="mine")
        made = stub.CreateJob(
            job_service_pb2.CreateJobRequest(spec=spec), timeout=PATIENCE_S, metadata=authorization("acme")
        ).job
        assert made.spec.tenant == "acme"
        get = job_service_pb2.GetJobRequest(job_id="mine")
        assert stub.GetJob(get, timeout=PATIENCE_S, metadata=authorization("reader")).job.spec.tenant == "acme"
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetJob(get, timeout=PATIENCE_S, metadata=authorization("other"))
        assert error_of(caught.value).reason == reasons.JOB_UNKNOWN
        get.tenant = "acme"
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetJob(get, timeout=PATIENCE_S, metadata=authorization("other"))
        assert error_of(caught.value).reason == reasons.TENANT_DIFFERS
        assert stub.GetJob(get, timeout=PATIENCE_S, metadata=authorization("person")).job.spec.job_id == "mine"


def test_what_the_broker_writes_is_read_by_its_own_user_only(suite: SecuredSuite) -> None:
    written = sorted(suite.folder.glob("jobs.sqlite*"))
    assert {path.name for path in written} >= {"jobs.sqlite", "jobs.sqlite-wal"}
    assert [path.name for path in written if path.stat().st_mode & 0o077] == []


def test_every_method_of_the_broker_but_health_asks_for_a_token_and_a_scope(suite: SecuredSuite) -> None:
    """As the generated code lists them, so that one that is added tomorrow is asked, too."""
    files = (broker_service_pb2, job_service_pb2, operator_service_pb2, inference_pb2)
    methods = [
        (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(methods) > 25
    wrong = {"JobService": "writer", "BrokerService": "reader", "GRPCInferenceService": "reader"}

    def reason(path: str, many: bool, answers: bool, metadata: Any) -> str:
        kind = f"{'stream' if many else 'unary'}_{'stream' if answers else 'unary'}"
        call = getattr(channel, kind)(path)

        def ask() -> None:
            answer = call(iter([b""]) if many else b"", timeout=PATIENCE_S, metadata=metadata)
            list(answer if answers else ())

        with pytest.raises(grpc.RpcError) as caught:
            ask()
        return error_of(caught.value).reason

    with suite.channel() as channel:
        for path, many, answers in methods:
            assert reason(path, many, answers, ()) == reasons.TOKEN_MISSING, path
            service = path.split("/")[1].rpartition(".")[2]
            if path.endswith("AnalyzeRows"):
                service = "JobService"  # whoever may run a job may ask what it costs
            named = authorization(wrong.get(service, "acme"))
            assert reason(path, many, answers, named) == reasons.SCOPE_MISSING, path


def test_commands_take_token_and_certificate(suite: SecuredSuite) -> None:
    generated = suite.ifab("generate", "hi", "-n", "3", "--json", "--broker", suite.broker.address, token="acme")
    assert generated.returncode == 0, generated.stderr
    listed = suite.ifab("nodes", "--json", "--provisioner", suite.provisioner.address, operator=True)
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)["nodes"][0]["state"] == "NODE_STATE_ACCEPTED"
    to = ("--provisioner", suite.provisioner.address, "--broker", suite.broker.address)
    partly = suite.ifab("nodes", "--json", *to, operator=True, token="reader")
    assert partly.returncode == 1, partly.stderr
    assert json.loads(partly.stdout)["broker_error"]["reason"] == reasons.SCOPE_MISSING
    assert json.loads(partly.stdout)["nodes"][0]["state"] == "NODE_STATE_ACCEPTED"
    assert partly.stderr.startswith("ifab: what runs at the nodes is left out: ")
    refused = suite.ifab("nodes", "--provisioner", suite.provisioner.address, token="person")
    assert refused.returncode == 1  # the provisioner wants a certificate, whatever the token
    closed = suite.ifab("generate", "hi", "--broker", suite.broker.address, token="reader")
    assert closed.returncode == 1
    assert "one of the scopes generate" in closed.stderr
    assert key("reader") not in closed.stderr + closed.stdout


def test_a_command_never_sends_a_token_in_the_clear_to_another_machine() -> None:
    sent = subprocess.run(
        [*commands.IFAB, "generate", "hi", "--broker", "192.0.2.1:7600"],
        env=environment({"IFAB_CLI_TOKEN": "CANARY"}),
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert sent.returncode == 1
    assert "the token would go to 192.0.2.1:7600 in the clear" in sent.stderr
    assert "CANARY" not in sent.stderr


def test_a_key_that_the_command_makes_lets_its_bearer_in(suite: SecuredSuite) -> None:
    made = commands.run("key", "fresh", "--tenant", "acme", "--scope", "generate")
    assert made.returncode == 0, made.stderr
    token, _, entry = made.stdout.partition("\n")
    path = suite.folder / "access.toml"
    path.write_text(path.read_text() + entry)

    block_until(lambda: lets_in(suite, token), what="the new key is known")


def test_a_stream_ends_when_its_key_is_withdrawn_and_others_go_on(suite: SecuredSuite) -> None:
    path = suite.folder / "access.toml"
    before = path.read_text()
    going = {name: threading.Semaphore(0) for name in ("acme", "other")}

    def messages(name: str) -> Iterator[broker_service_pb2.ExchangeRequest]:
        for number in itertools.count():
            request = broker_service_pb2.GenerationRequest(request_id=f"{name}-{number}", max_tokens=2)
            request.prompt.text = "hello"
            message = broker_service_pb2.ExchangeRequest(requests=[request])
            if not number:
                message.open.SetInParent()
            yield message
            going[name].acquire()

    with suite.channel() as channel:
        stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
        ours, others = (
            stub.Exchange(messages(name), timeout=3 * PATIENCE_S, metadata=authorization(name)) for name in going
        )
        assert next(ours).outcomes
        assert next(others).outcomes
        path.write_text(re.sub(r'\[\[keys\]\]\nid = "acme"\n(?:.+\n)+', "", before))
        block_until(lambda: not lets_in(suite, key("acme")), what="the key is withdrawn")
        for each in going.values():
            each.release()
        with pytest.raises(grpc.RpcError) as caught:
            next(answer for answer in ours if answer.outcomes)
        assert error_of(caught.value).reason == reasons.TOKEN_INVALID
        assert next(answer for answer in others if answer.outcomes)
        others.cancel()
        for each in going.values():
            each.release(2)
    path.write_text(before)
    block_until(lambda: lets_in(suite, key("acme")), what="the key is known again")


def test_reflection_is_for_operators(suite: SecuredSuite) -> None:
    def listed(name: str) -> list[str]:
        with suite.channel() as channel:
            make: Any = reflection_pb2_grpc.ServerReflectionStub
            asked = make(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]),
                timeout=PATIENCE_S,
                metadata=authorization(name),
            )
            return [service.name for service in next(asked).list_services_response.service]

    assert "ifabric.broker.v1.BrokerService" in listed("person")
    with pytest.raises(grpc.RpcError) as caught:
        listed("acme")
    assert error_of(caught.value).reason == reasons.SCOPE_MISSING


def test_health_alone_is_served_in_the_clear(suite: SecuredSuite) -> None:
    for service in suite.services:
        with grpc.insecure_channel(service.line["health"]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", "liveness"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            other: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                other.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with grpc.insecure_channel(suite.worker.line["health"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="engine/simulated-test"), timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_want_a_certificate(suite: SecuredSuite) -> None:
    for service in suite.services:
        text = metrics(suite, service.metrics)
        (left,) = re.findall(r"^ifabric_tls_certificate_remaining_duration_seconds (\S+)$", text, re.MULTILINE)
        assert 0 < float(left) <= 86_400
        with pytest.raises(OSError):  # noqa: PT011 -- whichever end notices first
            urllib.request.urlopen(f"http://{service.metrics}/metrics", timeout=PATIENCE_S)
        stranger = ssl.create_default_context(cafile=str(suite.authority.path))
        with pytest.raises(OSError):  # noqa: PT011 -- whichever end notices first
            urllib.request.urlopen(
                f"https://{service.metrics.replace('127.0.0.1', 'localhost')}/metrics",
                timeout=PATIENCE_S,
                context=stranger,
            ).read()


def test_certificates_change_under_a_suite_that_runs_on(suite: SecuredSuite) -> None:
    for role in ("provisioner", "worker", "broker", "operator"):
        suite.authority.issue(role)

    def taken() -> bool:
        return all(
            'ifabric_tls_certificate_reloads_total{outcome="taken"} 0.0' not in metrics(suite, service.metrics)
            for service in suite.services
        )

    block_until(taken, what="each service has taken its new certificate")
    assert suite.generate("acme").result.samples
    # A worker that starts anew is met with new certificates on all sides: provisioner, broker and its own.
    suite.worker.stop()
    suite.worker = suite.start_worker()

    def serves() -> bool:
        try:
            return bool(suite.generate("acme").result.samples)
        except grpc.RpcError:  # the old one has left, and the new one has not been accepted yet
            return False

    block_until(serves, what="the new worker serves")


@pytest.mark.parametrize(
    ("service", "settings", "said"),
    [
        ("provisioner", {"listen": "0.0.0.0:0"}, "grpc would speak in the clear there"),
        ("provisioner", {"metrics_listen": "0.0.0.0:0"}, "metrics would speak in the clear there"),
        ("provisioner", {"health_listen": "0.0.0.0:0"}, "health would speak in the clear there"),
        ("provisioner", {"tls_cert": "/nowhere"}, "tls_key and tls_ca left out"),
        ("broker", {"provisioner": "127.0.0.1:1", "jwks_file": "/nowhere"}, "needs token_issuer and token_audience"),
        ("broker", {"provisioner": "127.0.0.1:1", "access_file": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_a_service_does_not_start_open_by_mistake(service: str, settings: dict[str, str], said: str) -> None:
    words = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]
    ended = run_to_end(f"services.{service}", words)
    assert ended.returncode == 2
    assert said in ended.stderr.strip().splitlines()[-1]


CANARY = "CANARY-PROMPT-4711"


def test_no_prompt_and_no_secret_is_in_logs_errors_or_metrics(suite: SecuredSuite) -> None:
    seen: list[str] = []

    def attempt(**request: Any) -> None:
        try:
            suite.generate("acme", **request)
        except grpc.RpcError as error:
            call: Any = error
            seen.append(f"{call.details()} {call.trailing_metadata()}")

    attempt(prompt=CANARY)
    attempt(prompt=CANARY, max_tokens=0)
    attempt(prompt=CANARY, stop=[CANARY, ""])
    attempt(prompt=CANARY, cache_salt=CANARY * 10)
    attempt(prompt=CANARY * 1000)
    attempt(prompt=CANARY, priority=1000)
    attempt(prompt=CANARY, max_tokens=10**6)
    suite.ifab("generate", CANARY, "-n", "3", "--broker", suite.broker.address, token="acme")
    with suite.channel() as channel:
        unknown: Any = channel.unary_unary("/ifabric.broker.v1.BrokerService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            unknown(CANARY.encode() * 3, timeout=PATIENCE_S, metadata=authorization("acme"))
        seen.append(str(caught.value))
    assert len(seen) >= 6
    shown = "".join(seen) + suite.written() + "".join(metrics(suite, each.metrics) for each in suite.services)
    assert "call.failed" not in shown
    for secret in (CANARY, "BEGIN PRIVATE", "CANARY-KEY", *(key(name) for name in KEYS)):
        assert secret not in shown


def test_a_tenant_takes_what_its_table_says_and_others_are_not_held_up(tmp_path: Path) -> None:
    quotas = "[tenants.acme]\nrequests_a_minute = 3\n"
    with SecuredSuite(tmp_path, quotas=quotas) as limited:
        for _ in range(3):
            limited.generate("acme")
        with pytest.raises(grpc.RpcError) as caught:
            limited.generate("acme")
        error = error_of(caught.value)
        assert (error.reason, error.metadata["limit"]) == (reasons.QUOTA_EXCEEDED, "3")
        assert error.retry_after_s
        for _ in range(5):
            limited.generate("other")
        assert 'ifabric_rpc_server_refused_total{reason="QUOTA_EXCEEDED"} 1.0' in metrics(
            limited, limited.broker.metrics
        )
