# SPDX-License-Identifier: Apache-2.0
"""Files of results: who may write to them, and whose results they hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from google.rpc import status_pb2

from ifabric.broker.v1 import broker_service_pb2
from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.files.shapes import RowShape
from services.cli.jobs.output import Output, check_writable
from services.cli.running import CommandError

if TYPE_CHECKING:
    from pathlib import Path


def well(row: int, text: str) -> pb.RowResult:
    finished = broker_service_pb2.GenerationResult(engine_digest="d")
    finished.samples.add(text=text)
    return pb.RowResult(row=row, row_id=f"r{row}", finished=finished)


def failed(row: int, why: str) -> pb.RowResult:
    return pb.RowResult(row=row, row_id=f"r{row}", failed=status_pb2.Status(code=3, message=why))


def opened(folder: Path, *, fresh: bool = False) -> Output:
    return Output(folder / "out.jsonl", folder / "out.errors.jsonl", RowShape(), fresh=fresh)


def test_what_files_hold_is_told_by_the_words_of_the_first_row_and_the_last(tmp_path: Path) -> None:
    with opened(tmp_path) as output:
        output.append([well(0, "a"), failed(1, "b"), well(2, "c"), failed(3, "d")])
    with opened(tmp_path) as again:
        assert (again.rows, again.failed) == (4, 2)
        assert again.begins_with(well(0, "a"))
        assert again.ends_with(failed(3, "d"))
        assert again.ends_with(well(2, "c")), "of those that ended well, the last"
        for other in (well(0, "x"), failed(0, "a"), well(2, "c")):
            assert not again.begins_with(other)
        for other in (failed(3, "x"), well(3, "d"), well(0, "a")):
            assert not again.ends_with(other)


def test_a_line_of_an_earlier_version_that_says_less_is_the_same_result(tmp_path: Path) -> None:
    with opened(tmp_path) as output:
        output.append([well(0, "a")])
    line = json.loads((tmp_path / "out.jsonl").read_text())
    del line["usage"]
    (tmp_path / "out.jsonl").write_text(json.dumps(line) + "\n")
    with opened(tmp_path) as again:
        assert again.ends_with(well(0, "a"))
        assert not again.ends_with(well(0, "b"))


@pytest.mark.parametrize("fresh", [False, True])
def test_one_command_at_a_time_writes(fresh: bool, tmp_path: Path) -> None:
    with opened(tmp_path) as output:
        output.append([well(0, "a"), failed(1, "b")])
        with pytest.raises(CommandError, match="another command writes to"), opened(tmp_path, fresh=fresh):
            raise AssertionError("two have it")
        with pytest.raises(CommandError, match="another command writes to"):
            check_writable(tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl")
        output.append([well(2, "c")])
    with opened(tmp_path) as again:
        assert (again.rows, again.failed) == (3, 1)
    with opened(tmp_path, fresh=True) as anew:
        assert anew.rows == 0
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_errors_have_a_file_of_their_own(tmp_path: Path) -> None:
    results = tmp_path / "out.jsonl"
    with pytest.raises(CommandError, match="is the file of the results"):
        check_writable(results, tmp_path / "x" / ".." / "out.jsonl")
    results.touch()
    (tmp_path / "link.jsonl").hardlink_to(results)
    with pytest.raises(CommandError, match="is the file of the results"):
        check_writable(results, tmp_path / "link.jsonl")
    check_writable(results, tmp_path / "other.jsonl")
