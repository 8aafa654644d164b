# SPDX-License-Identifier: Apache-2.0
"""Clients of a suite that speaks TLS and wants tokens: the Python package, and the KServe protocol."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ifabric.kserve.v2 import inference_pb2, inference_pb2_grpc
from ifabric_client import CallError, Client, Request, RetryPolicy, Tls
from tests.clients.test_kserve import PYTHON as TRITON
from tests.security.secured import SecuredSuite, authorization, key
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredSuite]:
    with SecuredSuite(tmp_path_factory.mktemp("secured")) as suite:
        yield suite


def client(suite: SecuredSuite, token: str) -> Client:
    tls = Tls(authorities=str(suite.authority.path))
    return Client(suite.broker.address, tls=tls, token=token, retries=RetryPolicy(limit_s=0))


def test_a_client_with_a_token_runs_calls_and_jobs_of_its_tenant(secured: SecuredSuite) -> None:
    with client(secured, key("acme")) as acme, client(secured, key("other")) as other:
        assert acme.generate("hello", max_tokens=4).usage.generated_tokens > 0
        rows = [Request(f"row {number}", 2) for number in range(5)]
        assert [outcome.error for outcome in acme.bulk("tenants-job", rows)] == [None] * 5
        with pytest.raises(CallError) as told:
            other.job("tenants-job")
    assert told.value.reason == "JOB_UNKNOWN"


@pytest.mark.parametrize(
    ("token", "code", "reason"),
    [
        ("", "UNAUTHENTICATED", "TOKEN_MISSING"),
        ("ifab_nobody", "UNAUTHENTICATED", "TOKEN_INVALID"),
        (key("reader"), "PERMISSION_DENIED", "SCOPE_MISSING"),
    ],
    ids=["without", "unknown", "without the scope"],
)
def test_a_client_is_told_what_its_token_lacks(secured: SecuredSuite, token: str, code: str, reason: str) -> None:
    with client(secured, token) as refused, pytest.raises(CallError) as told:
        refused.generate("hello", max_tokens=4)
    assert (told.value.code, told.value.reason) == (code, reason)


def test_kserve_calls_want_the_same_token(secured: SecuredSuite) -> None:
    call = inference_pb2.ModelInferRequest(model_name=secured_engine(secured))
    call.parameters["max_tokens"].int64_param = 3
    call.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    with secured.channel() as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(call, timeout=PATIENCE_S, metadata=authorization("acme"))
        refusals = []
        for metadata in ((), authorization("reader")):
            with pytest.raises(grpc.RpcError) as told:
                stub.ModelInfer(call, timeout=PATIENCE_S, metadata=metadata)
            error: Any = told.value
            refusals.append(error.code())
    assert answer.parameters["generated_tokens"].int64_param > 0
    assert refusals == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED]


def test_the_kserve_pages_example_of_tls_and_token_runs_as_it_stands(secured: SecuredSuite, tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kserve.md").read_text(), flags=re.DOTALL)[1]
    for theirs, ours in (
        ("127.0.0.1:7600", secured.broker.address),
        ("smollm2-135m-instruct-q8_0-cpu", secured_engine(secured)),
    ):
        example = example.replace(theirs, ours)
    (tmp_path / "ca.pem").write_bytes(secured.authority.path.read_bytes())
    (tmp_path / "token").write_text(key("acme") + "\n")
    done = subprocess.run(
        [str(TRITON), "-c", "import tritonclient.grpc as triton\n" + example],
        cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_recipe_for_grpcurl_with_tls_and_a_token_works(secured: SecuredSuite, tmp_path: Path) -> None:
    page = " ".join((ROOT / "docs" / "clients.md").read_text().split())
    found = re.search(r"leave `-plaintext` out and add `([^`]+)`; .* add `([^`]+)`", page)
    assert found is not None
    (tmp_path / "ca.pem").write_bytes(secured.authority.path.read_bytes())
    (tmp_path / "build").symlink_to(ROOT / "build")
    call = f"{secured.broker.address} ifabric.broker.v1.BrokerService/ListEngines"
    for words, token, code in ((f"{found[1]} {found[2]}", key("acme"), 0), (found[1], key("acme"), 1)):
        done = subprocess.run(
            ["bash", "-euc", f"{ROOT}/.tools/bin/grpcurl {words} {call}"],
            cwd=tmp_path, env={**os.environ, "TOKEN": token}, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == (code == 0), done.stderr
        assert (secured_engine(secured) in done.stdout) == (code == 0)


def secured_engine(suite: SecuredSuite) -> str:
    """Id of the suite's one engine."""
    with client(suite, key("acme")) as acme:
        [engine] = acme.engines()
    return engine.id
