# SPDX-License-Identifier: Apache-2.0
"""Results on disk: what ended well in one file, errors in another, each in the order of the rows.

The two files together are the state of a collection: as many lines as rows were collected. For that to hold after a
kill at any moment, results that follow each other in the same file are written with one call, and the files take turns
as the rows do; the last line of either may then be cut, and is taken off.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from services.cli.running import CommandError
from services.common.errors import from_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ifabric.broker.v1 import job_service_pb2 as pb
    from services.cli.files.shapes import Shape

_READ_BYTES = 1024 * 1024


class Output:
    """Both files, open: `with Output(results, errors, shape, fresh=False) as output: …`.

    Args:
        results: File of results.
        errors: File of errors; it is made with the first of them.
        shape: How documents are written.
        fresh: Whether what lies there is thrown away.

    Raises (on entering):
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
        if self._fresh:
            with suppress(FileNotFoundError):
                self._paths[True].unlink()
        self._files[False] = os.open(
            self._paths[False], os.O_RDWR | os.O_CREAT | (os.O_TRUNC if self._fresh else 0), 0o666
        )
        self.rows = _whole_lines(self._files[False])
        if self._paths[True].exists():
            self._files[True] = os.open(self._paths[True], os.O_RDWR)
            self.failed = _whole_lines(self._files[True])
            self.rows += self.failed
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            os.close(file)

    def last_ids(self) -> set[str]:
        """Ids of the last line of each file."""
        return {_last_id(file, self._shape.id_key) for file in self._files.values()}

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


def check_writable(*paths: Path) -> None:
    """Makes sure that each file can be read back, as going on where it was takes; one that is not there yet can.

    Raises:
        CommandError: One is a device, a pipe, a folder: opening or reading it might wait for ever.
        OSError: One cannot be looked at.
    """
    for path in paths:
        if path.exists() and not path.is_file():
            raise CommandError(f"{path} is not a regular file; results are read back to go on, so name one on a disk")


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


def _last_id(file: int, key: str) -> str:
    """The id on the last line; empty where there is none."""
    end = os.fstat(file).st_size
    tail, start = b"", end
    while start > 0 and tail.rstrip(b"\n").rfind(b"\n") < 0:
        start = max(0, start - _READ_BYTES)
        tail = os.pread(file, end - start, start)
    try:
        document = orjson.loads(tail.rstrip(b"\n").rsplit(b"\n", 1)[-1])
    except orjson.JSONDecodeError:
        return ""
    found = document.get(key) if isinstance(document, dict) else None
    return found if isinstance(found, str) else ""
