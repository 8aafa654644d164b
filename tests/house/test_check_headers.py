# SPDX-License-Identifier: Apache-2.0
"""`scripts/check-headers`, on the one set of headers that is always here: the stand-in's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "native" / "tests" / "executor_standin"


def check(*words: str, within_s: float) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "check-headers"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)


def test_a_folder_without_the_headers_is_named(tmp_path: Path) -> None:
    done = check("--tensorrt-llm", str(tmp_path), within_s=60)
    assert done.returncode == 2
    assert done.stderr == f"scripts/check-headers: no tensorrt_llm/executor/executor.h in {tmp_path}\n"
    assert check(within_s=60).returncode == 2


@pytest.mark.slow
def test_every_source_is_compiled(tmp_path: Path) -> None:
    done = check("--tensorrt-llm", str(STANDIN), within_s=300)
    assert done.returncode == 0, done.stderr
    listed = {line.split()[-1] for line in done.stdout.splitlines() if line.startswith("ok")}
    assert {"runtime.cpp", "executor_config.cpp", "translate.cpp", "live_request.cpp", "entry.cpp"} <= listed

    header = tmp_path / "include" / "tensorrt_llm" / "executor" / "executor.h"
    header.parent.mkdir(parents=True)
    header.write_text("#error not these\n")
    broken = check("--tensorrt-llm", str(tmp_path), within_s=300)
    assert broken.returncode == 1
    assert "failed  executor: runtime.cpp" in broken.stdout
