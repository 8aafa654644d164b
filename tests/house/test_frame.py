# SPDX-License-Identifier: Apache-2.0
"""The form of benchmark reports: scripts read their last line."""

from __future__ import annotations

import json

import pytest

from benchmarks.frame import Report, repeat


def test_last_line_is_one_json_object_with_figures_spread_and_commit(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("example")
    report.figure("native_per_s", [100.0, 200.0, 400.0], unit="tok/s")
    report.figure("suite_per_s", [90.0, 190.0, 400.0], unit="tok/s")
    report.ratio("suite_over_native", of="suite_per_s", over="native_per_s", goal=">= 0.95")
    report.fact("rows", [{"workers": 4}])
    report.print()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["suite_over_native"] == 0.95
    assert document["spread"]["suite_over_native"] == [0.9, 1.0]
    assert document["rows"] == [{"workers": 4}]
    assert document["runs"]["native_per_s"] == 3
    assert len(document["commit"]) == 40 or document["commit"] == "unknown"
    assert document["machine"]["cores"] >= 1


def test_a_name_is_used_once_and_needs_values() -> None:
    report = Report("example")
    report.figure("a", [1.0], unit="")
    with pytest.raises(ValueError, match="name of its own"):
        report.fact("a", 1)
    with pytest.raises(ValueError, match="at least one value"):
        report.figure("b", [], unit="")


def test_repeat_drops_the_warm_up() -> None:
    values = iter([9.0, 1.0, 2.0])
    assert repeat(lambda: next(values), runs=2) == [1.0, 2.0]
