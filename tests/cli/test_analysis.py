# SPDX-License-Identifier: Apache-2.0
"""`ifab bulk analyze` against brokers that end the call while rows are being sent: the reason is always heard."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ifabric.broker.v1 import operator_service_pb2 as pb
from ifabric.broker.v1 import operator_service_pb2_grpc
from services.broker.operators.servicer import FULL_NAME
from services.cli.files.formats import Format
from services.cli.jobs.analysis import analyze
from services.cli.jobs.calls import Patience
from services.cli.jobs.spec import Wishes
from services.cli.jobs.whole import open_input
from services.common.errors import FabricError, InvalidArgumentError, ResourceExhaustedError, UnimplementedError
from services.common.rpc import channel
from tests.support.servers import Unserved, serving
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ROWS = 4_000
TIMES = 12
"""A write that meets the end of a call did hide the reason, more often than not."""


class Refusing(Unserved):
    """A broker that ends the analysis at some message: 0 is before the first."""

    def __init__(self, at: int) -> None:
        self._at = at

    async def AnalyzeRows(
        self, request_iterator: AsyncIterator[pb.AnalyzeRowsRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AnalyzeRowsResponse:
        if self._at == 0:
            raise ResourceExhaustedError("another analysis runs on this broker", retry_after_s=1)
        number = 0
        async for _ in request_iterator:
            number += 1
            if number == self._at:
                raise InvalidArgumentError("too many rows")
        raise AssertionError("the client sent fewer messages")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    made = tmp_path / "rows.jsonl"
    made.write_text("\n".join(json.dumps({"prompt": f"{at:6} " + "x" * 600}) for at in range(ROWS)))
    return made


@asynccontextmanager
async def empty() -> AsyncIterator[str]:
    """A gRPC server that has no such service."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@asynccontextmanager
async def refusing(at: int) -> AsyncIterator[str]:
    async with serving(
        operator_service_pb2_grpc.add_OperatorServiceServicer_to_server, Refusing(at), FULL_NAME
    ) as server:
        yield server.address


@pytest.mark.parametrize(
    ("broker", "expected"),
    [
        (empty, UnimplementedError),
        (lambda: refusing(0), ResourceExhaustedError),
        (lambda: refusing(1), InvalidArgumentError),
        (lambda: refusing(3), InvalidArgumentError),
    ],
    ids=["no such service", "before the first", "at the first", "in the middle"],
)
async def test_the_reason_is_heard(rows: Path, broker: Any, expected: type[FabricError]) -> None:
    async with broker() as address, channel(address) as to_broker:
        given = await open_input(str(rows), Format.AUTO, Wishes(), to_broker, "", Patience(PATIENCE_S))
        for _ in range(TIMES):
            with pytest.raises(FabricError) as caught:
                await analyze(to_broker, given, silence_s=PATIENCE_S)
            assert type(caught.value) is expected, caught.value.message
