# SPDX-License-Identifier: Apache-2.0
"""A short soak, and the soak's own judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.soak import faults, soak

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"lost": 0, "doubled": 0, "wrong": 0, "broker_growth_mb": 1.0, "broker_descriptors_more": 2}


def test_a_good_run_has_no_faults() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("what", "figure"),
    [("lost", 1), ("doubled", 1), ("wrong", 1), ("broker_growth_mb", 500.0), ("broker_descriptors_more", 100)],
)
def test_a_run_that_lost_doubled_or_grew_is_found(what: str, figure: float) -> None:
    assert len(faults({**GOOD, what: figure})) == 1


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_nothing_is_lost_and_nothing_grows(tmp_path: Path) -> None:
    figures = await soak(tmp_path, requests=1_000_000, limit_s=40, seed=2)
    assert faults(figures) == [], figures
    assert figures["worker_deaths"] >= 2
    assert figures["outcomes"]["cancelled"] > 0
    assert figures["outcomes"]["INVALID_FIELDS"] > 0
