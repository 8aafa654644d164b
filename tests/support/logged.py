# SPDX-License-Identifier: Apache-2.0
"""Our own log chain, written into memory."""

from __future__ import annotations

import io
import json
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from services.common import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


class LogLines:
    """Lines written so far."""

    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream

    def text(self) -> str:
        """Everything, as written."""
        return self._stream.getvalue().decode()

    def all(self, event: str | None = None) -> list[dict[str, Any]]:
        """Every line as an object; only those of one event if named."""
        lines = [json.loads(line) for line in self.text().splitlines()]
        return [line for line in lines if event is None or line.get("event") == event]


@contextmanager
def captured_logs(service: str = "test", *, level: str = "debug") -> Iterator[LogLines]:
    """Configures logging as a process does, but into memory; afterwards everything is as it was."""
    root = logging.getLogger()
    handlers, threshold, chain = root.handlers[:], root.level, structlog.get_config()
    stream = io.BytesIO()
    logs.configure(service, level=level, stream=stream)
    try:
        yield LogLines(stream)
    finally:
        root.handlers[:] = handlers
        root.setLevel(threshold)
        structlog.configure(**chain)
