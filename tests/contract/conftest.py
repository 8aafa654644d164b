# SPDX-License-Identifier: Apache-2.0
"""The library's own reading of documents, through the tool `ifab_check`."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from services.common.schema import Finding
from tests.contract import documents
from tests.support import native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


@pytest.fixture(scope="session")
def native_check() -> Callable[[Iterable[tuple[str, bytes]]], list[Any]]:
    """Checks (schema name, document) frames, or ("directory", path), with the library's code.

    Returns for each frame the list of findings, or the text of the error for a directory that cannot be opened.
    """
    tool = native.build("ifab_check")

    def check(frames: Iterable[tuple[str, bytes]]) -> list[Any]:
        sent = b"".join(b"%s %d\n%s" % (kind.encode(), len(data), data) for kind, data in frames)
        done = subprocess.run([tool], input=sent, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return [_answer(json.loads(line)) for line in done.stdout.splitlines()]

    return check


def _answer(answer: Any) -> Any:
    return answer["error"] if isinstance(answer, dict) else [Finding(**finding) for finding in answer]


@pytest.fixture
def engine_directory(tmp_path: Path) -> Path:
    """An engine directory that agrees with its contract."""
    return documents.write_engine_directory(tmp_path / "engine")
