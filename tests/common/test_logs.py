# SPDX-License-Identifier: Apache-2.0
"""Logs: one JSON object a line, the same for libraries, and nothing in it that does not belong there."""

from __future__ import annotations

import errno
import io
import json
import logging
import subprocess
import sys
import warnings
from typing import Any

import pytest
import structlog

from services.common import logs
from services.common.telemetry import Telemetry
from tests.support.logged import captured_logs
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S


def test_a_line_says_what_who_where_and_when() -> None:
    with captured_logs("worker") as lines:
        logs.get("worker.engine").info("engine.loaded", load_ms=812)
    (line,) = lines.all()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "engine.loaded",
        "level": "info",
        "service": "worker",
        "component": "worker.engine",
        "load_ms": 812,
    }


def test_libraries_write_through_the_same_chain() -> None:
    with captured_logs("broker") as lines:
        logging.getLogger("some.library").warning("took %d tries", 3)
    (line,) = lines.all()
    assert (line["event"], line["level"], line["service"], line["logger"]) == (
        "took 3 tries",
        "warning",
        "broker",
        "some.library",
    )


def test_levels_are_kept_and_the_chatter_of_libraries_stays_out_at_debug() -> None:
    with captured_logs(level="warning") as lines:
        logs.get("x").info("quiet.now")
        logging.getLogger("y").info("quiet")
        logs.get("x").warning("loud.now")
    assert [line["event"] for line in lines.all()] == ["loud.now"]
    with captured_logs(level="debug") as lines:
        logs.get("x").debug("ours.shown")
        logging.getLogger("y").debug("theirs")
    assert [line["event"] for line in lines.all()] == ["ours.shown"]


@pytest.mark.parametrize("key", ["prompt", "text", "token_ids", "completion", "messages"])
def test_text_of_requests_is_withheld(key: str) -> None:
    with captured_logs() as lines:
        logs.get("x").info("request.accepted", **{key: "my secret prompt"})
    assert lines.all()[0][key] == "withheld"
    assert "secret" not in lines.text()


def test_long_values_are_cut() -> None:
    with captured_logs() as lines:
        logs.get("x").info("value.long", value="v" * 10_000)
    assert len(lines.all()[0]["value"]) == 4_097


def test_a_traceback_has_frames_without_their_variables() -> None:
    def fail(prompt: str) -> None:
        raise ValueError(f"{len(prompt)} characters")

    with captured_logs() as lines:
        try:
            fail("my secret prompt")
        except ValueError:
            logs.get("x").exception("call.failed")
        logging.getLogger("y").error("theirs", exc_info=True)
    ours = lines.all("call.failed")[0]
    assert ours["exception"][0]["exc_value"] == "16 characters"
    assert [frame["name"] for frame in ours["exception"][0]["frames"]][-1] == "fail"
    assert "secret" not in lines.text()


def test_a_line_inside_a_span_carries_its_trace() -> None:
    telemetry = Telemetry("test")
    with captured_logs() as lines, telemetry.tracer.start_as_current_span("work") as span:
        logs.get("x").info("inside.now")
    logs_context = span.get_span_context()
    telemetry.close()
    (line,) = lines.all()
    assert line["trace_id"] == format(logs_context.trace_id, "032x")
    assert line["span_id"] == format(logs_context.span_id, "016x")


def test_bound_context_travels_with_the_line() -> None:
    with captured_logs() as lines, structlog.contextvars.bound_contextvars(rpc="a/b"):
        logs.get("x").info("inside.now")
    assert lines.all()[0]["rpc"] == "a/b"


class Moody(io.BytesIO):
    """A disk that is full for a while."""

    full = False

    def write(self, data: Any) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(data)


def test_lines_that_cannot_be_written_are_counted_and_harm_nobody() -> None:
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    disk = Moody()
    try:
        logs.configure("broker", stream=disk)
        disk.full = True
        logs.get("x").error("first.lost")
        logging.getLogger("y").error("second lost")
        disk.full = False
        logs.get("x").info("disk.emptied")
    finally:
        structlog.configure(**before)
        root.handlers[:] = handlers
        root.setLevel(level)
    lost, line = (json.loads(each) for each in disk.getvalue().splitlines())
    assert (lost["event"], lost["lines"]) == ("log.lines_lost", 2)
    assert line["event"] == "disk.emptied"


def test_values_that_are_no_json_are_written_as_text() -> None:
    with captured_logs() as lines:
        logs.get("x").info(
            "value.odd",
            value={
                1,
            },
            keys={3: "a"},
        )
    assert lines.all()[0]["value"] == "{1}"
    assert lines.all()[0]["keys"] == {"3": "a"}


def test_a_program_that_configures_nothing_shows_warnings_on_stderr_only() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "from services.common import logs; log = logs.get('x'); "
            "log.info('quiet.now'); log.warning('loud.now', prompt='secret')",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=2 * PATIENCE_S,
    )
    assert ended.stdout == ""
    line = json.loads(ended.stderr)
    assert (line["event"], line["prompt"]) == ("loud.now", "withheld")


def test_nothing_warns_on_the_way() -> None:
    with captured_logs(), warnings.catch_warnings():
        warnings.simplefilter("error")
        logs.get("x").error("call.failed", exc_info=sys.exc_info())
