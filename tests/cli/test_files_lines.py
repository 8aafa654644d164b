# SPDX-License-Identifier: Apache-2.0
"""Every kind of bad file has one defined answer."""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import zstandard

from services.cli.files.formats import Format, layout, rows_of
from services.cli.files.lines import LINE_BYTES_MAX, read_lines
from services.cli.files.opening import GZIP, PLAIN, ZSTD, look, survey
from services.cli.files.rows import BadRow, Row, read_rows
from services.cli.files.seen import SeenIds
from services.cli.running import CommandError
from services.common.errors import AlreadyExistsError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

ROWS = b"".join(json.dumps({"id": f"r{n}", "prompt": f"prompt {n}"}).encode() + b"\n" for n in range(1000))


def read(path: Path, wanted: Format = Format.AUTO) -> list[Row | BadRow]:
    source = look(str(path))
    with rows_of(source, layout(source, wanted)) as rows:
        return list(rows)


def ids(rows: list[Row | BadRow]) -> list[str]:
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.row_id for row in rows]


class Endless:
    """A line of so many bytes between two rows, made as it is read."""

    def __init__(self, size: int) -> None:
        self._before, self._left, self._after = b'{"prompt": "before"}\n', size, b'\n{"prompt": "after"}\n'

    def read(self, size: int, /) -> bytes:
        if self._before:
            data, self._before = self._before, b""
        elif self._left:
            data = b"x" * min(size, self._left)
            self._left -= len(data)
        else:
            data, self._after = self._after, b""
        return data


def test_a_line_of_a_gigabyte_is_one_error_and_never_in_memory() -> None:
    tracemalloc.start()
    before, huge, after = read_rows(Endless(1_000_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(before, Row)
    assert isinstance(after, Row)
    assert isinstance(huge, BadRow)
    assert (huge.row_id, huge.line, after.line) == ("line-2", 2, 3)
    assert huge.error.message == "row: line 2 is 1,000,000,000 bytes long, at most 8,388,608 are read"
    assert peak < 3 * LINE_BYTES_MAX


@pytest.mark.parametrize("size", [LINE_BYTES_MAX - 1, LINE_BYTES_MAX, LINE_BYTES_MAX + 1])
def test_the_limit_of_a_line_is_exact(size: int) -> None:
    [line] = read_lines(io.BytesIO(b"x" * size + b"\n"))
    assert (line.data is None, line.size_bytes) == (size > LINE_BYTES_MAX, size)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_their_bytes_arrive(chunk: int) -> None:
    content = b"\xef\xbb\xbfone\r\n\n  \r\ntwo\n\xef\xbb\xbfthree\r\r\nlast"

    class Trickle:
        def __init__(self) -> None:
            self._stream = io.BytesIO(content)

        def read(self, size: int, /) -> bytes:
            return self._stream.read(min(size, chunk))

    lines = [(line.number, line.data) for line in read_lines(Trickle())]
    assert lines == [(1, b"one"), (4, b"two"), (5, b"\xef\xbb\xbfthree\r"), (6, b"last")]


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_rows() -> None:
    rows = list(read_rows(io.BytesIO(b'\xef\xbb\xbf{"id":"a","prompt":"x"}\r\n{"id":"b","prompt":"y\\r"}\r\n')))
    assert ids(rows) == ["a", "b"]
    assert isinstance(rows[1], Row)
    assert rows[1].request.prompt.text == "y\r"


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_file_of_wide_characters_is_refused_as_a_whole(encoding: str, mark: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes((mark + '{"prompt": "x"}\n').encode(encoding))
    with pytest.raises(CommandError, match="rows are UTF-8"):
        read(path)


def test_invalid_utf8_is_an_error_of_its_row_that_says_where() -> None:
    bad, good = read_rows(io.BytesIO(b'{"prompt": "\xff"}\n{"prompt": "x"}\n'))
    assert isinstance(bad, BadRow)
    assert isinstance(good, Row)
    assert bad.error.message == "row: line 1 is not UTF-8: byte 12 of the line is 0xff"


@pytest.mark.parametrize(("size", "fits"), [(1, True), (512, True), (513, False), (10_000, False), (0, False)])
def test_ids_have_a_longest_size_in_bytes(size: int, fits: bool) -> None:
    [row] = read_rows(io.BytesIO(json.dumps({"id": "é" * (size // 2) + "e" * (size % 2), "prompt": "x"}).encode()))
    if fits:
        assert len(row.row_id.encode()) == size
        return
    assert isinstance(row, BadRow)
    assert row.row_id == "line-1"
    assert isinstance(row.error, InvalidArgumentError)
    assert row.error.message == f"id: is {size:,} bytes long, expected 1 to 512"


def test_the_second_row_of_an_id_is_an_error_under_the_name_of_its_line() -> None:
    lines = [json.dumps({"id": name, "prompt": "x"}) for name in ("a", "line-3", "a")]
    rows = list(read_rows(io.BytesIO("\n".join(lines).encode())))
    assert [row.row_id for row in rows] == ["a", "line-3", "line-3+"]
    assert isinstance(rows[2], BadRow)
    assert isinstance(rows[2].error, AlreadyExistsError)
    assert "'a'" in rows[2].error.message


def test_a_hundred_thousand_ids_are_told_apart_in_little_memory() -> None:
    tracemalloc.start()
    with SeenIds() as seen:
        assert all(seen.add(f"row {n}") for n in range(100_000))
        assert not any(seen.add(f"row {n}") for n in range(0, 100_000, 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"\n\r\n  \n", b"\xef\xbb\xbf", gzip.compress(b"")]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(content)
        assert read(path) == []
        assert survey(look(str(path))).lines == 0


COMPRESSED = {
    PLAIN: ROWS,
    GZIP: gzip.compress(ROWS),
    ZSTD: zstandard.ZstdCompressor(write_checksum=True).compress(ROWS),
}
SKIPPED = b"\x5d\x2a\x4d\x18\x04\x00\x00\x00size"
"""A frame of zstd's that holds nothing to read."""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
@pytest.mark.parametrize("packing", COMPRESSED)
def test_what_a_file_holds_decides_whatever_its_name_says(name: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(COMPRESSED[packing])
    source = look(str(path))
    assert source.packing == packing
    assert ids(read(path)) == [f"r{n}" for n in range(1000)]
    assert survey(source).lines == 1000
    said = {"rows.jsonl": PLAIN, "rows.jsonl.gz": GZIP, "rows.jsonl.zst": ZSTD}[name]
    assert source.note == ("" if said == packing else f"{path} is {packing}, not {said} as its name says")


@pytest.mark.parametrize("packing", [GZIP, ZSTD])
def test_parts_that_were_compressed_one_by_one_are_one_file(packing: str, tmp_path: Path) -> None:
    pack = gzip.compress if packing == GZIP else zstandard.compress
    path = tmp_path / "rows"
    half = ROWS.index(b"\n", len(ROWS) // 2) + 1
    parts = pack(ROWS[:half]), pack(ROWS[half:])
    path.write_bytes(b"".join(parts))
    assert len(read(path)) == 1000
    if packing == ZSTD:
        path.write_bytes(b"".join(SKIPPED + part for part in parts) + SKIPPED)
        assert len(read(path)) == 1000


@pytest.mark.parametrize("packing", [GZIP, ZSTD])
def test_compressed_data_that_breaks_off_or_is_damaged_is_said_before_anything_is_sent(
    packing: str, tmp_path: Path
) -> None:
    whole, path = COMPRESSED[packing], tmp_path / "rows"
    path.write_bytes(whole[:-9])
    with pytest.raises(CommandError, match=f"rows: the {packing} data breaks off"):
        survey(look(str(path)))
    path.write_bytes(whole[:50] + bytes(byte ^ 0x55 for byte in whole[50:90]) + whole[90:])
    with pytest.raises(CommandError, match=f"rows: the {packing} data is damaged"):
        survey(look(str(path)))


def test_a_long_line_in_little_compressed_data_is_not_in_memory_either(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zst"
    packer = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as file:
        file.write(packer.compress(b'{"prompt": "before"}\n'))
        for _ in range(256):
            file.write(packer.compress(b"x" * (1 << 20)))
        file.write(packer.flush())
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    before, huge = read(path, Format.ROWS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(before, Row)
    assert isinstance(huge, BadRow)
    assert peak < 64 << 20


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS)
    source = look(str(path))
    form = layout(source)
    with pytest.raises(CommandError, match="changed while it was read"), rows_of(source, form) as rows:  # noqa: PT012
        next(rows)
        with path.open("ab") as more:
            more.write(b'{"prompt": "late"}\n')
        list(rows)
    with pytest.raises(CommandError, match="changed while it was read"), rows_of(source, form):
        pass  # the next reading is refused before its first row


def test_a_file_that_is_replaced_between_readings_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "other"
    path.write_bytes(ROWS)
    source = look(str(path))
    other.write_bytes(ROWS)
    os.replace(other, path)
    with pytest.raises(CommandError, match="changed while it was read"):
        survey(source)


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CommandError, match="not a regular file"):
        look(str(pipe))


def test_the_digest_is_that_of_the_bytes_as_they_lie_there(tmp_path: Path) -> None:
    import hashlib

    for packing, content in COMPRESSED.items():
        path = tmp_path / packing
        path.write_bytes(content)
        assert survey(look(str(path))).sha256 == hashlib.sha256(content).hexdigest()


def test_a_url_is_opened_where_it_says() -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://bucket/rows.jsonl.gz", "wb") as file:
        file.write(gzip.compress(ROWS))
    source = look("memory://bucket/rows.jsonl.gz")
    assert (source.packing, source.stem, source.note) == (GZIP, "rows", "")
    with rows_of(source, layout(source)) as rows:
        assert len(list(rows)) == 1000
    with pytest.raises(CommandError, match="there is no such file"):
        look("memory://bucket/absent.jsonl")
    with pytest.raises(CommandError, match="no-such-protocol"):
        look("no-such-protocol://bucket/rows.jsonl")
