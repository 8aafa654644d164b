# SPDX-License-Identifier: Apache-2.0
"""Channels to other services, and their errors as ours.

A channel is made once a peer and shared. Every call passes `timeout=`: gRPC knows no deadline by itself. A stream that
is left early is cancelled by its caller (`try: … finally: call.cancel()`), since dropping it is not enough.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from services.common import reasons
from services.common.errors import FabricError, from_status
from services.common.rpc import options

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN_REASONS: dict[int, str] = {
    code_pb2.UNAVAILABLE: reasons.PEER_UNREACHABLE,
    code_pb2.RESOURCE_EXHAUSTED: reasons.BOUND_REACHED,
}
"""Reasons of statuses that gRPC itself made, where the code's usual reason would say something else."""


def channel(
    address: str,
    *,
    message_bytes_max: int = options.MESSAGE_BYTES_MAX,
    balanced: bool = False,
) -> grpc.aio.Channel:
    """Opens a channel; it connects with the first call and reconnects by itself.

    Args:
        address: `host:port`, `dns:///name:port` or `unix:/path`.
        message_bytes_max: Longest message sent or taken, in bytes.
        balanced: Spread calls over all addresses behind the name, and leave out those that are not healthy. For
            names of several equal servers; a worker, which must be reachable before it is ready, is never one.
    """
    return grpc.aio.insecure_channel(address, options=options.client(message_bytes_max, balanced=balanced))


def call_error(error: grpc.aio.AioRpcError) -> FabricError:
    """Turns a failed call into the typed error that the server raised, or the nearest one where gRPC itself failed."""
    status = _details(error)
    if status is not None:
        return from_status(status)
    number = error.code().value[0]
    plain = from_status(status_pb2.Status(code=number, message=error.details() or error.code().name.lower()))
    plain.reason = _PLAIN_REASONS.get(number, plain.reason)
    return plain


@contextmanager
def translated() -> Iterator[None]:
    """Raises a FabricError in place of a call's AioRpcError.

    with translated():
        reply = await stub.Describe(request, timeout=2)
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise call_error(error) from error


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:
        return None  # details that contradict the code: only the code can be trusted
    return status if status is not None and status.details else None
