# SPDX-License-Identifier: Apache-2.0
"""Ports of loopback that a test names before somebody listens there, and that nobody else is given meanwhile."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def held_port() -> Iterator[str]:
    """An address on which nobody listens, and on which only who names it can.

    A port that is bound goes to no neighbour that asks for a free one, nor to a connection as its own end; as long as
    it does not listen, another socket may, since servers allow an address to be taken again (SO_REUSEADDR).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
