# SPDX-License-Identifier: Apache-2.0
"""Payloads of jobs, in files beside the journal; the journal keeps where each lies.

Every process appends to files of its own, so that nobody ever writes where another does; what a process that died had
written and not recorded is freed with the job. A payload is on the disk before the result that names it is committed.
"""

from __future__ import annotations

import os
import shutil
import uuid
import zlib
from typing import TYPE_CHECKING, BinaryIO

from services.broker.journal.values import JournalFullError, Payload
from services.common.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHARD_BYTES = 256 * 1024 * 1024
"""A shard that has grown so large is closed and another begun."""
_DISK_FULL = (28, 122)
"""ENOSPC, EDQUOT."""


class ShardStore:
    """The folder of payloads. Calls block on the disk: they belong on a thread, one at a time for `append`.

    Args:
        folder: Where to; shared by all brokers of one journal.
        sync: Whether payloads outlive a power cut.
    """

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        self._folder = folder
        self._sync = sync
        self._open: dict[int, tuple[str, BinaryIO]] = {}

    def append(self, job: int, payloads: Sequence[bytes]) -> list[Payload]:
        """Writes payloads of a job and returns where they lie.

        Raises:
            JournalFullError: the disk is full; nothing is named that is not there.
            UnavailableError: the folder cannot be written.
        """
        try:
            name, shard = self._shard(job)
            places: list[Payload] = []
            for data in payloads:
                places.append(Payload(name, shard.tell(), len(data), zlib.crc32(data)))
                shard.write(data)
            shard.flush()
            if self._sync:
                os.fdatasync(shard.fileno())
        except OSError as error:
            self._forget(job)
            if error.errno in _DISK_FULL:
                raise JournalFullError("the payload folder's disk is full", retry_after_s=5.0) from error
            raise UnavailableError(f"payloads cannot be written: {error.strerror}", retry_after_s=1.0) from error
        return places

    def read(self, payload: Payload) -> bytes:
        """Returns a payload.

        Raises:
            UnavailableError: its shard is not here.
            InternalError: its bytes are not those that were written.
        """
        try:
            with (self._folder / payload.shard).open("rb") as shard:
                data = os.pread(shard.fileno(), payload.size, payload.offset)
        except OSError as error:
            raise UnavailableError(f"the shard {payload.shard} cannot be read: {error.strerror}") from error
        if len(data) != payload.size or zlib.crc32(data) != payload.crc32:
            raise InternalError(f"the shard {payload.shard} is damaged at byte {payload.offset}")
        return data

    def drop(self, job: int) -> None:
        """Removes everything of a job."""
        self._forget(job)
        shutil.rmtree(self._folder / str(job), ignore_errors=True)

    def close(self) -> None:
        """Closes the files."""
        for job in list(self._open):
            self._forget(job)

    def _shard(self, job: int) -> tuple[str, BinaryIO]:
        found = self._open.get(job)
        if found is not None and found[1].tell() < SHARD_BYTES:
            return found
        self._forget(job)
        name = f"{job}/{uuid.uuid4().hex}.shard"
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = name, path.open("xb")
        self._open[job] = opened
        if self._sync:
            # A file is there after a power cut where its folder says so, and that where the one above it does.
            for folder in (path.parent, self._folder, self._folder.parent):
                _sync_folder(folder)
        return opened

    def _forget(self, job: int) -> None:
        found = self._open.pop(job, None)
        if found is not None:
            found[1].close()


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
