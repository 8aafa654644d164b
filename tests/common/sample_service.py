# SPDX-License-Identifier: Apache-2.0
"""A service process for tests: `python -m tests.common.sample_service --mode …`."""

from __future__ import annotations

import asyncio
from typing import Literal

from services.common.process import Process, run
from services.common.rpc import Server
from services.common.settings import ServiceSettings
from tests.common.behaviour import FULL_NAME, Behaviour, register


class SampleSettings(ServiceSettings, env_prefix="IFAB_SAMPLE_"):
    """Settings of the sample."""

    mode: Literal["serve", "task fails", "main fails", "hangs"] = "serve"
    """What happens once it listens."""


async def serve(settings: SampleSettings, process: Process) -> None:
    server = Server(settings, process.telemetry)
    server.add(register, Behaviour(), FULL_NAME)
    process.announce(await server.start())
    await server.ready()
    if settings.mode == "task fails":
        process.tasks.start(_fail(), name="doomed")
    if settings.mode == "main fails":
        await _fail()
    if settings.mode == "hangs":
        server.on_drain("never", _never)
    await server.serve(process.stop)


async def _fail() -> None:
    raise LookupError("as asked")


async def _never() -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    raise SystemExit(run(SampleSettings, serve))
