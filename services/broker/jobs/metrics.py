# SPDX-License-Identifier: Apache-2.0
"""What jobs and their journal tell Prometheus. Everything is counted where it happens and read when somebody looks.

Readers run on the endpoint's thread: they read and change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.telemetry import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.broker.jobs.runner import Runner
    from services.broker.journal import Journal
    from services.common.telemetry import Telemetry


def commit_observer(telemetry: Telemetry) -> Callable[[float, bool], None]:
    """Returns what the journal tells of each transaction: its seconds, and whether it was committed."""
    durations = telemetry.histogram(names.JOURNAL_COMMIT_DURATION)
    labels = {True: {"outcome": "committed"}, False: {"outcome": "failed"}}
    return lambda seconds, committed: durations.record(seconds, labels[committed])


def observe(telemetry: Telemetry, journal: Journal, runner: Runner) -> None:
    """Has the figures of a broker's jobs read."""
    counts = journal.counts
    telemetry.observe(
        names.JOB_ROWS,
        lambda: (
            (counts.accepted, {"outcome": "accepted"}),
            (counts.finished, {"outcome": "finished"}),
            (counts.failed, {"outcome": "failed"}),
        ),
    )
    telemetry.observe(
        names.JOURNAL_FULL,
        lambda: ((counts.full, {"where": "journal"}), (runner.payloads_full, {"where": "payloads"})),
    )
    telemetry.observe(names.JOURNAL_QUEUE_DEPTH, lambda: ((journal.queued, {}),))
    telemetry.observe(names.JOBS, lambda: [(count, {"state": state}) for state, count in runner.states().items()])
    telemetry.observe(names.JOB_ROWS_WAITING, lambda: ((runner.waiting, {}),))
    telemetry.observe(names.JOB_ROWS_HELD, lambda: ((runner.held, {}),))
    telemetry.observe(names.JOB_LEASES_LOST, lambda: ((runner.leases_lost, {}),))
