# SPDX-License-Identifier: Apache-2.0
"""Asks a service's health once: what a container runtime without gRPC probes runs inside the container.

    python -m services.common.healthcheck HOST:PORT [NAME]

The address is that of `health_listen`, which speaks in the clear and needs no certificate. NAME is a health name; the
whole service if absent. The exit status is 0 where it serves, and 1 with one sentence where it does not.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

_WITHIN_S = 4.0
"""Less than the limit that the images' health checks have, so that the sentence is still read."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 serving, 1 not, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m services.common.healthcheck", description="Asks health once.")
    parser.add_argument("address", help="where health alone is served, HOST:PORT")
    parser.add_argument("name", nargs="?", default="", help="a health name; the whole service if absent")
    asked = parser.parse_args(argv)
    request = health_pb2.HealthCheckRequest(service=asked.name)
    try:
        with grpc.insecure_channel(asked.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            status = stub.Check(request, timeout=_WITHIN_S).status
    except grpc.RpcError as error:
        sys.stderr.write(f"health of {asked.address} cannot be asked: {error.code().name}\n")
        return 1
    if status != health_pb2.HealthCheckResponse.SERVING:
        word = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        sys.stderr.write(f"{asked.name or asked.address} is {word}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
