# SPDX-License-Identifier: Apache-2.0
"""Suites of this machine that run the engines which are judged."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.connection import channel, in_the_clear
from services.cli.ready import serving_engines
from services.cli.suite import Plan, Suite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc

    from ifabric.broker.v1 import broker_service_pb2

_CLIENTS_A_CHANNEL = 256
"""Streams that one connection carries well."""

StartLimit = Annotated[
    float, typer.Option("--start-limit", min=1, max=3600, help="Seconds within which the engines must be ready.")
]
Keep = Annotated[
    bool, typer.Option("--evidence/--no-evidence", help="Whether the result is kept beside the engine directory.")
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")]


@dataclass(frozen=True, slots=True)
class Running:
    """A suite that serves."""

    channels: tuple[grpc.aio.Channel, ...]
    """To its broker."""
    engines: dict[str, broker_service_pb2.Engine]
    """By digest."""


@asynccontextmanager
async def running(engines: Sequence[Path], *, start_limit_s: float, clients: int = 1) -> AsyncIterator[Running]:
    """Runs a worker for each engine directory on free ports, until the block is left.

    Args:
        engines: Engine directories.
        start_limit_s: Time within which all must serve, in seconds.
        clients: Streams that will be open at a time.

    Raises:
        CommandError: An engine was refused, or did not serve in time.
    """
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ifab-")))
        suite = await stack.enter_async_context(Suite(Plan(tuple(engines), logs, start_limit_s=start_limit_s)))
        listed = await serving_engines(suite, limit_s=start_limit_s)
        stack.enter_context(in_the_clear())
        yield Running(
            await connected(stack, suite.broker.address, clients), {each.engine_digest: each for each in listed}
        )


async def connected(stack: AsyncExitStack, address: str, clients: int) -> tuple[grpc.aio.Channel, ...]:
    """Channels to a broker, enough for so many streams; they close with the stack."""
    count = -(-clients // _CLIENTS_A_CHANNEL)
    return tuple([await stack.enter_async_context(channel(address)) for _ in range(count)])
