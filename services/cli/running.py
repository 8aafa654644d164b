# SPDX-License-Identifier: Apache-2.0
"""Runs a command to its end: signals, errors, exit status.

Exit status: 0 done; 1 failed, with one sentence on stderr (and an `error` object on stdout with `--json`); 2 wrong
usage; 128 + signal where a signal ended the command; 141 where nobody reads its output any more, as after SIGPIPE.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import orjson
import typer
from google.rpc import code_pb2

from services.cli import unreachable
from services.common import reasons
from services.common.errors import FabricError, StartError
from services.common.security.needs import BROKER

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

_NO_METHOD = "Method not found!"
"""What gRPC itself answers where a server has no such service."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CommandError(Exception):
    """The command failed; the message is one sentence that says what to do."""

    def __init__(self, message: str, *, reported: bool = False) -> None:
        """Args: reported: Whether stdout carries the failure as JSON already."""
        super().__init__(message)
        self.reported = reported


class _SignalledError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_latest: tuple[str, str, bool] | None = None


def goes_to(role: str, address: str, *, protected: bool) -> None:
    """Notes where the command's next calls go, and whether by TLS: gRPC's own errors do not say it."""
    global _latest
    _latest = role, address, protected


def run(work: Coroutine[Any, Any, None], *, as_json: bool, signal_ends_well: bool = False) -> None:
    """Runs `work`; the first signal cancels it, and so does each further one while it cleans up.

    Args:
        work: The command.
        as_json: Whether stdout carries JSON.
        signal_ends_well: Whether a signal is how the command normally ends.

    Raises:
        typer.Exit: The command failed or was ended by a signal.
    """
    try:
        asyncio.run(_cancellable(work))
    except _SignalledError as error:
        if not signal_ends_well:
            raise typer.Exit(128 + error.number) from None
    except BrokenPipeError:
        raise _unread() from None
    except (CommandError, FabricError, StartError, OSError) as error:
        report_failure(error, as_json=as_json and not getattr(error, "reported", False))
        raise typer.Exit(1) from None


def run_plain(work: Callable[[], None], *, as_json: bool) -> None:
    """Runs a command that waits for nobody.

    Raises:
        typer.Exit: It failed.
    """
    try:
        work()
    except BrokenPipeError:
        raise _unread() from None
    except (CommandError, FabricError, OSError) as error:
        report_failure(error, as_json=as_json and not getattr(error, "reported", False))
        raise typer.Exit(1) from None


def report_failure(error: Exception, *, as_json: bool) -> None:
    """Says on stderr what went wrong, and on stdout as an object where that carries JSON."""
    sys.stderr.write(f"ifab: {sentence(error)}\n")
    if as_json:
        write_json({"error": {**error_document(error), "message": sentence(error)}})


def sentence(error: Exception) -> str:
    """The error as one sentence, with every field at fault."""
    if isinstance(error, FabricError) and error.reason == reasons.PEER_UNREACHABLE:
        _, address, protected = _latest or ("", "", False)
        return unreachable.sentence(error.message, address, protected=protected)
    if isinstance(error, FabricError) and error.message == _NO_METHOD and _latest is not None:
        role, address, _ = _latest
        other = ", or one that keeps no jobs (its setting `journal` is empty), or of an earlier version"
        other = other if role == BROKER else ""
        return f"what answers at {address} is no {role}{other}; name the address of one with --{role}"
    if isinstance(error, FabricError) and len(error.violations) > 1:
        return "; ".join(f"{violation.field}: {violation.description}" for violation in error.violations)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def is_mistaken(error: FabricError) -> bool:
    """Whether the command's latest peer is there, and is not reached in this way: waiting seldom mends that."""
    _, _, protected = _latest or ("", "", False)
    return error.reason == reasons.PEER_UNREACHABLE and unreachable.is_mistaken(error.message, protected=protected)


def error_document(error: Exception) -> dict[str, Any]:
    """The error as results and `--json` carry it."""
    if not isinstance(error, FabricError):
        return {"code": "FAILED", "message": sentence(error)}
    document: dict[str, Any] = {
        "code": code_pb2.Code.Name(error.code),
        "reason": error.reason,
        "message": error.message,
    }
    if error.metadata:
        document["metadata"] = error.metadata
    if error.violations:
        document["fields"] = [{"field": each.field, "description": each.description} for each in error.violations]
    return document


def write_columns(rows: Sequence[Sequence[str]]) -> None:
    """Writes rows on stdout with their columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


def write_json(document: Any) -> None:
    """Writes one line of JSON on stdout."""
    sys.stdout.buffer.write(orjson.dumps(document) + b"\n")
    sys.stdout.buffer.flush()


def _unread() -> typer.Exit:
    """The end of a command whose output nobody reads any more, as of `| head`: that of others, without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # what is still to be written, Python writes at its own end
    os.close(nowhere)
    return typer.Exit(128 + signal.SIGPIPE)


async def _cancellable(work: Coroutine[Any, Any, None]) -> None:
    loop, received = asyncio.get_running_loop(), list[int]()
    task = loop.create_task(work)

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, cancel, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise _SignalledError(received[0]) from None
