# SPDX-License-Identifier: Apache-2.0
"""Results on disk: what ended well in one file, errors in another, each in the order of the rows.

The two files together are the state of a collection: as many lines as rows were collected. For that to hold after a
kill at any moment, results that follow each other in the same file are written with one call, and the files take turns
as the rows do; the last line of either may then be cut, and is taken off. One command at a time writes to them.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from services.cli.running import CommandError
from services.common.errors import from_status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ifabric.broker.v1 import job_service_pb2 as pb
    from services.cli.files.shapes import Shape

_READ_BYTES = 1024 * 1024
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system answers that has none."""


class Output:
    """Both files, open: `with Output(results, errors, shape, fresh=False) as output: …`.

    Args:
        results: File of results.
        errors: File of errors; it is made with the first of them.
        shape: How documents are written.
        fresh: Whether what lies there is thrown away.

    Raises (on entering):
        CommandError: Another command writes to them.
        OSError: A file cannot be opened.
    """

    def __init__(self, results: Path, errors: Path, shape: Shape, *, fresh: bool) -> None:
        self._paths = {False: results, True: errors}
        self._shape = shape
        self._fresh = fresh
        self._files: dict[bool, int] = {}
        self.rows = 0
        """Rows that the files hold."""
        self.failed = 0
        """Of these, rows in the file of errors."""

    def __enter__(self) -> Self:
        results = self._files[False] = os.open(self._paths[False], os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock(results, self._paths[False])
            if self._fresh:
                os.ftruncate(results, 0)
                with suppress(FileNotFoundError):
                    self._paths[True].unlink()
            self._count()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _count(self) -> None:
        self.rows = _whole_lines(self._files[False])
        if self._paths[True].exists():
            self._files[True] = os.open(self._paths[True], os.O_RDWR)
            self.failed = _whole_lines(self._files[True])
            self.rows += self.failed

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            os.close(file)

    def begins_with(self, result: pb.RowResult) -> bool:
        """Whether the first line of its kind is that of a result."""
        return self._holds(result, _first_line)

    def ends_with(self, result: pb.RowResult) -> bool:
        """Whether the last line of its kind is that of a result."""
        return self._holds(result, _last_line)

    def _holds(self, result: pb.RowResult, read: Callable[[int], bytes]) -> bool:
        """Compares what both documents have: a later version may say more of the same result."""
        file = self._files.get(result.HasField("failed"))
        try:
            found = None if file is None else orjson.loads(read(file))
        except orjson.JSONDecodeError:
            return False
        expected = orjson.loads(orjson.dumps(self._document(result)))
        return (
            isinstance(found, dict)
            and self._shape.id_key in found
            and all(found[key] == value for key, value in expected.items() if key in found)
        )

    def append(self, results: Sequence[pb.RowResult]) -> None:
        """Writes the results of rows that follow the ones that are there.

        Raises:
            CommandError: They do not follow.
            OSError: The disk is full, or the like.
        """
        if results and results[0].row != self.rows:
            raise CommandError(f"the broker sent row {results[0].row} where row {self.rows} is next")
        for failed, group in groupby(results, lambda result: result.HasField("failed")):
            lines = [orjson.dumps(self._document(result)) + b"\n" for result in group]
            if failed and True not in self._files:
                self._files[True] = os.open(self._paths[True], os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            _write(self._files[failed], b"".join(lines))
            self.rows += len(lines)
            self.failed += len(lines) * failed

    def flush(self) -> None:
        """Returns once everything is on the disk itself."""
        for file in self._files.values():
            os.fsync(file)

    def _document(self, result: pb.RowResult) -> dict[str, Any]:
        if result.HasField("failed"):
            return self._shape.failed(result.row_id, None, from_status(result.failed))
        return self._shape.finished(result.row_id, result.finished)


def lock(file: int, path: Path) -> None:
    """Keeps other commands from a file, or a folder, as long as it is open.

    Raises:
        CommandError: Another one has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandError(f"another command writes to {path}; wait for its end, or name another") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def check_writable(*paths: Path) -> None:
    """Makes sure that each file can be read back, as going on where it was takes; one that is not there yet can.

    Raises:
        CommandError: One is a device, a pipe, a folder: opening or reading it might wait for ever. Or two are the same,
            or another command writes to one.
        OSError: One cannot be read.
    """
    for number, path in enumerate(paths):
        if path.exists():
            if not path.is_file():
                told = f"{path} is not a regular file; results are read back to go on, so name one on a disk"
                raise CommandError(told)
            with path.open("rb") as file:
                lock(file.fileno(), path)
        if any(_same(path, other) for other in paths[:number]):
            raise CommandError(f"{path} is the file of the results; name another one for the errors")


def errors_beside(results: Path) -> Path:
    """Where errors go unless told otherwise: `out.jsonl` has `out.errors.jsonl`."""
    return results.parent / f"{results.stem}.errors{results.suffix}"


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _whole_lines(file: int) -> int:
    """Counts the lines, takes off one that was cut, and leaves the file at its end."""
    lines = end = place = 0
    while chunk := os.pread(file, _READ_BYTES, place):
        lines += chunk.count(b"\n")
        last = chunk.rfind(b"\n")
        if last >= 0:
            end = place + last + 1
        place += len(chunk)
    if end < place:
        os.ftruncate(file, end)
    os.lseek(file, end, os.SEEK_SET)
    return lines


def _same(path: Path, other: Path) -> bool:
    both = path.exists() and other.exists()
    return path.samefile(other) if both else path.resolve() == other.resolve()


def _first_line(file: int) -> bytes:
    line, place = b"", 0
    while b"\n" not in line and (chunk := os.pread(file, _READ_BYTES, place)):
        line += chunk
        place += len(chunk)
    return line.split(b"\n", 1)[0]


def _last_line(file: int) -> bytes:
    end = os.fstat(file).st_size
    tail, start = b"", end
    while start > 0 and tail.rstrip(b"\n").rfind(b"\n") < 0:
        start = max(0, start - _READ_BYTES)
        tail = os.pread(file, end - start, start)
    return tail.rstrip(b"\n").rsplit(b"\n", 1)[-1]
