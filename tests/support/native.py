# SPDX-License-Identifier: Apache-2.0
"""Programs of the native half, built where they are missing or older than their sources."""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native"


@functools.cache
def build(program: str, *, folder: str = "tools") -> Path:
    """Builds one program or library with the preset `dev`, where it is not up to date, and returns its path.

    Several test processes take turns. `make build` makes most of what this needs.

    Args:
        program: Name of the file, which is its target's, with `lib` and `.so` around it for a library.
        folder: Where it lies below `native`.
    """
    assert shutil.which("cmake"), "cmake is missing: run scripts/bootstrap"
    BUILD.parent.mkdir(exist_ok=True)
    with (BUILD.parent / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (BUILD / "build.ninja").is_file():
            _run("cmake", "--preset", "dev", "-S", "native")
        _run("cmake", "--build", str(BUILD), "--target", _target(program), "--parallel", "2")
    return BUILD / folder / program


def _target(program: str) -> str:
    return program.removeprefix("lib").removesuffix(".so") if program.endswith(".so") else program


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
