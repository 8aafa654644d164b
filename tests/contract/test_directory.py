# SPDX-License-Identifier: Apache-2.0
"""Reading the contract of an engine directory: leniently, with everything that is wrong, digests included."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

import pytest

from services.common import contract
from services.common.errors import FailedPreconditionError, NotFoundError
from tests.contract import documents

if TYPE_CHECKING:
    from pathlib import Path


def test_a_directory_that_agrees_has_no_findings(engine_directory: Path) -> None:
    proto, findings = contract.read(engine_directory)
    assert findings == []
    assert contract.check(proto) == []
    assert proto.engine_id == documents.generation()["engine_id"]
    text = (engine_directory / "contract.json").read_bytes()
    assert contract.engine_digest(engine_directory) == hashlib.sha256(text).hexdigest()


def test_a_file_of_another_content_is_found_by_its_digest(engine_directory: Path) -> None:
    data = bytearray(documents.FILES["weights/part-1.bin"])
    data[17] ^= 1
    (engine_directory / "weights/part-1.bin").write_bytes(data)
    _, findings = contract.read(engine_directory)
    assert [finding.path for finding in findings] == ["files[1].sha256"]
    assert hashlib.sha256(data).hexdigest() in findings[0].expected


def test_what_the_wire_form_carries_is_not_said_twice(engine_directory: Path) -> None:
    plain = documents.changed(documents.generation(), "limits.slots", "many")
    del plain["limits"]["step_token_budget"]
    plain["limits"]["steps"] = 3
    (engine_directory / "contract.json").write_text(json.dumps(plain))
    proto, findings = contract.read(engine_directory)
    assert [finding.path for finding in findings] == ["limits.slots", "limits.steps"]
    assert [finding.path for finding in contract.check(proto)] == ["limits.slots", "limits.step_token_budget"]
    together = contract.all_findings(proto, findings)
    assert [str(finding) for finding in together] == [
        'limits.slots: "many", expected integer from 1 to 65536',
        "limits.steps: 3, expected no field of this name",
        "limits.step_token_budget: absent, expected integer from 1 to 16777216",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"contract_version": NaN}', "\ufeff{}", "[" * 100_000])
def test_a_document_that_cannot_be_read_is_one_finding(engine_directory: Path, text: str) -> None:
    (engine_directory / "contract.json").write_text(text)
    proto, findings = contract.read(engine_directory)
    assert [finding.path for finding in findings] == [""]
    assert contract.all_findings(proto, findings) == findings


def test_a_huge_document_is_not_read(engine_directory: Path) -> None:
    (engine_directory / "contract.json").write_bytes(b" " * (1 << 21))
    _, findings = contract.read(engine_directory)
    assert [str(finding) for finding in findings] == ["1048577 bytes, expected at most 1048576 bytes"]


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no such engine directory: .*absent"):
        contract.read(tmp_path / "absent")
    with pytest.raises(NotFoundError, match=r"no contract\.json in engine directory"):
        contract.read(tmp_path)
    (tmp_path / "outside.json").write_text("{}")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "contract.json").symlink_to("../outside.json")
    with pytest.raises(
        NotFoundError, match=r"no contract\.json in engine directory .*: what is there is no file of its own"
    ):
        contract.read(tmp_path / "engine")


def test_a_directory_of_too_many_entries_is_refused(engine_directory: Path) -> None:
    for number in range(4096):
        (engine_directory / f"f{number}").touch()
    with pytest.raises(FailedPreconditionError, match="holds more than 4096 entries"):
        contract.read(engine_directory)


def test_a_pipe_in_the_directory_is_named_and_not_opened(engine_directory: Path) -> None:
    (engine_directory / "engine.json").unlink()
    os.mkfifo(engine_directory / "engine.json")
    _, findings = contract.read(engine_directory)
    assert [str(f) for f in findings] == [
        'files[0].path: "engine.json", no regular file, expected file in the engine directory'
    ]
