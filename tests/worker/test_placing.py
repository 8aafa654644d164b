# SPDX-License-Identifier: Apache-2.0
"""What is placed before a worker is the engine that was asked for, whole, or nothing is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines.simulated import ABSENT, write_simulated_engine
from services.common.contract import engine_digest
from tests.support.processes import run_to_end

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_simulated_engine(tmp_path / "source")
    (tmp_path / "target").mkdir()
    return tmp_path / "source"


def place(source: Path, target: Path, digest: str) -> subprocess.CompletedProcess[str]:
    return run_to_end("services.worker.placing", [str(source), str(target), "--digest", digest])


def test_the_engine_asked_for_is_placed_and_what_lay_there_goes(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "half").mkdir()
    (target / "half" / "model").write_text("of an earlier attempt")
    done = place(source, target, f"sha256:{engine_digest(source)}")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }


def test_it_is_verified_where_it_lies(source: Path) -> None:
    assert place(source, source, engine_digest(source)).returncode == 0
    (source / "tokenizer.json").write_text("{}")
    done = place(source, source, engine_digest(source))
    assert done.returncode == 1
    assert "is not what its contract says: files[" in done.stderr


def test_another_engine_is_refused_and_nothing_is_placed(source: Path, tmp_path: Path) -> None:
    done = place(source, tmp_path / "target", "0" * 64)
    assert (done.returncode, list((tmp_path / "target").iterdir())) == (1, [])
    assert f"holds the engine {engine_digest(source)}, and the one asked for is {'0' * 64}" in done.stderr


def test_a_contract_that_the_provisioner_will_refuse_is_placed_all_the_same(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_simulated_engine(source, contract_changes={"limits.step_token_budget": ABSENT})
    (tmp_path / "target").mkdir()
    assert place(source, tmp_path / "target", engine_digest(source)).returncode == 0


@pytest.mark.parametrize("digest", ["", "sha256:", "A" * 64, "0" * 63])
def test_what_is_no_digest_is_refused_by_name(source: Path, digest: str) -> None:
    done = place(source, source, digest)
    assert done.returncode == 2
    assert f"--digest is {digest!r}; allowed is 64 hexadecimal digits" in done.stderr


def test_a_source_without_a_contract_is_one_sentence(tmp_path: Path) -> None:
    done = place(tmp_path, tmp_path, "0" * 64)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
