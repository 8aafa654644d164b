# SPDX-License-Identifier: Apache-2.0
"""Lines for grpcurl that work as printed against a running suite."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ifabric

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.cli.suite import Suite

_BROKER = "ifabric.broker.v1.BrokerService"
_JOBS = "ifabric.broker.v1.JobService"
_OPERATORS = "ifabric.broker.v1.OperatorService"
_INFERENCE = "inference.GRPCInferenceService"
_PROVISIONER = "ifabric.provisioner.v1.ProvisionerService"
_WORKER = "ifabric.worker.v1.WorkerService"
_HEALTH = "grpc.health.v1.Health/Check"


@dataclass(frozen=True, slots=True)
class Line:
    """One command line and what it shows."""

    shows: str
    command: str


def protoset() -> Path:
    """The file that describes every service and message, comments included; relative where it lies below here."""
    path = Path(next(iter(ifabric.__path__))).parent / "ifabric.protoset"
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def lines(suite: Suite, engine_ids: list[str]) -> list[Line]:
    """Returns the lines for a running suite; `engine_ids` in the order of its workers."""
    return list(_lines(suite, engine_ids))


def _lines(suite: Suite, engine_ids: list[str]) -> Iterator[Line]:
    broker, provisioner = suite.broker.address, suite.provisioner.address
    prompt = {"request": {"prompt": {"text": "The capital of France is"}, "max_tokens": 16}}
    yield Line("what the broker serves", _call(broker, "list"))
    yield Line("a message", _call(broker, "describe", "ifabric.broker.v1.GenerationRequest"))
    yield Line(
        "a method (reflection cannot describe methods of Python servers; the shipped protoset can)",
        _join(_program(), "-protoset", str(protoset()), "describe", f"{_BROKER}.Generate"),
    )
    yield Line("one answer", _call(broker, f"{_BROKER}/Generate", data=prompt))
    yield Line("one answer, streamed", _call(broker, f"{_BROKER}/GenerateStream", data=prompt))
    yield Line("the nodes", _call(provisioner, f"{_PROVISIONER}/ListNodes"))
    yield Line("the contracts of the engines that serve", _call(broker, f"{_BROKER}/ListEngines"))
    for service, address, names in (
        ("broker", broker, ["", "liveness", _BROKER, _JOBS, _OPERATORS, _INFERENCE]),
        ("provisioner", provisioner, ["", "liveness", _PROVISIONER]),
        *(
            (worker.name, worker.address, ["", "liveness", _WORKER, f"engine/{engine_id}"])
            for worker, engine_id in zip(suite.workers, engine_ids, strict=True)
        ),
    ):
        for name in names:
            shows = f"health of {service}" + (f", {name}" if name else "")
            yield Line(shows, _call(address, _HEALTH, data={"service": name} if name else None))


def _call(address: str, *words: str, data: object = None) -> str:
    body = ("-d", json.dumps(data)) if data is not None else ()
    return _join(_program(), "-plaintext", *body, address, *words)


def _join(*words: str) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _program() -> str:
    """`grpcurl` where it is on the path, else the one that `scripts/grpcurl` builds in the checkout."""
    own = Path(".tools/bin/grpcurl")
    return str(own) if shutil.which("grpcurl") is None and own.exists() else "grpcurl"
