# SPDX-License-Identifier: Apache-2.0
"""Runs one short request through a loaded engine, by the worker's own door."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifabric.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.common.rpc import translated
from services.common.security.needs import WORKER
from services.common.telemetry import names, propagation

if TYPE_CHECKING:
    from services.common.rpc import Dialer
    from services.common.telemetry import Telemetry


class Prober:
    """Probes workers, each over a connection of its own that ends with the probe."""

    def __init__(self, telemetry: Telemetry, dialer: Dialer, *, timeout_s: float) -> None:
        self._tracer = telemetry.tracer
        self._timeout_s = timeout_s
        self._dialer = dialer

    async def probe(self, address: str) -> worker_service_pb2.ProbeResponse:
        """Probes the worker at `address`, `host:port`; the worker chooses the prompt.

        Raises:
            FabricError: The worker cannot be reached, refuses, or does not answer within the time limit.
        """
        with self._tracer.start_as_current_span(names.SPAN_PROBE):
            async with self._dialer.channel(address, role=WORKER) as worker:
                stub = worker_service_pb2_grpc.WorkerServiceStub(worker)
                with translated():
                    return await stub.Probe(
                        worker_service_pb2.ProbeRequest(), timeout=self._timeout_s, metadata=propagation.metadata()
                    )
