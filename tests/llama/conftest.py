# SPDX-License-Identifier: Apache-2.0
"""A real llama engine with a tiny model of pseudo-random weights: it runs everything and says nothing."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.llama.generated import Generator
from tests.support import native

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the engine."""
    native.build("ifab_engine")
    program = native.build("ifab_tiny_llama_directory")
    directory = tmp_path_factory.mktemp("llama") / "engine"
    subprocess.run([program, directory], check=True, timeout=120)
    return directory


@pytest.fixture
def generator(tiny_engine: Path) -> Iterator[Generator]:
    """The engine, loaded, with the bytes of its tokens."""
    pieces = [bytes.fromhex(piece) for piece in json.loads((tiny_engine / "tokenizer.json").read_text())["pieces"]]
    with Generator(tiny_engine, pieces) as loaded:
        yield loaded
