# SPDX-License-Identifier: Apache-2.0
"""Token ids on the wire: `repeated int32` against packed little-endian `bytes`.

Prompts of 1,024 ids, 64 to a message, from a NumPy array in one process to a NumPy array in the other, first as plain
encoding and decoding, then through a grpc.aio stream on loopback. Ids are drawn from a vocabulary of 128 K, where a
varint takes three bytes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks.frame import Report
from ifabric.broker.v1 import broker_service_pb2
from services.common.rpc import channel, options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from multiprocessing.connection import Connection

    Ids = npt.NDArray[np.int32]
    Prompt = broker_service_pb2.Prompt

IDS, ITEMS, VOCABULARY = 1024, 64, 128_000
RUNS, MESSAGES = 7, 60
METHOD = "/ifabric.benchmark.Wire/Send"


def put_repeated(prompt: Prompt, ids: Ids) -> None:
    """Writes ids one varint each."""
    prompt.tokens.ids.extend(ids.tolist())


def put_packed(prompt: Prompt, ids: Ids) -> None:
    """Writes ids as they lie in memory."""
    prompt.packed_token_ids = ids.astype("<i4", copy=False).tobytes()


def take_repeated(prompt: Prompt) -> Ids:
    """Reads ids from varints."""
    return np.fromiter(prompt.tokens.ids, np.int32, len(prompt.tokens.ids))


def take_packed(prompt: Prompt) -> Ids:
    """Reads ids in place."""
    return np.frombuffer(prompt.packed_token_ids, "<i4")


FORMS: dict[str, tuple[Callable[[Prompt, Ids], None], Callable[[Prompt], Ids]]] = {
    "repeated": (put_repeated, take_repeated),
    "packed": (put_packed, take_packed),
}


def message(form: str, prompts: list[Ids]) -> broker_service_pb2.ExchangeRequest:
    """One message with all `prompts`."""
    put = FORMS[form][0]
    request = broker_service_pb2.ExchangeRequest()
    for ids in prompts:
        put(request.requests.add().prompt, ids)
    return request


def read(form: str, request: broker_service_pb2.ExchangeRequest) -> int:
    """Reads all ids of a message and returns how many there were."""
    take = FORMS[form][1]
    return sum(take(item.prompt).size for item in request.requests)


def coding_us(form: str, prompts: list[Ids]) -> float:
    """Time to encode and decode one prompt, in microseconds."""
    started = time.perf_counter()
    for _ in range(MESSAGES):
        parsed = broker_service_pb2.ExchangeRequest.FromString(message(form, prompts).SerializeToString())
        assert read(form, parsed) == IDS * ITEMS
    return (time.perf_counter() - started) / MESSAGES / ITEMS * 1e6


async def streamed_per_s(form: str, prompts: list[Ids], address: str) -> float:
    """Prompts a second over one stream, from array to array."""
    async with channel(address) as to_receiver:
        send: Any = to_receiver.stream_unary(
            METHOD, request_serializer=broker_service_pb2.ExchangeRequest.SerializeToString, response_deserializer=None
        )

        async def requests() -> AsyncIterator[broker_service_pb2.ExchangeRequest]:
            for _ in range(MESSAGES):
                yield message(form, prompts)

        started = time.perf_counter()
        answer: Any = await send(requests(), metadata=(("form", form),), timeout=120)
        elapsed = time.perf_counter() - started
    assert int(answer) == IDS * ITEMS * MESSAGES
    return ITEMS * MESSAGES / elapsed


def serve(ready: Connection) -> None:
    """Runs the receiving process until it is terminated."""
    asyncio.run(_serve(ready))


async def _serve(ready: Connection) -> None:
    async def count(request_iterator: AsyncIterator[Any], context: Any) -> bytes:
        form = dict(context.invocation_metadata())["form"]
        return str(sum([read(form, request) async for request in request_iterator])).encode()

    handler: Any = grpc.stream_unary_rpc_method_handler(
        count, request_deserializer=broker_service_pb2.ExchangeRequest.FromString, response_serializer=None
    )
    server = grpc.aio.server(options=options.server(options.MESSAGE_BYTES_MAX))
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.send(port)
    await server.wait_for_termination()


def main() -> None:
    """Runs the benchmark."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, VOCABULARY, IDS, dtype=np.int32) for _ in range(ITEMS)]
    report = Report("wire")
    report.fact("ids", IDS)
    report.fact("items_a_message", ITEMS)
    coding: dict[str, list[float]] = {form: [] for form in FORMS}
    stream: dict[str, list[float]] = {form: [] for form in FORMS}
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    receiver = context.Process(target=serve, args=(child,), daemon=True)
    receiver.start()
    try:
        address = f"127.0.0.1:{parent.recv()}"
        for _ in range(RUNS):  # in turns, so that a slow moment of the machine hits both
            for form in FORMS:
                coding[form].append(coding_us(form, prompts))
                stream[form].append(asyncio.run(streamed_per_s(form, prompts, address)))
    finally:
        receiver.terminate()
        receiver.join(10)
    for form in FORMS:
        report.fact(f"{form}_bytes_a_prompt", message(form, prompts).ByteSize() // ITEMS)
        report.figure(f"{form}_coding_us", coding[form], unit="us")
        report.figure(f"{form}_stream_per_s", stream[form], unit="prompts/s")
    report.ratio("packed_over_repeated", of="packed_stream_per_s", over="repeated_stream_per_s")
    report.print()


if __name__ == "__main__":
    main()
