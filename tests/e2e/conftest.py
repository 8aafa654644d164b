# SPDX-License-Identifier: Apache-2.0
"""One real suite for the tests of this folder that do not harm it, on the small CPU engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.suite import ENGINE, up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.suite import RunningSuite

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def engine() -> Path:
    """Engine directory of the small CPU model."""
    if not (ENGINE / "contract.json").exists():
        pytest.fail(f"{ENGINE} is not there: run `make engine` first")
    return ENGINE


@pytest.fixture(scope="session")
def suite(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    """A suite that stays up over all tests that ask for it."""
    with up(tmp_path_factory.mktemp("logs"), [engine]) as running:
        yield running
