# SPDX-License-Identifier: Apache-2.0
"""The process's meters and tracer, its Prometheus endpoint, and OTLP where it is asked for."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from services.common.errors import StartError
from services.common.protocol import suite_version
from services.common.settings import split_address
from services.common.telemetry import names
from services.common.telemetry.endpoint import MetricsEndpoint
from services.common.telemetry.names import Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.metrics import Counter, Histogram, UpDownCounter
    from opentelemetry.metrics._internal.instrument import Gauge

    from services.common.security import Credentials


_PUSH_S = 3.0


class Telemetry:
    """Makes instruments from `names` and serves what they say.

    Nothing here is global: a process normally has one, tests have as many as they like.
    """

    def __init__(
        self, service: str, *, otlp_endpoint: str | None = None, trace_ratio: float = 1.0, push_s: float = _PUSH_S
    ) -> None:
        """Sets up meters and tracer; nothing listens before `serve_metrics`.

        Args:
            service: Name in resource attributes.
            otlp_endpoint: Where to push traces and metrics to, `http://host:port`; nowhere if None.
            trace_ratio: Share of traces that start here and are recorded.
            push_s: How long one push to the collector may take, in seconds, repetitions included.
        """
        self._push_s = push_s
        self._registry = CollectorRegistry()
        self._endpoint: MetricsEndpoint | None = None
        # `create` adds an id of the process, which alone tells two workers of one engine apart, and what
        # OTEL_RESOURCE_ATTRIBUTES says.
        resource = Resource.create(
            {"service.name": service, "service.namespace": "ifabric", "service.version": suite_version()}
        )
        readers: list[MetricReader] = [
            PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self._registry)
        ]
        # Without somewhere to send spans they only carry ids for logs and peers, which costs next to nothing.
        sampler = ParentBased(TraceIdRatioBased(trace_ratio) if otlp_endpoint else ALWAYS_OFF)
        self._tracers = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        keeping = ParentBased(ALWAYS_ON if otlp_endpoint else ALWAYS_OFF)
        self._keepers = TracerProvider(resource=resource, sampler=keeping, shutdown_on_exit=False)
        if otlp_endpoint:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            insecure = otlp_endpoint.startswith("http://")
            readers.append(
                PeriodicExportingMetricReader(OTLPMetricExporter(otlp_endpoint, insecure=insecure, timeout=push_s))
            )
            spans = BatchSpanProcessor(OTLPSpanExporter(otlp_endpoint, insecure=insecure, timeout=push_s))
            self._tracers.add_span_processor(spans)
            self._keepers.add_span_processor(spans)
        self._meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._meter = self._meters.get_meter("ifabric")
        self.tracer = self._tracers.get_tracer("ifabric")
        """Starts spans."""
        self.kept = self._keepers.get_tracer("ifabric")
        """Starts spans that are recorded whatever `trace_ratio` says: somebody has chosen them already."""
        info = {"service": service, "version": suite_version()}
        self.observe(names.PROCESS_INFO, lambda: ((1, info),))

    def counter(self, metric: Metric) -> Counter:
        """Returns the counter `metric`; `add(n, labels)`."""
        _expect(metric, Kind.COUNTER)
        return self._meter.create_counter(metric.name, metric.unit, metric.meaning)

    def up_down(self, metric: Metric) -> UpDownCounter:
        """Returns the up-down counter `metric`; `add(n, labels)`."""
        _expect(metric, Kind.UP_DOWN)
        return self._meter.create_up_down_counter(metric.name, metric.unit, metric.meaning)

    def gauge(self, metric: Metric) -> Gauge:
        """Returns the gauge `metric`; `set(value, labels)`."""
        _expect(metric, Kind.GAUGE)
        return self._meter.create_gauge(metric.name, metric.unit, metric.meaning)

    def histogram(self, metric: Metric) -> Histogram:
        """Returns the histogram `metric` with its buckets; `record(value, labels)`."""
        _expect(metric, Kind.HISTOGRAM)
        return self._meter.create_histogram(
            metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
        )

    def observe(self, metric: Metric, read: Callable[[], Iterable[tuple[float, Mapping[str, str]]]]) -> None:
        """Has a gauge or counter read when somebody looks.

        Args:
            metric: A gauge, or a counter whose value is kept elsewhere and only grows.
            read: Returns (value, labels) pairs. Runs on the endpoint's thread: it only reads, and never waits.
        """

        def callback(_options: CallbackOptions) -> Iterable[Observation]:
            # A truth value would become 1 for Prometheus; OTLP refuses it, and with it all that is pushed beside it.
            return [Observation(+value, labels) for value, labels in read()]

        if metric.kind is Kind.COUNTER:
            self._meter.create_observable_counter(metric.name, [callback], metric.unit, metric.meaning)
        else:
            _expect(metric, Kind.GAUGE)
            self._meter.create_observable_gauge(metric.name, [callback], metric.unit, metric.meaning)

    def serve_metrics(self, listen: str, *, credentials: Credentials | None = None) -> str:
        """Starts the Prometheus endpoint and returns where it listens, `host:port`.

        Args:
            listen: Where to listen, `host:port`; port 0 takes a free one.
            credentials: The process's certificate, for HTTPS; None is HTTP.

        Raises:
            StartError: The address is taken or not ours.
        """
        host, port = split_address(listen)
        try:
            self._endpoint = MetricsEndpoint(self._registry, host, port, credentials)
        except OSError as error:
            why = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise StartError(
                f"cannot serve metrics on {listen}: the address {why}; name another one with --metrics-listen, or port "
                f"0 for a free one"
            ) from error
        return self._endpoint.address

    def close(self) -> None:
        """Pushes what is left and stops the endpoint; a silent collector costs `push_s` or a little more."""
        self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=1_000 * self._push_s)
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def _expect(metric: Metric, kind: Kind) -> None:
    if metric.kind is not kind:
        raise TypeError(f"{metric.name} is a {metric.kind.value}, not a {kind.value}")
