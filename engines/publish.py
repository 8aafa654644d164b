# SPDX-License-Identifier: Apache-2.0
"""Engine directories come into being whole, or not at all.

A directory is built beside its place, under a name that begins with a dot. What a build has finished stays there when
it is interrupted, and the next build with the same inputs goes on from it. At the end everything is written through to
the disk and the directory gets its name in one step. Builds of the same directory take turns.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from typing import TYPE_CHECKING

from services.common.contract import CONTRACT_FILE
from services.common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_INPUTS = ".inputs"
_TURN_S = 600.0
_POLL_S = 0.1


class Workplace:
    """Where one engine directory is built; get it from `workplace`."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = _beside(target, "building")
        self._old = _beside(target, "old")

    def begin(self, inputs: str, needed_bytes: int) -> None:
        """Takes up what an interrupted build left, or begins anew.

        Args:
            inputs: Everything that shapes the result, as text; what was made of other inputs is thrown away.
            needed_bytes: Room on the disk that a whole build takes.

        Raises:
            FailedPreconditionError: Something lies at the place that is no engine directory.
            ResourceExhaustedError: The disk has no room.
        """
        target = self._target
        if target.exists() and not (target / CONTRACT_FILE).is_file() and any(target.iterdir()):
            raise FailedPreconditionError(f"{target} exists and is no engine directory: name another place")
        kept = self.path(_INPUTS)
        if kept.is_file() and kept.read_text() == inputs:
            return
        shutil.rmtree(self._path, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes:
            raise ResourceExhaustedError(
                f"{free >> 20} MiB of disk are free under {target.parent}, and the build needs {needed_bytes >> 20}: "
                "make room and run it again"
            )
        self._path.mkdir()
        kept.write_text(inputs)

    def path(self, name: str) -> Path:
        """Where a file of the directory is built."""
        return self._path / name

    def step(self, name: str, make: Callable[[Path], None]) -> Path:
        """Makes one file, unless an interrupted build with the same inputs made it already.

        Args:
            name: Name of the file in the directory.
            make: Writes the file to the path that it is given.

        Returns:
            Where the file is.
        """
        done = self.path(name)
        if not done.exists():
            part = self.path(f".{name}.part")
            make(part)
            _write_through(part)
            part.rename(done)
        return done

    def publish(self, files: Sequence[str]) -> None:
        """Gives the directory its name, with these files and nothing else; what had the name before is gone then."""
        for entry in self._path.iterdir():
            if entry.name in files:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        _write_through(self._path)
        if self._target.exists():
            self._target.rename(self._old)
        self._path.rename(self._target)
        _write_through(self._target.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def tidy(self) -> None:
        """Leaves nothing behind where no file was finished."""
        if self._path.is_dir() and all(entry.name.startswith(".") for entry in self._path.iterdir()):
            shutil.rmtree(self._path, ignore_errors=True)

    def recover(self) -> None:
        """Brings back what a build that was killed between two renames had put aside."""
        if self._old.exists() and not self._target.exists():
            self._old.rename(self._target)
        shutil.rmtree(self._old, ignore_errors=True)


@contextlib.contextmanager
def workplace(target: Path, *, turn_s: float = _TURN_S) -> Iterator[Workplace]:
    """The place where `target` is built, for one build in its parent folder at a time.

    Args:
        target: The engine directory that will be.
        turn_s: How long to wait for other builds, in seconds.

    Raises:
        FailedPreconditionError: Nothing can be written there.
        ResourceExhaustedError: The disk is full.
        UnavailableError: Another build did not end in time.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _turn(target.parent, turn_s):
            place = Workplace(target)
            place.recover()
            try:
                yield place
            finally:
                place.tidy()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceExhaustedError(
                f"the disk is full under {target.parent}: make room and run it again"
            ) from error
        raise FailedPreconditionError(f"{target} cannot be built: {error}") from error


def _beside(target: Path, what: str) -> Path:
    return target.parent / f".{target.name}.{what}"


@contextlib.contextmanager
def _turn(folder: Path, limit_s: float) -> Iterator[None]:
    """Holds the folder's own lock, which leaves no file behind and ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + limit_s
        while not _locked(descriptor):
            if time.monotonic() >= deadline:
                raise UnavailableError(f"another build has been running in {folder} for {limit_s:g} s")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_through(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
