# SPDX-License-Identifier: Apache-2.0
"""Which format a file of rows has, and its rows."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from services.cli.files.lines import read_lines
from services.cli.files.openai import CHAT, ENDPOINTS, BatchForm, form_of, read_batch
from services.cli.files.opening import PARQUET, Source
from services.cli.files.rows import BadRow, Row, parse_object, read_rows
from services.cli.files.shapes import BatchShape, RowShape, Shape
from services.cli.files.tables import read_csv, read_parquet
from services.cli.running import CommandError
from services.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.cli.files.chat import ChatEngine

_LINES_LOOKED_AT = 1000


class Format(StrEnum):
    """Formats that `--format` takes."""

    AUTO = "auto"
    ROWS = "rows"
    OPENAI = "openai"
    CSV = "csv"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a file are to be read, and their results to be written."""

    format: Format
    batch: BatchForm | None
    """What the lines of an OpenAI batch file have in common; None for other formats."""

    @property
    def needs_chat(self) -> bool:
        """Whether rows are chats, which take an engine's template."""
        return self.batch is not None and self.batch.endpoint == CHAT

    def shape(self, created: int) -> Shape:
        """The shape of results of a job that was made at `created`, in seconds since 1970."""
        return RowShape() if self.batch is None else BatchShape(self.batch.endpoint, self.batch.model, created)


def layout(source: Source, wanted: Format = Format.AUTO) -> Layout:
    """Finds out the format of a file, by what it holds where that tells, or takes the one that is wanted.

    Raises:
        CommandError: The file is not of the wanted format, or asks for an endpoint that is not served.
    """
    if source.packing == PARQUET or wanted is Format.PARQUET:
        if source.packing != PARQUET or wanted not in {Format.AUTO, Format.PARQUET}:
            raise CommandError(f"{source.name} is {source.packing}, not {wanted.value}")
        return Layout(Format.PARQUET, None)
    named_csv = ".csv" in PurePosixPath(source.name.lower()).suffixes
    if wanted is Format.CSV or (wanted is Format.AUTO and named_csv):
        return Layout(Format.CSV, None)
    if wanted is Format.ROWS:
        return Layout(Format.ROWS, None)
    form = _first_form(source)
    if form is None:
        if wanted is Format.OPENAI:
            raise CommandError(f"{source.name} has no batch request (custom_id, method, url, body) on its first lines")
        return Layout(Format.ROWS, None)
    if form.endpoint not in ENDPOINTS:
        raise CommandError(f"{source.name} asks for {form.endpoint!r}; served are {', '.join(ENDPOINTS)}")
    return Layout(Format.OPENAI, form)


@contextmanager
def rows_of(source: Source, form: Layout, chat: ChatEngine | None = None) -> Iterator[Iterator[Row | BadRow]]:
    """Opens a file and gives its rows, in order; `chat` is needed where `form.needs_chat`.

    Raises:
        CommandError: The file cannot be read to its end, or changed since it was looked at.
    """
    with source.opened() as stream:
        match form.format:
            case Format.CSV:
                yield read_csv(stream)
            case Format.PARQUET:
                yield read_parquet(stream)
            case _:
                yield read_rows(stream) if form.batch is None else read_batch(stream, form.batch, chat)


def _first_form(source: Source) -> BatchForm | None:
    """The form that the first line that is an object has."""
    with source.opened() as stream:
        for line in islice(read_lines(stream), _LINES_LOOKED_AT):
            try:
                return form_of(parse_object(line))
            except InvalidArgumentError:
                continue
    return None
