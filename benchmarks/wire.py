# SPDX-License-Identifier: Apache-2.0
"""Token ids on the wire: `repeated int32` against packed little-endian `bytes`.

Both forms are fields of the same proto (`Prompt.tokens`, `Prompt.packed_token_ids`), and both are measured the way that
the suite uses them: built from a numpy array, sent through a grpc.aio bidi stream many requests a message, and read
back as a numpy array. Client and server share one process and one event loop, so a request's time is the CPU time of
both ends. The forms take turns within each run, so that a slow moment of the machine hits both.

    python -m benchmarks.wire --runs 7
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import numpy as np

from benchmarks.frame import Report
from ifabric.broker.v1 import broker_service_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import numpy.typing as npt

    Ids = npt.NDArray[np.int32]
    Build = Callable[[Ids], broker_service_pb2.GenerationRequest]
    Read = Callable[[broker_service_pb2.GenerationRequest], Ids]

IDS = 1024
A_MESSAGE = 64
VOCABULARY = 128_256
"""Of a current 8-billion-parameter model: most ids take three bytes as varints."""
_METHOD = "/ifabric.benchmark.Wire/Exchange"


def build_repeated(ids: Ids) -> broker_service_pb2.GenerationRequest:
    """A request whose ids are `repeated int32`."""
    request = broker_service_pb2.GenerationRequest(request_id="row-000001", max_tokens=128)
    request.prompt.tokens.ids.extend(ids.tolist())
    return request


def build_packed(ids: Ids) -> broker_service_pb2.GenerationRequest:
    """A request whose ids are packed bytes."""
    request = broker_service_pb2.GenerationRequest(request_id="row-000001", max_tokens=128)
    request.prompt.packed_token_ids = ids.tobytes()
    return request


def read_repeated(request: broker_service_pb2.GenerationRequest) -> Ids:
    """The ids of a request, shape [n], int32."""
    return np.array(request.prompt.tokens.ids, dtype=np.int32)


def read_packed(request: broker_service_pb2.GenerationRequest) -> Ids:
    """The ids of a request, shape [n], int32."""
    return np.frombuffer(request.prompt.packed_token_ids, dtype="<i4")


FORMS: dict[str, tuple[Build, Read]] = {
    "repeated": (build_repeated, read_repeated),
    "packed": (build_packed, read_packed),
}


def build_us(build: Build, prompts: list[Ids]) -> float:
    """Time to build and serialize one request, in a message of `A_MESSAGE`."""
    begin = time.perf_counter()
    for start in range(0, len(prompts), A_MESSAGE):
        _message(build, prompts[start : start + A_MESSAGE]).SerializeToString()
    return (time.perf_counter() - begin) / len(prompts) * 1e6


def read_us(read: Read, wires: list[bytes], prompts: list[Ids]) -> float:
    """Time to parse one request of such a message and have its ids as an array."""
    begin = time.perf_counter()
    total = 0
    for wire in wires:
        for request in broker_service_pb2.ExchangeRequest.FromString(wire).requests:
            total += int(read(request)[-1])
    elapsed = time.perf_counter() - begin
    assert total == sum(int(ids[-1]) for ids in prompts), "the ids that were sent"
    return elapsed / len(prompts) * 1e6


async def stream_us(channel: grpc.aio.Channel, build: Build, prompts: list[Ids], name: str) -> float:
    """Time of one request through a stream: built, sent, received, read and answered."""
    call = channel.stream_stream(
        _METHOD,
        request_serializer=broker_service_pb2.ExchangeRequest.SerializeToString,
        response_deserializer=broker_service_pb2.ExchangeResponse.FromString,
    )(metadata=(("form", name),))
    answered = 0

    async def receive() -> None:
        nonlocal answered
        async for reply in call:
            answered += len(reply.outcomes)

    begin = time.perf_counter()
    receiver = asyncio.create_task(receive())
    for start in range(0, len(prompts), A_MESSAGE):
        await call.write(_message(build, prompts[start : start + A_MESSAGE]))
    await call.done_writing()
    await receiver
    elapsed = time.perf_counter() - begin
    assert answered == len(prompts), "every request is answered"
    return elapsed / len(prompts) * 1e6


async def answer(
    messages: AsyncIterator[broker_service_pb2.ExchangeRequest],
    context: grpc.aio.ServicerContext[broker_service_pb2.ExchangeRequest, broker_service_pb2.ExchangeResponse],
) -> AsyncIterator[broker_service_pb2.ExchangeResponse]:
    """The server's side: has every prompt as an array, answers with an outcome each."""
    read = FORMS[str(dict(context.invocation_metadata() or ())["form"])][1]
    async for message in messages:
        reply = broker_service_pb2.ExchangeResponse()
        for request in message.requests:
            assert len(read(request)) == IDS
            reply.outcomes.add(request_id=request.request_id)
        yield reply


async def measure(runs: int, messages: int) -> Report:
    """Runs the benchmark."""
    source = np.random.default_rng(1)
    prompts = [source.integers(0, VOCABULARY, IDS, dtype=np.int32) for _ in range(A_MESSAGE * messages)]
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 * 1024 * 1024)])
    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=broker_service_pb2.ExchangeRequest.FromString,
        response_serializer=broker_service_pb2.ExchangeResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("ifabric.benchmark.Wire", {"Exchange": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    report = Report("wire")
    report.fact("ids_a_request", IDS)
    report.fact("requests_a_message", A_MESSAGE)
    report.fact("vocabulary", VOCABULARY)
    taken: dict[str, list[float]] = {f"{part}_{name}_us": [] for part in ("build", "read", "stream") for name in FORMS}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for run in range(runs + 1):  # the first warms up and does not count
            for name, (build, read) in FORMS.items():
                wires = [
                    _message(build, prompts[start : start + A_MESSAGE]).SerializeToString()
                    for start in range(0, len(prompts), A_MESSAGE)
                ]
                values = {
                    "build": build_us(build, prompts),
                    "read": read_us(read, wires, prompts),
                    "stream": await stream_us(channel, build, prompts, name),
                }
                if run == 0:
                    report.fact(f"{name}_bytes_a_request", len(build(prompts[0]).SerializeToString()))
                    continue
                for part, value in values.items():
                    taken[f"{part}_{name}_us"].append(value)
    await server.stop(None)
    for name, figures in taken.items():
        report.figure(name, figures, unit="us")
    for name in FORMS:
        report.figure(f"{name}_requests_per_s", [1e6 / us for us in taken[f"stream_{name}_us"]], unit="req/s")
    report.ratio("packed_over_repeated", of="packed_requests_per_s", over="repeated_requests_per_s", goal="> 1")
    return report


def _message(build: Build, prompts: list[Ids]) -> broker_service_pb2.ExchangeRequest:
    return broker_service_pb2.ExchangeRequest(requests=[build(ids) for ids in prompts])


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7, help="runs that count (default 7)")
    parser.add_argument("--messages", type=int, default=64, help="messages of 64 requests in a run (default 64)")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.runs, arguments.messages)).print()


if __name__ == "__main__":
    main()
