# SPDX-License-Identifier: Apache-2.0
"""Client of Inference Fabric.

`Client` blocks, `AsyncClient` does not; both have the same methods. Errors are `CallError`, whichever call fails.
"""

from __future__ import annotations

from ifabric_client.aio import AsyncClient
from ifabric_client.connection import Tls
from ifabric_client.errors import CallError, Violation
from ifabric_client.retries import RetryPolicy
from ifabric_client.sync import Client
from ifabric_client.values import Answer, Engine, HiddenState, Job, Outcome, Piece, Request, Sampling, Usage

__all__ = [
    "Answer",
    "AsyncClient",
    "CallError",
    "Client",
    "Engine",
    "HiddenState",
    "Job",
    "Outcome",
    "Piece",
    "Request",
    "RetryPolicy",
    "Sampling",
    "Tls",
    "Usage",
    "Violation",
]
