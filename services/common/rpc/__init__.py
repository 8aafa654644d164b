# SPDX-License-Identifier: Apache-2.0
"""gRPC as every service uses it: one server, one kind of channel, one translation of errors each way."""

from __future__ import annotations

from services.common.rpc.client import call_error, channel, translated
from services.common.rpc.dialer import Dialer
from services.common.rpc.server import Server

__all__ = ["Dialer", "Server", "call_error", "channel", "translated"]
