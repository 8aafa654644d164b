# SPDX-License-Identifier: Apache-2.0
"""The Python package as it is handed to others: a wheel, a source archive, and a wheel of that."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

from tests.support.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = ROOT / "clients" / "python"
CARRIED = {
    "ifabric_client/py.typed",
    "ifabric_client/sync.py",
    "ifabric/py.typed",
    "ifabric/broker/v1/job_service_pb2.py",
}


def build(folder: Path, out: Path, kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def names(out: Path) -> set[str]:
    [wheel] = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as carried:
        return set(carried.namelist())


def test_a_wheel_of_a_source_archive_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert build(PACKAGE, tmp_path / "direct", "wheel").returncode == 0
    assert build(PACKAGE, tmp_path, "sdist").returncode == 0
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    made = build(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "again", "wheel")
    assert made.returncode == 0, made.stderr
    assert names(tmp_path / "again") == names(tmp_path / "direct")
    assert names(tmp_path / "direct") >= CARRIED
    assert not [name for name in names(tmp_path / "direct") if name.startswith(("services", "engines"))]


def test_without_messages_the_build_says_what_to_do(tmp_path: Path) -> None:
    alone = shutil.copytree(
        PACKAGE, tmp_path / "clients" / "python", ignore=shutil.ignore_patterns("dist", "__pycache__")
    )
    made = build(alone, tmp_path / "out", "wheel")
    assert made.returncode != 0
    assert "run `make proto` in the checkout first" in made.stderr
