# SPDX-License-Identifier: Apache-2.0
"""Engines on accepted nodes, as the front door sees them."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import grpc

from ifabric.worker.v1 import worker_service_pb2 as wire
from ifabric.worker.v1 import worker_service_pb2_grpc
from services.broker.work import CatalogEngine
from services.common import logs, reasons
from services.common.errors import FabricError, NotFoundError, UnavailableError
from services.common.rpc import call_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ifabric.engine.v1 import contract_pb2
    from ifabric.provisioner.v1 import provisioner_service_pb2

FETCH_LIMIT_S = 30.0
"""How long one worker may take to send a file."""

_log = logs.get("broker.catalog")


class EngineCatalog:
    """The catalog; see work.Catalog.

    Args:
        kept_s: How long an engine stays listed after its last node left.
        channels: Returns channels to workers that serve an engine, by its digest.
    """

    def __init__(self, kept_s: float, channels: Callable[[str], Sequence[grpc.aio.Channel]]) -> None:
        self._kept_s = kept_s
        self._channels = channels
        self._contracts: dict[str, contract_pb2.EngineContract] = {}
        self._left: dict[str, float] = {}
        """When the last node of an engine left."""
        self._listed: tuple[CatalogEngine, ...] = ()
        self._revision = 0
        self._synced = False

    @property
    def revision(self) -> int:
        """Grows whenever `engines` would answer differently from before."""
        return self._revision

    @property
    def synced(self) -> bool:
        """Whether the provisioner has been heard since the start."""
        return self._synced

    def engines(self) -> Sequence[CatalogEngine]:
        """All engines, in order of engine_id, then digest."""
        return self._listed

    def update(self, nodes: Sequence[provisioner_service_pb2.Node], *, now: float | None = None) -> None:
        """Takes in which nodes are accepted now."""
        now = time.monotonic() if now is None else now
        self._synced = True
        serving: dict[str, list[str]] = {}
        for node in nodes:
            description = node.description
            digest = description.engine_digest
            serving.setdefault(digest, []).append(description.node_id)
            self._contracts.setdefault(digest, description.contract)
        for digest in list(self._contracts):
            if digest in serving:
                self._left.pop(digest, None)
            elif now - self._left.setdefault(digest, now) > self._kept_s:
                del self._contracts[digest], self._left[digest]
        listed = tuple(
            CatalogEngine(digest, contract, tuple(sorted(serving.get(digest, ()))))
            for digest, contract in sorted(self._contracts.items(), key=lambda item: (item[1].engine_id, item[0]))
        )
        if [(e.digest, e.node_ids) for e in listed] != [(e.digest, e.node_ids) for e in self._listed]:
            self._listed = listed
            self._revision += 1

    async def fetch_file(self, engine_digest: str, path: str) -> bytes:
        """Brings one file of an engine directory from a worker that serves it, verified against the contract's digest.

        Raises:
            NotFoundError: no such engine, or the contract lists no such file.
            UnavailableError: no worker can send it now.
        """
        contract = self._contracts.get(engine_digest)
        if contract is None:
            raise NotFoundError(f"no engine {engine_digest}", reason=reasons.ENGINE_UNKNOWN)
        expected = next((file for file in contract.files if file.path == path), None)
        if expected is None:
            raise NotFoundError(
                f"the contract of engine {contract.engine_id} lists no file {path!r}", reason=reasons.FILE_UNKNOWN
            )
        problem = "no node that serves it is connected"
        for channel in self._channels(engine_digest):
            try:
                data = await _fetch(channel, engine_digest, path, expected.size_bytes)
            except FabricError as error:
                problem = error.message
                continue
            if hashlib.sha256(data).hexdigest() == expected.sha256:
                return data
            problem = "what came does not match the contract's digest"
            _log.error("file.differs", engine_digest=engine_digest, path=path)
        raise UnavailableError(
            f"file {path!r} of engine {contract.engine_id} cannot be fetched: {problem}",
            reason=reasons.PEER_UNREACHABLE,
            retry_after_s=1.0,
        )


async def _fetch(channel: grpc.aio.Channel, digest: str, path: str, size_bytes: int) -> bytes:
    stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
    call = stub.FetchFile(wire.FetchFileRequest(engine_digest=digest, path=path), timeout=FETCH_LIMIT_S)
    data = bytearray()
    try:
        async for chunk in call:
            data += chunk.data
            if len(data) > size_bytes:
                break  # more than the contract says: the digest will not match either
    except grpc.aio.AioRpcError as error:
        raise call_error(error) from error
    finally:
        call.cancel()
    return bytes(data)
