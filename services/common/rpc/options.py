# SPDX-License-Identifier: Apache-2.0
"""Channel arguments that both ends of our connections must agree on."""

from __future__ import annotations

import json
from typing import Any

KEEPALIVE_TIME_MS = 20_000
"""How often an open call's connection is pinged. The server allows it below; others' servers would object."""
KEEPALIVE_TIMEOUT_MS = 10_000
RECONNECT_MS_MAX = 500
"""Longest pause between attempts to connect: a server that comes back is found within it."""
METADATA_BYTES_SOFT_MAX = 32 * 1024
"""Trailers carry every violation of a refused request; gRPC's own limit of 8 KiB would cut a long refusal off."""
METADATA_BYTES_MAX = 64 * 1024
HANDSHAKE_MS = 10_000
"""How long a connection may take to say who it is: TLS, HTTP/2 preface and settings."""
MESSAGE_S = 60.0
"""How long the message of a single call may take to come whole, in seconds: it takes memory meanwhile."""
STRANGERS_MESSAGE_S = 5.0
"""The same where nobody is asked who they are: such a message is a name."""
CALLS_PER_CONNECTION = 4096
"""Calls that a server lets one connection have open unless told otherwise."""
CALLS_PENDING = 8192
"""Calls that may wait for a server to take them up. Unless told otherwise gRPC cancels some of a burst of over 1,000 at
random, which its clients cannot tell from being cancelled themselves."""
HEALTH_MESSAGE_BYTES = 4 * 1024
"""Longest message of the health-only server, in bytes: a name, or a state."""
HEALTH_CALLS = 16
"""Calls that one connection may have open on the health-only server."""
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""Longest message a client sends or takes unless told otherwise, in bytes."""

_IDEMPOTENT: dict[str, tuple[str, ...]] = {
    "ifabric.broker.v1.BrokerService": ("CancelRequests", "ListEngines"),
    "ifabric.provisioner.v1.ProvisionerService": (
        "ExplainNode",
        "Heartbeat",
        "ListNodes",
        "RegisterNode",
        "WithdrawNode",
    ),
    "ifabric.worker.v1.WorkerService": ("Describe", "Probe"),
    "grpc.health.v1.Health": ("Check",),
}
"""Methods that gRPC may send again. Generation is not among them: what runs again is the broker's decision."""


def common(message_bytes_max: int) -> list[tuple[str, Any]]:
    """Arguments of servers and clients alike."""
    return [
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_metadata_size", METADATA_BYTES_SOFT_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ]


def server(
    message_bytes_max: int, *, keepalive_ms: int = KEEPALIVE_TIME_MS, calls: int = CALLS_PER_CONNECTION
) -> list[tuple[str, Any]]:
    """Arguments of servers; `calls` may be open on one connection, further ones wait at their client."""
    return [
        *common(message_bytes_max),
        ("grpc.max_concurrent_streams", calls),
        ("grpc.server.max_pending_requests", CALLS_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", CALLS_PENDING),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # A second process on the same port must fail to start, not share the port.
        ("grpc.so_reuseport", 0),
        # The name lacks the "recv" of gRPC's own constant for it; a name that gRPC does not know is ignored.
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        # A server, too, finds out about peers that vanished without a word.
        ("grpc.keepalive_time_ms", keepalive_ms),
    ]


def client(message_bytes_max: int, *, balanced: bool, keepalive_ms: int = KEEPALIVE_TIME_MS) -> list[tuple[str, Any]]:
    """Arguments of channels; `balanced` spreads calls over every healthy address that the name resolves to."""
    return [
        *common(message_bytes_max),
        ("grpc.keepalive_time_ms", keepalive_ms),
        # As many pings as it takes: a stream on which nothing is said for hours is one of ours, too.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
        # Despite its name the time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(service_config(balanced=balanced))),
    ]


def service_config(*, balanced: bool) -> dict[str, Any]:
    """The service config of our channels: retries of idempotent methods, and balancing where asked for."""
    config: dict[str, Any] = {
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
        "methodConfig": [
            {
                "name": [
                    {"service": service, "method": method}
                    for service, methods in _IDEMPOTENT.items()
                    for method in methods
                ],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
    if balanced:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ""}
    return config
