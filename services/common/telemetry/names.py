# SPDX-License-Identifier: Apache-2.0
"""Every metric and span name of the suite, in one place.

Rules: names are dotted and lower case, start with `ifabric.` (or belong to a published OpenTelemetry convention), carry
no unit and no `total`; units are UCUM (`s`, `By`, `1`, `{request}`). Labels have few values that are known beforehand:
an outcome, a reason, an engine, a lane, a node; never a request id, a job or text. `docs/metrics.md` says for each
metric what it means and what to do about it; a test compares the two.

Prometheus shows `ifabric.broker.queue.wait.duration` as `ifabric_broker_queue_wait_duration_seconds`, and counters with
`_total` at the end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a metric is."""

    COUNTER = "counter"
    """Only grows."""
    UP_DOWN = "up-down counter"
    """Sum of increments and decrements."""
    GAUGE = "gauge"
    """The newest value counts."""
    HISTOGRAM = "histogram"
    """Distribution over fixed buckets."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, as code and documentation know it."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, ascending, in `unit`; histograms only."""


CALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Buckets for calls between services."""
WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets for waiting and for whole requests."""

# Every service
RPC_SERVER_DURATION = Metric(
    "rpc.server.call.duration",
    Kind.HISTOGRAM,
    "s",
    "Time from a call's arrival to its end, streams included.",
    ("rpc.method", "rpc.status_code"),
    CALL_SECONDS,
)
RPC_SERVER_ACTIVE = Metric("ifabric.rpc.server.active", Kind.UP_DOWN, "{call}", "Calls that run now.", ("rpc.method",))
CALLS_REFUSED = Metric(
    "ifabric.rpc.server.refused",
    Kind.COUNTER,
    "{call}",
    "Calls refused because of who made them: no credential, a wrong one, not theirs to make, or beyond their quota.",
    ("reason",),
)
CERTIFICATE_REMAINING = Metric(
    "ifabric.tls.certificate.remaining.duration",
    Kind.GAUGE,
    "s",
    "Time until the certificate in force ends; only with TLS.",
)
CERTIFICATE_RELOADS = Metric(
    "ifabric.tls.certificate.reloads",
    Kind.COUNTER,
    "{reload}",
    "Times that new certificate files were found; only with TLS.",
    ("outcome",),
)
PROCESS_INFO = Metric(
    "ifabric.process.info", Kind.GAUGE, "{process}", "Always 1; its labels say what runs.", ("service", "version")
)

# Provisioner
NODES = Metric("ifabric.provisioner.nodes", Kind.GAUGE, "{node}", "Nodes with a live lease.", ("state",))
REGISTRATIONS = Metric(
    "ifabric.provisioner.registrations", Kind.COUNTER, "{registration}", "Registrations received.", ("outcome",)
)
VIOLATIONS = Metric(
    "ifabric.provisioner.violations",
    Kind.COUNTER,
    "{violation}",
    "Violations found in refused registrations, by the field's path without indices.",
    ("field",),
)
HEARTBEATS = Metric("ifabric.provisioner.heartbeats", Kind.COUNTER, "{heartbeat}", "Heartbeats received.", ("outcome",))
LEASES_ENDED = Metric("ifabric.provisioner.leases.ended", Kind.COUNTER, "{lease}", "Leases that ended.", ("reason",))
PROBE_DURATION = Metric(
    "ifabric.provisioner.probe.duration",
    Kind.HISTOGRAM,
    "s",
    "Time that probes of loaded engines took.",
    ("outcome",),
    CALL_SECONDS,
)
WATCHERS = Metric("ifabric.provisioner.watchers", Kind.UP_DOWN, "{watcher}", "Open WatchNodes streams.")

# Worker
ENGINE_LOAD_DURATION = Metric(
    "ifabric.worker.engine.load.duration", Kind.GAUGE, "s", "Time that loading the engine took.", ("engine",)
)
ENGINE_STEPS = Metric(
    "ifabric.worker.engine.steps", Kind.COUNTER, "{step}", "Steps that the engine executed.", ("engine",)
)
ENGINE_PROGRESS_ONLY_STEPS = Metric(
    "ifabric.worker.engine.progress_only_steps",
    Kind.COUNTER,
    "{step}",
    "Steps in which nothing new was admitted because the batcher had no room.",
    ("engine",),
)
ENGINE_ADMISSION_RETRIES = Metric(
    "ifabric.worker.engine.admission_retries",
    Kind.COUNTER,
    "{retry}",
    "Times that an admission was put off for lack of room.",
    ("engine",),
)
ENGINE_LEADER_WAITS = Metric(
    "ifabric.worker.engine.leader_waits",
    Kind.COUNTER,
    "{wait}",
    "Times that an admission was put off because another request computes the head that it shares: no lack of room.",
    ("engine",),
)
ENGINE_BUSY = Metric("ifabric.worker.engine.busy.duration", Kind.COUNTER, "s", "Time spent in steps.", ("engine",))
ENGINE_IDLE = Metric("ifabric.worker.engine.idle.duration", Kind.COUNTER, "s", "Time with nothing to do.", ("engine",))
ENGINE_HELD_BACK = Metric(
    "ifabric.worker.engine.held_back",
    Kind.GAUGE,
    "{engine}",
    "1 while the engine takes no step because its events are not taken off it.",
    ("engine",),
)
ENGINE_STALLED = Metric(
    "ifabric.worker.engine.stalled",
    Kind.GAUGE,
    "{engine}",
    "1 while work stands still for longer than the longest step and the slack allow.",
    ("engine",),
)
ENGINE_STALLS = Metric(
    "ifabric.worker.engine.stalls",
    Kind.COUNTER,
    "{stall}",
    "Times that work stood still for longer than the longest step and the slack allow.",
    ("engine",),
)
ENGINE_REQUESTS = Metric(
    "ifabric.worker.engine.requests",
    Kind.COUNTER,
    "{request}",
    "Requests that ended on the engine, or were refused by it.",
    ("engine", "outcome"),
)
ENGINE_TOKENS = Metric(
    "ifabric.worker.engine.tokens",
    Kind.COUNTER,
    "{token}",
    "Tokens: prompt tokens computed, prompt tokens taken from a resident head, tokens generated.",
    ("engine", "kind"),
)
ENGINE_QUEUED = Metric(
    "ifabric.worker.engine.queued",
    Kind.GAUGE,
    "{request}",
    "Requests accepted and not yet in the batcher.",
    ("engine",),
)
ENGINE_ACTIVE = Metric(
    "ifabric.worker.engine.active", Kind.GAUGE, "{sequence}", "Sequences in the batcher.", ("engine",)
)
ENGINE_KV_UTILIZATION = Metric(
    "ifabric.worker.engine.kv_cache.utilization", Kind.GAUGE, "1", "Share of KV blocks in use, 0 to 1.", ("engine",)
)
ENGINE_PAYLOAD = Metric("ifabric.worker.engine.payload", Kind.COUNTER, "By", "Payload bytes produced.", ("engine",))
ENGINE_PAYLOAD_FAILURES = Metric(
    "ifabric.worker.engine.payload.failures",
    Kind.COUNTER,
    "{sequence}",
    "Sequences whose payload could not be extracted; they finished without one.",
    ("engine",),
)
WORKER_STREAMS = Metric("ifabric.worker.streams", Kind.UP_DOWN, "{stream}", "Open Execute streams.")

# Broker
BROKER_QUEUE_DEPTH = Metric(
    "ifabric.broker.queue.depth",
    Kind.GAUGE,
    "{request}",
    "Requests accepted and not yet dispatched, at the engine that will run them; those that several engines may run "
    "are divided among these by how many workers serve each.",
    ("lane", "engine"),
)
BROKER_QUEUE_WAIT = Metric(
    "ifabric.broker.queue.wait.duration",
    Kind.HISTOGRAM,
    "s",
    "Time from acceptance to the first dispatch, by the engine that it went to; of bulk work every 32nd request is "
    "recorded.",
    ("lane", "engine"),
    WAIT_SECONDS,
)
BROKER_REQUEST_DURATION = Metric(
    "ifabric.broker.request.duration",
    Kind.HISTOGRAM,
    "s",
    "Time from acceptance to the end.",
    ("lane", "outcome"),
    WAIT_SECONDS,
)
BROKER_FIRST_TOKEN = Metric(
    "ifabric.broker.first_token.duration",
    Kind.HISTOGRAM,
    "s",
    "Time from acceptance to the first token of a streamed request.",
    ("lane",),
    WAIT_SECONDS,
)
BROKER_REQUESTS = Metric(
    "ifabric.broker.requests", Kind.COUNTER, "{request}", "Requests by how they ended.", ("lane", "outcome")
)
BROKER_REQUEST_FAILURES = Metric(
    "ifabric.broker.request.failures",
    Kind.COUNTER,
    "{request}",
    "Requests that were refused or failed, rows of streams and jobs included, by reason.",
    ("lane", "reason"),
)
BROKER_TOKENS = Metric(
    "ifabric.broker.tokens",
    Kind.COUNTER,
    "{token}",
    "Tokens: logical prompt tokens, computed prompt tokens, cached prompt tokens, generated tokens; and, of the "
    "computed ones, those of shared heads that a second worker computed because a group was cut.",
    ("kind",),
)
BROKER_ENDED_JOB_TOKENS = Metric(
    "ifabric.broker.ended_jobs.prompt_tokens",
    Kind.COUNTER,
    "{token}",
    "Prompt tokens of jobs that ran to their end: as they were sent, as engines computed them, and the least that a "
    "cold cache without limit could have computed.",
    ("kind",),
)
BROKER_IN_FLIGHT = Metric(
    "ifabric.broker.in_flight", Kind.GAUGE, "{request}", "Requests dispatched and not yet ended.", ("node",)
)
BROKER_CREDIT_UTILIZATION = Metric(
    "ifabric.broker.credit.utilization",
    Kind.GAUGE,
    "1",
    "Share of a worker's credit that is outstanding, of tokens or of sequences, whichever is larger.",
    ("node",),
)
BROKER_NODES = Metric("ifabric.broker.nodes", Kind.GAUGE, "{node}", "Workers that the broker holds a stream to.")
BROKER_LATE_RESULTS = Metric(
    "ifabric.broker.late_results", Kind.COUNTER, "{result}", "Results of attempts that were already given up."
)
BROKER_LOST_ATTEMPTS = Metric(
    "ifabric.broker.lost_attempts", Kind.COUNTER, "{attempt}", "Attempts lost with their worker's stream."
)
BROKER_REATTEMPTS = Metric("ifabric.broker.reattempts", Kind.COUNTER, "{attempt}", "Attempts beyond a request's first.")
BROKER_QUARANTINED = Metric(
    "ifabric.broker.quarantined",
    Kind.COUNTER,
    "{request}",
    "Requests that ended their worker twice while they ran alone there, and were given up.",
)

# Jobs and their journal
JOBS = Metric("ifabric.broker.jobs", Kind.GAUGE, "{job}", "Jobs that are sealed and have not ended.", ("state",))
JOB_ROWS = Metric(
    "ifabric.broker.job.rows",
    Kind.COUNTER,
    "{row}",
    "Rows of jobs: taken into the journal, and committed with a result or an error.",
    ("outcome",),
)
JOB_ROWS_WAITING = Metric(
    "ifabric.broker.job.rows.waiting", Kind.GAUGE, "{row}", "Rows of sealed jobs that have no committed result."
)
JOB_ROWS_HELD = Metric("ifabric.broker.job.rows.held", Kind.GAUGE, "{row}", "Of these, rows that this broker works on.")
JOB_LEASES_LOST = Metric(
    "ifabric.broker.job.leases.lost",
    Kind.COUNTER,
    "{lease}",
    "Times that this broker was silent for longer than its lease, and gave up what it held.",
)
JOURNAL_COMMIT_DURATION = Metric(
    "ifabric.broker.journal.commit.duration",
    Kind.HISTOGRAM,
    "s",
    "Time that a transaction of the journal took, its commit included.",
    ("outcome",),
    CALL_SECONDS,
)
JOURNAL_QUEUE_DEPTH = Metric(
    "ifabric.broker.journal.queue.depth",
    Kind.GAUGE,
    "{change}",
    "Changes that wait for the journal's next transaction.",
)
JOURNAL_FULL = Metric(
    "ifabric.broker.journal.full",
    Kind.COUNTER,
    "{attempt}",
    "Attempts to keep something that failed for lack of room.",
    ("where",),
)

# Spans
SPAN_COMMAND = "ifabric.cli.command"
SPAN_ROW = "ifabric.broker.row"
SPAN_QUEUE_WAIT = "ifabric.broker.queue.wait"
SPAN_DISPATCH = "ifabric.broker.dispatch"
SPAN_PREFILL = "ifabric.worker.prefill"
SPAN_DECODE = "ifabric.worker.decode"
SPAN_PROBE = "ifabric.provisioner.probe"


def all_metrics() -> tuple[Metric, ...]:
    """Returns every metric of the suite, in the order of this module."""
    return tuple(value for value in globals().values() if isinstance(value, Metric))


def all_spans() -> tuple[str, ...]:
    """Returns the name of every span that is not a call's own, in the order of this module."""
    return tuple(value for key, value in globals().items() if key.startswith("SPAN_"))
