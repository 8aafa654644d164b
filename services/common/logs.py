# SPDX-License-Identifier: Apache-2.0
"""Structured logs: one JSON object a line on stderr.

Events are named `noun.verb_past` (`engine.loaded`), keys are snake_case with units. Log lines of libraries pass through
the same chain. Prompts and completions are never logged: keys that could carry them are withheld here, whoever wrote
the line, and tracebacks carry no local variables.

    log = logs.get("worker.engine")
    log.info("engine.loaded", engine_id="…", load_ms=812)

A program that never calls `configure`, such as a command, shows warnings and errors only, in the same form.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import orjson
import structlog
from opentelemetry import trace
from structlog.tracebacks import ExceptionDictTransformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import EventDict, FilteringBoundLogger, Processor

_WITHHELD = frozenset(
    {
        "completion",
        "content",
        "messages",
        "output_text",
        "prompt",
        "text",
        "token_ids",
        "tokens",
    }
)
_VALUE_CHARACTERS_MAX = 4096


def configure(service: str, *, level: str = "info", stream: BinaryIO | None = None) -> None:
    """Sets up logging for the process; the last call counts.

    Args:
        service: Name that every line carries.
        level: Least severe level that is written: debug, info, warning or error.
        stream: Where bytes go; stderr if absent.
    """
    out = _Sink(stream or _stderr())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    chain = _chain(service)
    _configure_structlog(chain, threshold, lambda *_: out)
    handler = _BytesHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *chain],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(serializer=lambda value, **_: _serialize(value).decode()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # A library's chatter is wanted at debug only when ours is.
    root.setLevel(threshold if threshold > logging.DEBUG else logging.INFO)


def get(name: str) -> FilteringBoundLogger:
    """Returns a logger whose lines carry `component=name`."""
    return cast("FilteringBoundLogger", structlog.get_logger(component=name))


def _chain(service: str) -> list[Processor]:
    """What every line goes through before it is written."""

    def add_service(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        add_service,
        _add_trace,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        _withhold,
    ]


def _configure_structlog(chain: list[Processor], threshold: int, factory: Callable[..., Any]) -> None:
    structlog.configure(
        processors=[*chain, structlog.processors.JSONRenderer(serializer=_serialize)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )


def _stderr() -> BinaryIO:
    """Standard error without a buffer: what cannot be written would stay in it, and fail again as the process ends."""
    return cast("BinaryIO", getattr(sys.stderr.buffer, "raw", sys.stderr.buffer))


class _Sink:
    """Where lines go. A disk that is full, or a reader that has gone, costs lines and nothing else.

    How many lines were lost is said by the first line that can be written again.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._lost = 0

    def msg(self, line: bytes) -> None:
        """Writes a line, or loses it."""
        with self._lock:
            lost = self._lost
            said = _serialize({"event": "log.lines_lost", "level": "error", "lines": lost}) + b"\n" if lost else b""
            data = said + line + b"\n"
            try:
                whole = self._out.write(data) == len(data)
                self._out.flush()
            except (OSError, ValueError):  # ValueError: the stream is closed
                whole = False
            self._lost = 0 if whole else lost + 1

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


class _BytesHandler(logging.Handler):
    """Writes formatted records to a sink."""

    def __init__(self, out: _Sink) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode()
        except Exception:
            self.handleError(record)
        else:
            self._out.msg(line)


def _serialize(value: Any, **_: Any) -> bytes:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)


def _add_trace(_logger: Any, _method: str, event: EventDict) -> EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event.setdefault("trace_id", format(context.trace_id, "032x"))
        event.setdefault("span_id", format(context.span_id, "016x"))
    return event


def _withhold(_logger: Any, _method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if key in _WITHHELD:
            event[key] = "withheld"
        elif isinstance(value, str) and len(value) > _VALUE_CHARACTERS_MAX:
            event[key] = value[:_VALUE_CHARACTERS_MAX] + "…"
    return event


if not structlog.is_configured():
    # structlog by itself would print to stdout, where results of commands go, with the local variables of every frame.
    _configure_structlog(_chain("unconfigured"), logging.WARNING, lambda *_: _Sink(_stderr()))
