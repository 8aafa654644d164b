# SPDX-License-Identifier: Apache-2.0
"""Files of the engine directory, for brokers: those that the contract names, and nothing else."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import TYPE_CHECKING

from ifabric.worker.v1 import worker_service_pb2
from services.common import reasons
from services.common.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from ifabric.engine.v1 import contract_pb2

CHUNK_BYTES = 256 * 1024
AT_ONCE_MAX = 8
"""Files that may be on their way at once: each holds one open file and one chunk."""


class EngineFiles:
    """Sends files of one engine directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sending = 0

    async def send(
        self, contract: contract_pb2.EngineContract, path: str
    ) -> AsyncGenerator[worker_service_pb2.FetchFileResponse]:
        """Yields the chunks of a file that the contract names.

        Args:
            contract: The contract of the directory.
            path: Path of the file, exactly as the contract lists it.

        Raises:
            NotFoundError: the contract lists no such file.
            FailedPreconditionError: the file is gone, leads out of the directory, or has not the contract's size.
            ResourceExhaustedError: AT_ONCE_MAX files are being sent.
        """
        entry = next((file for file in contract.files if file.path == path), None)
        if entry is None:
            raise NotFoundError(f"the contract names no file {path!r}", reason=reasons.FILE_UNKNOWN)
        if self._sending >= AT_ONCE_MAX:
            raise ResourceExhaustedError(f"{AT_ONCE_MAX} files are being sent already", retry_after_s=0.5)
        self._sending += 1
        try:
            descriptor = await asyncio.to_thread(self._open, entry)
            try:
                offset = 0
                while offset < entry.size_bytes or not offset:
                    data = await asyncio.to_thread(os.pread, descriptor, CHUNK_BYTES, offset)
                    if not data and entry.size_bytes:
                        raise _changed(path, f"it ends after {offset} of {entry.size_bytes} bytes")
                    yield worker_service_pb2.FetchFileResponse(offset=offset, data=data, size_bytes=entry.size_bytes)
                    if not data:
                        return
                    offset += len(data)
            finally:
                os.close(descriptor)
        finally:
            self._sending -= 1

    def _open(self, entry: contract_pb2.EngineFile) -> int:
        """Opens a file, once it is sure that it is a regular one inside the directory, of the contract's size."""
        try:
            real = (self._directory / entry.path).resolve(strict=True)
            if not real.is_relative_to(self._directory.resolve(strict=True)):
                raise _changed(entry.path, "it leads out of the engine directory")
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _changed(entry.path, error.strerror or "it cannot be opened") from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size_bytes:
            os.close(descriptor)
            raise _changed(entry.path, f"it has {found.st_size} bytes, the contract says {entry.size_bytes}")
        return descriptor


def _changed(path: str, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"the file {path} is not the one that the contract names: {why}")
