# SPDX-License-Identifier: Apache-2.0
"""A pipe in a file's place is refused at once, wherever an engine verb opens what somebody named."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from engines import model_config, sources
from engines.audit.gguf_file import open_gguf
from engines.audit.safetensors_file import open_safetensors
from engines.checkpoint import Checkpoint
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Without the mend the open waits for a writer, for ever; the limit makes that a failure.
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.gguf", open_gguf),
        ("model.safetensors", open_safetensors),
        ("source.whl", sources.digest),
        ("config.json", lambda path: model_config.read(path.parent)),
        ("model.safetensors.index.json", lambda path: Checkpoint.open(path.parent)),
    ],
)
def test_a_pipe_is_no_file(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    if name.endswith(".index.json"):
        path.unlink()
        path.write_text('{"weight_map": {"a": "part.safetensors"}}')
        os.mkfifo(tmp_path / "part.safetensors")
    with pytest.raises((OSError, FailedPreconditionError), match="it is no regular file"):
        read(path)
