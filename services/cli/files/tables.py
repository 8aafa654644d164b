# SPDX-License-Identifier: Apache-2.0
"""Rows in tables: CSV with a line of names on top, and Parquet.

Columns are called as the fields of a row. An empty cell of a CSV is an absent field; its numbers, truth values and
lists are written as in JSON. Parquet has types of its own; null is an absent field.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, cast

import orjson

from services.cli.files.lines import LINE_BYTES_MAX, Readable
from services.cli.files.rows import BadRow, Row, only_once, request_of
from services.cli.files.seen import SeenIds
from services.cli.files.values import invalid
from services.cli.running import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TEXT_COLUMNS = frozenset({"id", "prompt", "tenant", "cache_salt", "engine_id", "engine_digest"})
"""Columns whose cells are taken as they are."""
_BATCH_ROWS = 1024


def read_csv(file: Readable) -> Iterator[Row | BadRow]:
    """Yields the rows of a CSV file in order; a row's number is that of its record, from 1, names not counted.

    Raises:
        CommandError: The file has no line of names, or a cell is longer than a line may be.
    """
    csv.field_size_limit(LINE_BYTES_MAX)
    text = io.TextIOWrapper(cast("io.BufferedReader", _Buffered(file)), "utf-8-sig", "surrogateescape", newline="")
    records = csv.reader(_bounded(text), strict=True)
    names: list[str] | None = None
    number = 0
    with SeenIds() as seen:
        while True:
            try:
                cells = next(records, None)
            except csv.Error as error:
                raise CommandError(f"the CSV is damaged after record {number}: {error}") from error
            if cells is None:
                return
            if not cells:
                continue
            if names is None:
                names = _names(cells)
                continue
            number += 1
            yield only_once(_of_cells(number, names, cells), seen)


def read_parquet(file: Any) -> Iterator[Row | BadRow]:
    """Yields the rows of a Parquet file in order, a batch of rows in memory.

    Args:
        file: The file, which can seek.

    Raises:
        CommandError: The package that reads it is not installed, or the file is damaged.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise CommandError("Parquet needs the extra `files` (pip install 'inference-fabric[files]')") from None
    number = 0
    with SeenIds() as seen:
        try:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=_BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    present = {name: value for name, value in fields.items() if value is not None}
                    yield only_once(request_of(number, present), seen)
        except (pa.ArrowException, OSError) as error:
            raise CommandError(f"the Parquet data is damaged after row {number}: {error}") from error


def _bounded(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(LINE_BYTES_MAX):
        if len(line) == LINE_BYTES_MAX:
            raise CommandError(f"the CSV has a line of more than {LINE_BYTES_MAX:,} characters")
        yield line


def _names(cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise CommandError(f"the CSV has two columns called {min(twice)!r}")
    if not {"prompt", "token_ids"} & set(names):
        raise CommandError("the CSV has no column called prompt or token_ids on its first line")
    return names


def _of_cells(number: int, names: list[str], cells: list[str]) -> Row | BadRow:
    name = f"line-{number}"
    if len(cells) != len(names):
        return BadRow(number, name, invalid("row", f"has {len(cells)} cells under {len(names)} names"))
    fields: dict[str, Any] = {}
    for column, cell in zip(names, cells, strict=True):
        if not cell:
            continue
        if not cell.isascii() and any("\udc80" <= each <= "\udcff" for each in cell):
            return BadRow(number, name, invalid(column, "is not UTF-8"))
        fields[column] = cell if column in _TEXT_COLUMNS else _value(cell)
    return request_of(number, fields)


def _value(cell: str) -> Any:
    """A cell as JSON where it is any, as text (a stop string) where it is not."""
    try:
        return orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell


class _Buffered(io.RawIOBase):
    """What a text wrapper needs of a stream."""

    def __init__(self, file: Readable) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        return self._file.read(size if size > 0 else io.DEFAULT_BUFFER_SIZE)

    def read(self, size: int = -1) -> bytes:
        return self.read1(size)
