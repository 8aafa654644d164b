# SPDX-License-Identifier: Apache-2.0
"""Errors: there and back, nothing leaked, nothing too long, and a catalogue that agrees with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from services.common import errors, reasons
from services.common.errors import FabricError, InternalError, InvalidArgumentError, Violation, from_status, to_status

ROOT = Path(__file__).resolve().parents[2]
KINDS = FabricError.__subclasses__()
REASONS = {key: value for key, value in vars(reasons).items() if key.isupper()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_survives_the_wire(kind: type[FabricError]) -> None:
    sent = kind(
        "it happened",
        reason="SOME_REASON",
        metadata={"limit": "3"},
        violations=(Violation("a[0].b", "is 4"),),
        retry_after_s=0.25,
    )
    status = status_pb2.Status.FromString(to_status(sent).SerializeToString())
    came = from_status(status)
    assert type(came) is kind
    assert (came.message, came.reason, came.metadata) == ("it happened", "SOME_REASON", {"limit": "3"})
    assert (came.violations, came.retry_after_s) == (sent.violations, 0.25)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_and_a_reason_of_the_catalogue(kind: type[FabricError]) -> None:
    assert kind.code != code_pb2.UNKNOWN
    assert kind("x").reason in REASONS.values()
    assert kind.__name__ in (errors.__doc__ or "")


def test_a_foreign_error_says_nothing() -> None:
    status = to_status(ValueError("/secret/path"))
    assert (status.code, status.message) == (code_pb2.INTERNAL, "internal error")
    assert b"secret" not in status.SerializeToString()


def test_a_status_of_others_becomes_the_nearest_error() -> None:
    assert isinstance(from_status(status_pb2.Status(code=code_pb2.DATA_LOSS, message="x")), InternalError)
    with_unknown = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="x")
    with_unknown.details.add().Pack(error_details_pb2.Help())
    assert isinstance(from_status(with_unknown), InvalidArgumentError)


def test_many_violations_are_cut_where_trailers_end() -> None:
    violations = [Violation(f"f[{i}]", "d" * 100) for i in range(1_000)]
    came = from_status(to_status(InvalidArgumentError.of(violations)))
    kept = len(came.violations) - 1
    assert 100 < kept < 1_000
    assert list(came.violations[:kept]) == violations[:kept]
    assert came.violations[kept].description == f"and {1_000 - kept} more violations"
    assert to_status(InvalidArgumentError.of(violations)).ByteSize() < 2 * errors.VIOLATION_BYTES_MAX
    assert len(to_status(InternalError("m" * 9_999)).message) == errors.MESSAGE_CHARACTERS_MAX + 1


def test_of_names_the_first_and_counts_the_rest() -> None:
    assert InvalidArgumentError.of([Violation("a", "is 1")]).message == "a: is 1"
    assert InvalidArgumentError.of([Violation("a", "is 1"), Violation("b", "is 2")]).message == "a: is 1 (and 1 more)"


def catalogue() -> dict[str, str]:
    """Reason to code, as docs/errors.md says."""
    found: dict[str, str] = {}
    code = ""
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        if heading := re.fullmatch(r"## `([A-Z_]+)`", line):
            code = heading[1]
        elif row := re.fullmatch(r"\| `([A-Z_]+)` \| (.+) \| (.+) \|", line):
            assert row[1] not in found, f"{row[1]} is there twice"
            found[row[1]] = code
    return found


def used() -> dict[str, set[str]]:
    """Reason to codes, as the services raise them: `SomeError(…, reason=reasons.X)` and the classes' own reasons."""
    codes = {kind.__name__: code_pb2.Code.Name(kind.code) for kind in KINDS}
    found: dict[str, set[str]] = {kind.default_reason: {codes[kind.__name__]} for kind in KINDS}
    for file in sorted((ROOT / "services").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in codes:
                continue
            for keyword in node.keywords:
                if keyword.arg != "reason":
                    continue
                assert isinstance(keyword.value, ast.Attribute), f"{file}:{node.lineno}: take reasons from reasons.py"
                found.setdefault(REASONS[keyword.value.attr], set()).add(codes[node.func.id])
    return found


def test_the_catalogue_lists_every_reason_once_and_no_other() -> None:
    assert set(catalogue()) == set(REASONS.values())
    assert all(key == value for key, value in REASONS.items())


def test_the_catalogue_names_the_code_that_a_reason_comes_with() -> None:
    listed = catalogue()
    for reason, codes in used().items():
        assert codes == {listed[reason]}, reason


def test_every_reason_is_used() -> None:
    sources = "\n".join(file.read_text() for file in (ROOT / "services").rglob("*.py") if file.name != "reasons.py")
    unused = {key for key in REASONS if not re.search(rf"\breasons\.{key}\b", sources)}
    assert unused == set()
