# SPDX-License-Identifier: Apache-2.0
"""One short request through the loaded engine, so that somebody else can compare what it does with what it says."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ifabric.engine.v1 import contract_pb2, generation_pb2
from services.worker.credit import NOTHING
from services.worker.items import Item
from services.worker.native import Options, Request

if TYPE_CHECKING:
    from services.common.errors import FabricError
    from services.worker.engine_host import EngineHost

_PROMPT_TOKENS = 8
_OUTPUT_TOKENS = 2
_PRIORITY = 100
"""The highest: whoever probes a busy worker shall not wait for all the work that waits there."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What came back from a probe."""

    usage: generation_pb2.Usage
    payload_dtype: contract_pb2.PayloadDtype.ValueType
    payload_bytes: int
    """0 where no payload came."""

    def payload_form(self, stated: contract_pb2.PayloadForm | None, stated_bytes: int) -> contract_pb2.MaybePayload:
        """Returns the form of what came: the stated one where the size fits, else a plain row of that many bytes."""
        if not self.payload_bytes:
            return contract_pb2.MaybePayload(not_applicable=True)
        form = contract_pb2.PayloadForm(shape=[self.payload_bytes], dtype=self.payload_dtype)
        if stated is not None and self.payload_bytes == stated_bytes:
            form = contract_pb2.PayloadForm(shape=stated.shape, dtype=self.payload_dtype, layers=stated.layers)
        return contract_pb2.MaybePayload(value=form)


class _Waiter:
    """An `Outlet` for one item that somebody awaits."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Item] = asyncio.get_running_loop().create_future()

    def context_done(self, item: Item) -> None:
        """Not asked for."""

    def tokens(self, item: Item, sample: int, ids: memoryview, logprobs: memoryview | None) -> None:
        """Not asked for."""

    def finished(self, item: Item) -> None:
        """Wakes who waits."""
        if not self.ended.done():
            self.ended.set_result(item)

    def failed(self, item: Item, error: FabricError) -> None:
        """Wakes who waits, with the error."""
        if not self.ended.done():
            self.ended.set_exception(error)


async def run_probe(host: EngineHost, token_ids: tuple[int, ...]) -> Probed:
    """Runs one request beside whatever else runs.

    Args:
        host: The loaded engine.
        token_ids: The prompt; empty chooses a short one.

    Raises:
        FabricError: the engine refused the request, or failed it.
    """
    limits = host.description.limits
    if not token_ids:
        length = min(_PROMPT_TOKENS, limits["max_input_tokens"])
        token_ids = tuple(index % host.description.vocab_size for index in range(length))
    waiter = _Waiter()
    options = Options(max_tokens=min(_OUTPUT_TOKENS, limits["max_output_tokens"]), ignore_end=True, priority=_PRIORITY)
    item = Item(
        handle=0,
        request=Request(host.next_id(), array("i", token_ids).tobytes(), options),
        outlet=waiter,
        cost=NOTHING,
        stream_tokens=False,
        report_context_done=False,
    )
    (refusal,) = host.submit([item])
    if refusal is not None:
        raise refusal
    try:
        await waiter.ended
    finally:
        host.cancel([item])
    payload = item.payload
    return Probed(
        usage=item.usage(),
        payload_dtype=contract_pb2.PayloadDtype.ValueType(payload.dtype if payload else 0),
        payload_bytes=len(payload.data) if payload else 0,
    )
