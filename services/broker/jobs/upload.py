# SPDX-License-Identifier: Apache-2.0
"""One UploadRows call: messages in, durable offsets out.

A few messages are on their way into the journal at a time, so that reading and committing overlap; the client is
stopped by flow control behind them. Acknowledgements are in order, and only for what is committed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ifabric.broker.v1 import job_service_pb2
from services.broker.jobs import rules
from services.common.errors import DeadlineExceededError, InvalidArgumentError, Violation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from services.broker.journal import Journal
    from services.broker.journal.values import TenantUse

MESSAGES_AHEAD = 4
"""Messages that are read and not yet committed."""
ROW_MOST = 2**40
"""Highest number of a message's first row."""
SILENCE_S = 300.0
"""Longest wait for a client's next message, in seconds."""
_SLICE_ROWS = 2048
"""Rows that are looked at before others get their turn on the event loop."""


async def upload(
    journal: Journal,
    messages: AsyncIterator[job_service_pb2.UploadRowsRequest],
    admit: Callable[[TenantUse], None],
    reach: Callable[[str], None],
) -> AsyncGenerator[job_service_pb2.UploadRowsResponse]:
    """Runs the call.

    Args:
        journal: Where rows go.
        messages: What the client sends.
        admit: Given what the tenant has; raises where that is enough.
        reach: Told the point `upload.middle` after each message.

    Raises:
        FabricError: what the proto names.
    """
    commits: asyncio.Queue[asyncio.Task[int] | None] = asyncio.Queue(MESSAGES_AHEAD)
    reader = asyncio.create_task(_read(journal, messages, admit, commits))
    try:
        while (commit := await commits.get()) is not None:
            durable = await commit
            yield job_service_pb2.UploadRowsResponse(durable_rows=durable)
            reach("upload.middle")
        await reader
    finally:
        reader.cancel()
        left = [reader]
        while not commits.empty():
            if (task := commits.get_nowait()) is not None:
                left.append(task)  # type: ignore[arg-type]
        await asyncio.gather(*left, return_exceptions=True)


async def _read(
    journal: Journal,
    messages: AsyncIterator[job_service_pb2.UploadRowsRequest],
    admit: Callable[[TenantUse], None],
    commits: asyncio.Queue[asyncio.Task[int] | None],
) -> None:
    """Reads messages and starts their commits; ends the queue whatever happens."""
    try:
        job_id = tenant = ""
        expected: int | None = None
        while (message := await _next(messages)) is not None:
            if expected is None:
                job_id, tenant = message.job_id, message.tenant
                rules.check_job_id(job_id, tenant)
            elif message.job_id or message.tenant:
                raise InvalidArgumentError.of([Violation("job_id", "is set again; only the first message carries it")])
            first = message.first_row
            if first > ROW_MOST:
                raise InvalidArgumentError.of([Violation("first_row", f"is {first}; at most {ROW_MOST} is served")])
            if first < 0 or (expected is not None and first != expected):
                raise InvalidArgumentError.of(
                    [Violation("first_row", f"is {first}; the message before ended at row {expected or 0}")]
                )
            rows = []
            for number, sent in enumerate(message.rows, first):
                rows.append(rules.taken(sent, number))
                if len(rows) % _SLICE_ROWS == 0:
                    await asyncio.sleep(0)
            expected = first + len(rows)
            commit = asyncio.create_task(journal.append(tenant, job_id, first, rows, admit=admit))
            await asyncio.sleep(0)  # it takes its place in the journal's queue before the next one does
            await commits.put(commit)
    finally:
        await asyncio.shield(commits.put(None))


async def _next(
    messages: AsyncIterator[job_service_pb2.UploadRowsRequest],
) -> job_service_pb2.UploadRowsRequest | None:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await anext(messages, None)
    except TimeoutError:
        raise DeadlineExceededError(
            f"the client has sent nothing for {SILENCE_S:g} s; go on from durable_rows"
        ) from None
