# SPDX-License-Identifier: Apache-2.0
"""Scripts that lack what they need say so in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

COMPILERS = {"g++", "c++", "clang++", "gcc", "cc", "clang"}


@pytest.fixture
def without_compiler(tmp_path: Path) -> str:
    """A search path with every program of this machine but compilers."""
    for folder in os.environ["PATH"].split(os.pathsep):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name not in COMPILERS and not (tmp_path / name).is_symlink():
                (tmp_path / name).symlink_to(os.path.join(folder, name))
    assert shutil.which("cmake", path=tmp_path), "the scripts would miss something else first"
    return str(tmp_path)


@pytest.mark.parametrize("words", [("scripts/libllama",), ("scripts/native", "build")], ids=" ".join)
def test_a_machine_without_a_compiler_is_told_what_to_install(words: tuple[str, ...], without_compiler: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in {"CC", "CXX"}}
    done = subprocess.run(
        ["bash", *words], cwd=ROOT, env={**environment, "PATH": without_compiler}, capture_output=True, text=True,
        timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "there is no C++ compiler" in done.stderr
    assert "apt-get install -y g++" in done.stderr
