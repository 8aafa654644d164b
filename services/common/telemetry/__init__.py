# SPDX-License-Identifier: Apache-2.0
"""Metrics and traces: names in one place, instruments made from them, a Prometheus endpoint on every service."""

from __future__ import annotations

from services.common.telemetry.names import Kind, Metric
from services.common.telemetry.setup import Telemetry

__all__ = ["Kind", "Metric", "Telemetry"]
