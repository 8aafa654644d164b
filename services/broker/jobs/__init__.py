# SPDX-License-Identifier: Apache-2.0
"""Jobs that outlive every process: JobService, and what works on its rows."""

from __future__ import annotations

from services.broker.jobs.service import Jobs, JobSettings

__all__ = ["JobSettings", "Jobs"]
