# SPDX-License-Identifier: Apache-2.0
"""The wire as enemies write on it: bytes that are no protobuf, frames that are no HTTP/2, connections that say nothing.

Whatever it is, the suite keeps serving: after each attack, and during it, an honest client gets its answer.
"""

from __future__ import annotations

import random
import resource
import socket
import struct
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc, job_service_pb2
from tests.jobs.running import Fabric
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.e2e

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HALF_OPEN = 10_000
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    with Fabric(tmp_path_factory.mktemp("wire")) as made:
        for service in (*made.workers, *made.brokers):
            service.settings["health_listen"] = "127.0.0.1:0"
        made.start()
        block_until(lambda: served(made), what="the first answer")
        yield made


def served(fabric: Fabric, *, within_s: float = 10.0) -> bool:
    """Whether an honest client, on a connection of its own, gets its answer."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(fabric.brokers[0].address, options=options) as channel:
        stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
        request = broker_service_pb2.GenerationRequest(max_tokens=3)
        request.prompt.text = "hello"
        try:
            answer = stub.Generate(broker_service_pb2.GenerateRequest(request=request), timeout=within_s)
        except grpc.RpcError:
            return False
        return bool(answer.result.samples)


def doors(fabric: Fabric) -> list[str]:
    """Every address at which the suite listens: calls, health alone, metrics."""
    running = [service.process for service in fabric.services if service.process is not None]
    assert len(running) == 3
    alone = [process.line["health"] for process in running if "health" in process.line]
    assert len(alone) == 2
    return [*(process.address for process in running), *alone, *(process.metrics for process in running)]


def scraped(address: str) -> bool:
    """Whether Prometheus gets what it asks for."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=9) as answer:
            return b"ifabric_process_info" in answer.read()
    except OSError:
        return False


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def frame(kind: int, flags: int, stream: int, payload: bytes, *, length: int | None = None) -> bytes:
    """An HTTP/2 frame; `length` for one that lies."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


METHODS = [
    "/ifabric.broker.v1.BrokerService/Generate",
    "/ifabric.broker.v1.BrokerService/CancelRequests",
    "/ifabric.broker.v1.JobService/CreateJob",
    "/ifabric.broker.v1.JobService/GetJob",
    "/grpc.health.v1.Health/Check",
]


def mutated(seed: bytes) -> st.SearchStrategy[bytes]:
    """Messages that were good once: with bytes changed, taken out, doubled or cut off."""

    def change(choices: list[tuple[int, int, int]]) -> bytes:
        data = bytearray(seed)
        for what, where, value in choices:
            if not data:
                break
            place = where % len(data)
            match what:
                case 0:
                    data[place] = value
                case 1:
                    del data[place]
                case 2:
                    data[place:place] = data[: value % 16]
                case 3:
                    del data[place:]
        return bytes(data)

    step = st.tuples(st.integers(0, 3), st.integers(0, 1 << 16), st.integers(0, 255))
    return st.lists(step, min_size=1, max_size=8).map(change)


def good_messages() -> list[bytes]:
    request = broker_service_pb2.GenerationRequest(request_id="r", max_tokens=3, stop=["x"], tenant="t")
    request.prompt.text = "hello"
    request.sampling.temperature = 0.5
    spec = job_service_pb2.JobSpec(job_id="job", tenant="t")
    return [
        broker_service_pb2.GenerateRequest(request=request).SerializeToString(),
        broker_service_pb2.CancelRequestsRequest(request_ids=["a", "b"]).SerializeToString(),
        job_service_pb2.CreateJobRequest(spec=spec).SerializeToString(),
    ]


BYTES = st.one_of(st.binary(max_size=300), *(mutated(message) for message in good_messages()))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(method=st.sampled_from(METHODS), data=BYTES)
def test_bytes_that_are_no_message_are_refused_by_name(fabric: Fabric, method: str, data: bytes) -> None:
    """GRPC itself answers bytes that do not parse; what parses and is wrong is the caller's fault, never ours."""
    with grpc.insecure_channel(fabric.brokers[0].address) as channel:
        call: Any = channel.unary_unary(method)
        try:
            call(data, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            failed: Any = error
            assert failed.code() not in FAULTS, failed.details()


def test_a_stream_of_junk_ends_itself_and_nobody_else(fabric: Fabric) -> None:
    rng = random.Random(7)
    opening = broker_service_pb2.ExchangeRequest(open=broker_service_pb2.ExchangeOpen()).SerializeToString()
    with grpc.insecure_channel(fabric.brokers[0].address) as channel:
        exchange: Any = channel.stream_stream("/ifabric.broker.v1.BrokerService/Exchange")
        for _ in range(10):
            with pytest.raises(grpc.RpcError, match="are no message of this method"):
                list(exchange(iter([opening, b"\xff" + rng.randbytes(200)]), timeout=PATIENCE_S))
    assert served(fabric)


def junk_connections() -> list[tuple[str, Callable[[random.Random], bytes]]]:
    settings_frame = frame(4, 0, 0, b"")
    headers = bytes([0x83, 0x86])  # POST, http
    return [
        ("noise", lambda rng: rng.randbytes(4096)),
        ("HTTP/1", lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        ("TLS to a port without", lambda _: bytes.fromhex("1603010200010001fc0303") + b"\0" * 500),
        ("a preface and noise", lambda rng: PREFACE + rng.randbytes(4096)),
        ("a frame of 16 MiB", lambda _: PREFACE + settings_frame + frame(0, 0, 1, b"", length=(1 << 24) - 1)),
        ("data on no stream", lambda _: PREFACE + settings_frame + frame(0, 0, 0, b"x" * 10)),
        ("headers that end nowhere", lambda _: PREFACE + settings_frame + frame(1, 0, 1, headers)),
        ("wrong compression", lambda _: PREFACE + settings_frame + frame(1, 4, 1, b"\xff" * 60)),
        ("an endless row of continuations", lambda _: PREFACE + settings_frame + frame(1, 0, 1, headers)
            + b"".join(frame(9, 0, 1, b"\x00\x01a\x01b" * 100) for _ in range(500))),
        ("a flood of pings", lambda _: PREFACE + settings_frame + frame(6, 0, 0, b"12345678") * 5000),
        ("a flood of settings", lambda _: PREFACE + settings_frame * 5000),
        ("a flood of resets", lambda _: PREFACE + settings_frame + b"".join(
            frame(1, 5, stream, headers) + frame(3, 0, stream, struct.pack(">I", 8)) for stream in range(1, 4001, 2))),
        ("a window that overflows", lambda _: PREFACE + settings_frame + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 2),
        ("priorities in a circle", lambda _: PREFACE + settings_frame + frame(2, 0, 1, struct.pack(">IB", 1, 255))),
        ("unknown frames", lambda rng: PREFACE + settings_frame + b"".join(
            frame(rng.randrange(10, 256), rng.randrange(256), rng.randrange(1 << 31), rng.randbytes(50))
            for _ in range(200))),
    ]  # fmt: skip


@pytest.mark.parametrize("make", [make for _, make in junk_connections()], ids=[name for name, _ in junk_connections()])
def test_junk_on_a_connection_harms_that_connection_only(
    fabric: Fabric, make: Callable[[random.Random], bytes]
) -> None:
    rng = random.Random(11)
    pids = [service.process.pid for service in fabric.services if service.process is not None]
    with ExitStack() as stack:
        for address in doors(fabric):
            for _ in range(3):
                connection = stack.enter_context(connected(address))
                try:
                    connection.sendall(make(rng))
                except (ConnectionError, TimeoutError):
                    continue  # the server has closed it already
        assert served(fabric)
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert served(fabric)
    for service in fabric.services:
        assert service.process is not None
        assert scraped(service.process.metrics)
        assert [line for line in service.process.stderr().splitlines() if not line.startswith("{")] == []


def test_clients_that_speak_a_byte_at_a_time_keep_nobody_waiting(fabric: Fabric) -> None:
    """Slow loris: many connections, each of which always has a little more to say."""
    hello = PREFACE + frame(4, 0, 0, b"")
    metrics = fabric.brokers[0].process
    assert metrics is not None
    with ExitStack() as stack:
        slow = [(stack.enter_context(connected(fabric.brokers[0].address)), hello) for _ in range(200)]
        slow += [(stack.enter_context(connected(metrics.metrics)), b"GET /metrics HTTP/1.1\r\nX: ") for _ in range(200)]
        for place in range(12):
            for connection, text in slow:
                try:
                    connection.send(text[place : place + 1])
                except OSError:
                    continue
            if place % 4 == 0:
                assert served(fabric)
                assert scraped(metrics.metrics)


def test_ten_thousand_half_open_connections_keep_nobody_waiting(fabric: Fabric) -> None:
    """Each is accepted and says nothing. The server gives them ten seconds to say who they are, and then its hand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(HALF_OPEN, hard - 2000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, HALF_OPEN + 2000), hard))
    broker = fabric.brokers[0].process
    assert broker is not None
    server = psutil.Process(broker.pid)
    before = server.num_fds()
    try:
        with ExitStack() as stack:
            for number in range(count):
                stack.enter_context(connected(broker.address))
                if number % 2000 == 1999:
                    assert served(fabric, within_s=20)
            # Not all are held at a time: the first are closed while the last are made.
            assert served(fabric, within_s=20)
        block_until(lambda: server.num_fds() <= before + 50, what="every descriptor has come back")
        assert served(fabric)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
