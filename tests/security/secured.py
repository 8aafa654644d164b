# SPDX-License-Identifier: Apache-2.0
"""The suite as an operator secures it: TLS everywhere, tokens at the broker, health alone in the clear."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import grpc

from engines.simulated import write_simulated_engine
from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from tests.support import suite
from tests.support.authority import Authority
from tests.support.processes import ServiceProcess
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

KEYS = {
    "acme": ("acme", ("generate", "jobs")),
    "other": ("other", ("generate", "jobs")),
    "reader": ("acme", ("jobs",)),
    "writer": ("acme", ("generate",)),
    "person": ("house", ("generate", "jobs", "operate", "any-tenant")),
}
"""Static keys: name to tenant and scopes."""
_LONG: Any = (("grpc.max_receive_message_length", 64 << 20), ("grpc.ssl_target_name_override", "broker.ifabric"))


def key(name: str) -> str:
    """The key of that name, which nobody may find in a log."""
    return f"ifab_CANARY-KEY-{name}-0123456789abcdef"


class SecuredSuite:
    """Provisioner, worker and broker.

    Args:
        folder: For certificates, keys, engine and journal.
        settings: More settings of all three.
        broker: More settings of the broker.
        quotas: Tables of tenants, TOML.
        engine: Fields of the simulated engine.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: dict[str, Any] | None = None,
        broker: dict[str, Any] | None = None,
        quotas: str = "",
        engine: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.operator = self.authority.issue("operator")
        write_simulated_engine(folder / "engine", **(engine or {}))
        self._access(quotas)
        self._more = {"log_level": "debug", "health_listen": "127.0.0.1:0", **(settings or {})}
        self._broker_more = {
            "access_file": str(folder / "access.toml"), "journal": str(folder / "jobs.sqlite"), **(broker or {})
        }  # fmt: skip
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.provisioner = self._start("provisioner", heartbeat_interval_ms=200)
            self.worker = self.start_worker()
            self.broker = self._start("broker", provisioner=self.provisioner.address, **self._broker_more)
            block_until(self._serves, what="the engine is listed")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    @property
    def services(self) -> tuple[ServiceProcess, ...]:
        """All three."""
        return self.provisioner, self.worker, self.broker

    def start_worker(self, **more: Any) -> ServiceProcess:
        """Starts the worker, or another process of it."""
        return self._start(
            "worker", provisioner=self.provisioner.address, engine_dir=self.folder / "engine", node_id="node", **more
        )

    def channel(self, *, plain: bool = False) -> grpc.Channel:
        """A client's channel to the broker, as grpc makes one."""
        if plain:
            return grpc.insecure_channel(self.broker.address)
        return grpc.secure_channel(
            self.broker.address, grpc.ssl_channel_credentials(self.authority.path.read_bytes()), options=_LONG
        )

    def generate(self, name: str, prompt: str = "hello", **request: Any) -> broker_service_pb2.GenerateResponse:
        """One answer, as the key of that name gets it."""
        with self.channel() as channel:
            stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
            made = broker_service_pb2.GenerationRequest(**{"max_tokens": 4, **request})
            made.prompt.text = prompt
            answer: broker_service_pb2.GenerateResponse = stub.Generate(
                broker_service_pb2.GenerateRequest(request=made), timeout=PATIENCE_S, metadata=authorization(name)
            )
            return answer

    def ifab(self, *words: str, token: str = "", operator: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a command with the suite's authority, and a token or the operator's certificate."""
        options = ["--tls-ca", str(self.authority.path)]
        if token:
            path = self.folder / f"{token}.token"
            path.write_text(key(token))
            options += ["--token-file", str(path)]
        if operator:
            files = self.operator.files
            options += ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
        return suite.run(*options, *words)

    def written(self) -> str:
        """Everything that the services have written so far."""
        return "".join(service.stderr() for service in self.services)

    def _start(self, role: str, **settings: Any) -> ServiceProcess:
        identity = self.authority.issue(role)
        process = ServiceProcess(
            f"services.{role}", {**identity.settings(), **self._more, **settings}, start_within_s=2 * PATIENCE_S
        )
        self._stack.callback(process.kill)
        return process

    def _access(self, quotas: str) -> None:
        entries = [quotas]
        for name, (tenant, scopes) in KEYS.items():
            digest = hashlib.sha256(key(name).encode()).hexdigest()
            listed = ", ".join(f'"{scope}"' for scope in scopes)
            entries.append(f'[[keys]]\nid = "{name}"\nsha256 = "{digest}"\ntenant = "{tenant}"\nscopes = [{listed}]\n')
        (self.folder / "access.toml").write_text("\n".join(entries))

    def _serves(self) -> bool:
        with self.channel() as channel:
            stub: Any = broker_service_pb2_grpc.BrokerServiceStub(channel)
            try:
                listed = stub.ListEngines(
                    broker_service_pb2.ListEnginesRequest(), timeout=5, metadata=authorization("person")
                )
            except grpc.RpcError:
                return False
            return any(engine.node_ids for engine in listed.engines)


def authorization(name: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a key."""
    return (("authorization", f"Bearer {key(name)}"),)
