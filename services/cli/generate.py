# SPDX-License-Identifier: Apache-2.0
"""`ifab generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from services.cli import options
from services.cli.connection import channel
from services.cli.results import finish_reason, finished_row
from services.cli.running import run, write_json
from services.common.errors import DeadlineExceededError
from services.common.rpc import translated

_INT32_MAX = 2**31 - 1
"""The broker judges numbers; what its fields cannot even carry is refused here."""
_UINT64_MAX = 2**64 - 1


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("is not UTF-8 text") from None
    return text


def _prompt(word: str) -> str:
    if word != "-":
        return _utf8(word)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8 text: byte {error.start} is wrong") from None


def _stops(texts: list[str]) -> list[str]:
    return [_utf8(text) for text in texts]


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", callback=_prompt, help="The prompt; `-` reads it from stdin.")
    ],
    broker: options.Broker = options.BROKER_ADDRESS,
    engine_id: options.EngineId = "",
    engine_digest: options.EngineDigest = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=0, max=_INT32_MAX, help="Most tokens to generate.")
    ] = 64,
    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token.")] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, max=_INT32_MAX, help="Choose among the k most probable tokens; 0 takes all.")
    ] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among tokens that make up this probability.")] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=_UINT64_MAX, help="Seed of the choice; the same seed gives the same text.")
    ] = 0,
    stop: Annotated[
        list[str], typer.Option(callback=_stops, help="Text that ends the answer; may be given several times.")
    ] = [],  # noqa: B006 -- typer reads it, nobody writes to it
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which the answer is given up.")] = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Generate one answer to PROMPT and write it as it comes.

    Example: ifab generate "The capital of France is" -n 16
    """
    request = broker_service_pb2.GenerationRequest(max_tokens=max_tokens, stop=stop)
    request.prompt.text = prompt
    request.engine.engine_id, request.engine.engine_digest = engine_id, engine_digest
    request.sampling.temperature = temperature
    request.sampling.top_k = top_k
    request.sampling.top_p = top_p
    request.sampling.seed = seed
    run(_answered(broker, request, timeout, as_json), as_json=as_json)


async def _answered(
    broker: str, request: broker_service_pb2.GenerationRequest, timeout_s: float, as_json: bool
) -> None:
    try:
        await (_whole if as_json else _streamed)(broker, request, timeout_s)
    except DeadlineExceededError as error:
        raise DeadlineExceededError(
            f"the answer did not end within {timeout_s:g} s; allow it more with --timeout"
        ) from error


async def _whole(broker: str, request: broker_service_pb2.GenerationRequest, timeout_s: float) -> None:
    async with channel(broker) as to_broker:
        stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
        with translated():
            reply = await stub.Generate(broker_service_pb2.GenerateRequest(request=request), timeout=timeout_s)
    write_json(finished_row(reply.result))


async def _streamed(broker: str, request: broker_service_pb2.GenerationRequest, timeout_s: float) -> None:
    async with channel(broker) as to_broker:
        stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
        call = stub.GenerateStream(broker_service_pb2.GenerateStreamRequest(request=request), timeout=timeout_s)
        try:
            with translated():
                async for message in call:
                    _show(message)
        finally:
            call.cancel()


def _show(message: broker_service_pb2.GenerateStreamResponse) -> None:
    if message.HasField("delta"):
        sys.stdout.write(message.delta.text)
        sys.stdout.flush()
    elif message.HasField("finished"):
        usage, sample = message.finished.usage, message.finished.samples[0]
        sys.stdout.write("\n")
        sys.stdout.flush()
        sys.stderr.write(
            f"[{finish_reason(sample.finish_reason)}; {usage.generated_tokens} tokens generated, "
            f"{usage.prompt_tokens} in the prompt, {usage.cached_tokens} of them cached]\n"
        )
