# SPDX-License-Identifier: Apache-2.0
"""Cordoned nodes outlive the process that was told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.broker.operators.cordons import Cordons
from services.common.errors import InternalError, StartError

if TYPE_CHECKING:
    from pathlib import Path


def test_they_are_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "cordons.json"
    cordons = Cordons(path)
    assert cordons.nodes == frozenset()
    for node in ("a", "b", "c"):
        cordons.put(node, True)
    cordons.put("b", False)
    cordons.put("a", True)
    assert Cordons(path).nodes == cordons.nodes == {"a", "c"}
    assert [file.name for file in tmp_path.iterdir()] == ["cordons.json"]


def test_without_a_file_they_last_as_long_as_the_process() -> None:
    cordons = Cordons(None)
    cordons.put("a", True)
    assert cordons.nodes == {"a"}
    assert Cordons(None).nodes == frozenset()


@pytest.mark.parametrize("text", ["", "[]", '{"cordoned": "a"}', '{"cordoned": [1]}', '{"nodes": []}', "\xff"])
def test_a_file_that_holds_something_else_stops_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cordons.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(StartError, match=r"cordons\.json"):
        Cordons(path)


def test_what_cannot_be_kept_is_not_in_force(tmp_path: Path) -> None:
    cordons = Cordons(tmp_path / "absent" / "cordons.json")
    with pytest.raises(InternalError, match="cannot be kept: No such file"):
        cordons.put("a", True)
    assert cordons.nodes == frozenset()
