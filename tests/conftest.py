# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: no settings from outside, no time limits of Hypothesis' own, no process left behind."""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import os

import hypothesis
import psutil
import pytest

# Two cores that build something else meanwhile make any limit per example a coin toss; the suite has its own limit.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")

for _name in [name for name in os.environ if name.startswith("IFAB_") and name != "IFAB_ENGINE_LIBRARY"]:
    del os.environ[_name]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run where a test left a process behind, and ends it."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # the children are the processes that ran the tests, and each has looked after its own
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    left = [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            session.config.get_terminal_writer().line(f"left behind: {child.pid} {' '.join(child.cmdline())}", red=True)
            child.kill()
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
