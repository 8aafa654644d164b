# SPDX-License-Identifier: Apache-2.0
"""What each method asks of its caller, in one table.

A token carries scopes, a certificate a role; either opens a method whose row names it. A method that no row names, of a
service that no row names, is for operators: what was forgotten is closed, not open.
"""

from __future__ import annotations

from dataclasses import dataclass

GENERATE = "generate"
"""Scope: requests, live and streamed."""
JOBS = "jobs"
"""Scope: bulk jobs that the broker keeps."""
OPERATE = "operate"
"""Scope: what operators do, reflection included."""
SCOPES = frozenset({GENERATE, JOBS, OPERATE, "any-tenant"})
"""Every scope there is."""

BROKER = "broker"
WORKER = "worker"
PROVISIONER = "provisioner"
CLIENT = "client"
"""Role: a service that sends work."""
OPERATOR = "operator"
"""Role: a person, or what acts for one; may do everything."""
ROLES = frozenset({BROKER, WORKER, PROVISIONER, CLIENT, OPERATOR})
"""Every role there is."""


@dataclass(frozen=True, slots=True)
class Need:
    """What opens a method: any of the scopes, or any of the roles."""

    scopes: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    anybody: bool = False
    """Whether nothing is asked at all."""
    operators: bool = False
    """Whether it stays closed to other machines where the server authenticates nobody."""


_OPERATORS = Need(frozenset({OPERATE}), frozenset({OPERATOR}), operators=True)


def _need(scope: str = "", *roles: str) -> Need:
    return Need(frozenset({scope} - {""}), frozenset({*roles, OPERATOR}))


_SERVICES: dict[str, Need] = {
    # Whoever routes calls has to see health before it has any credential; it says nothing but "serving" or not.
    "grpc.health.v1.Health": Need(anybody=True),
    "ifabric.broker.v1.BrokerService": _need(GENERATE, CLIENT),
    "ifabric.broker.v1.JobService": _need(JOBS, CLIENT),
    "ifabric.broker.v1.OperatorService": _OPERATORS,
    "inference.GRPCInferenceService": _need(GENERATE, CLIENT),
    "ifabric.provisioner.v1.ProvisionerService": _need("", CLIENT, BROKER, WORKER),
    "ifabric.worker.v1.WorkerService": _need("", BROKER, PROVISIONER),
}
_METHODS: dict[str, Need] = {
    # Whoever may run a job may ask beforehand what it will cost.
    "ifabric.broker.v1.OperatorService/AnalyzeRows": _need(JOBS, CLIENT),
    "ifabric.provisioner.v1.ProvisionerService/RegisterNode": _need("", WORKER),
    "ifabric.provisioner.v1.ProvisionerService/Heartbeat": _need("", WORKER),
    "ifabric.provisioner.v1.ProvisionerService/WithdrawNode": _need("", WORKER),
    "ifabric.provisioner.v1.ProvisionerService/WatchNodes": _need("", BROKER),
    "ifabric.worker.v1.WorkerService/Execute": _need("", BROKER),
    # A bulk file with chat templates needs the engine's template, which only a worker has.
    "ifabric.worker.v1.WorkerService/Describe": _need("", BROKER, PROVISIONER, CLIENT),
    "ifabric.worker.v1.WorkerService/FetchFile": _need("", BROKER, CLIENT),
}


def need_of(method: str) -> Need:
    """Returns what a method asks of its caller.

    Args:
        method: Full name, `package.Service/Method`.
    """
    found = _METHODS.get(method)
    if found is None:
        found = _SERVICES.get(method.rpartition("/")[0], _OPERATORS)
    return found


def named_services() -> frozenset[str]:
    """Returns every service that the table names, for the test that looks for ones that it does not."""
    return frozenset(_SERVICES) | {method.rpartition("/")[0] for method in _METHODS}
