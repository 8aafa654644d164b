# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: no settings from outside, no time limits of Hypothesis' own, no process left behind."""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import os

import hypothesis
import psutil
import pytest

# Two cores that build something else meanwhile make any limit on time a coin toss, that on drawing examples included;
# the suite has its own.
hypothesis.settings.register_profile(
    "house", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("house")

for _name in [name for name in os.environ if name.startswith("IFAB_") and name != "IFAB_ENGINE_LIBRARY"]:
    del os.environ[_name]

_END_WITHIN_S = 5.0
"""What was told to end may take a moment; what nobody told does not end."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run where a test left a process behind, and ends it."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # the children are the processes that ran the tests, and each has looked after its own
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    children = [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]
    _, left = psutil.wait_procs(children, timeout=_END_WITHIN_S)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            session.config.get_terminal_writer().line(f"left behind: {child.pid} {' '.join(child.cmdline())}", red=True)
            child.kill()
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
