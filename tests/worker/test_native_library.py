# SPDX-License-Identifier: Apache-2.0
"""Loading the library: what is not the library, or not this worker's, is refused in one clear sentence."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from services.common.errors import FailedPreconditionError
from services.worker.native import LIBRARY_VARIABLE, Stats, _layout, library_path
from services.worker.native._layout import ABI_MAJOR, ABI_MINOR, REQUEST, STATS_COUNTERS, STRUCT_SIZES
from services.worker.native._library import _FUNCTIONS, load

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = Path(__file__).resolve().parents[2] / "native" / "include" / "ifab" / "engine.h"


def build(directory: Path, source: str) -> Path:
    """Compiles a small library."""
    (directory / "library.c").write_text(source)
    path = directory / "library.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, directory / "library.c"], check=True)
    return path


def speaking(major: int, minor: int, sizes: dict[int, int]) -> str:
    cases = "".join(f"case {which}: return {size};" for which, size in sizes.items())
    return f"""
        #include <stddef.h>
        #include <stdint.h>
        void ifab_abi_version(uint32_t *major, uint32_t *minor) {{ *major = {major}; *minor = {minor}; }}
        size_t ifab_struct_size(int32_t which) {{ switch (which) {{ {cases} }} return 0; }}
    """


SIZES = dict(STRUCT_SIZES.values())


def test_a_missing_library_says_where_it_was_looked_for_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"nowhere\.so: build it with `make native`"):
        load(tmp_path / "nowhere.so")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("hello")
    with pytest.raises(FailedPreconditionError, match="cannot be loaded"):
        load(tmp_path / "text.so")


@pytest.mark.parametrize("version", [(ABI_MAJOR + 1, 0), (ABI_MAJOR - 1, 9)])
def test_another_version_is_refused_with_both_numbers(tmp_path: Path, version: tuple[int, int]) -> None:
    path = build(tmp_path, speaking(*version, SIZES))
    with pytest.raises(FailedPreconditionError, match=rf"{version[0]}\.{version[1]}.*needs {ABI_MAJOR}\.{ABI_MINOR}"):
        load(path)


def test_a_struct_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    which, size = STRUCT_SIZES["ifab_event_t"]
    path = build(tmp_path, speaking(ABI_MAJOR, ABI_MINOR, {**SIZES, which: size + 8}))
    with pytest.raises(
        FailedPreconditionError, match=f"ifab_event_t has {size + 8} bytes .* and {size} in this worker"
    ):
        load(path)


def test_a_library_without_our_functions_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path, speaking(ABI_MAJOR, ABI_MINOR, SIZES))
    with pytest.raises(FailedPreconditionError, match="is not the native library"):
        load(path)


def test_the_environment_names_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "/elsewhere/engine.so")
    assert library_path() == Path("/elsewhere/engine.so")
    monkeypatch.setenv(LIBRARY_VARIABLE, "")
    assert library_path().parts[-3:] == ("build", "native", "libifab_engine.so")


def test_the_layout_is_the_headers_field_by_field(tmp_path: Path) -> None:
    """A size alone would not notice two fields that changed places."""
    fields: Mapping[str, Any] = REQUEST.fields or {}
    offsets = {f"ifab_request_t, {name}": offset for name, (_, offset, *_rest) in fields.items()}
    for name, (_, offset, *_rest) in (fields["sampling"][0].fields or {}).items():
        offsets[f"ifab_sampling_t, {name}"] = offset
    for name, (_, offset, *_rest) in (_layout.EVENT.fields or {}).items():
        offsets[f"ifab_event_t, {name}"] = offset
    for name, (_, offset, *_rest) in (_layout.SUBMIT_RESULT.fields or {}).items():
        offsets[f"ifab_submit_result_t, {name}"] = offset
    for name, *_type in _layout.PollBuffersStruct._fields_:
        offsets[f"ifab_poll_buffers_t, {name}"] = getattr(_layout.PollBuffersStruct, name).offset
    for index, name in enumerate(STATS_COUNTERS):
        offsets[f"ifab_stats_t, {name}"] = _layout.StatsStruct.counters.offset + 8 * index
    for name in ("step_us", "step_fill"):
        offsets[f"ifab_stats_t, {name}"] = getattr(_layout.StatsStruct, name).offset
    checks = "\n".join(
        f'_Static_assert(offsetof({field}) == {offset}, "{field}");' for field, offset in offsets.items()
    )
    source = tmp_path / "layout.c"
    source.write_text(f'#include "{HEADER}"\n{checks}\n')
    outcome = subprocess.run(["cc", "-std=c11", "-fsyntax-only", source], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_every_function_of_the_header_is_declared() -> None:
    declared = set(re.findall(r"^IFAB_API [^;]*?\b(ifab_\w+)\(", HEADER.read_text(), re.MULTILINE))
    asked_first = {"ifab_abi_version", "ifab_struct_size"}
    assert declared == {*_FUNCTIONS, *asked_first}


def test_statistics_have_a_field_for_every_counter() -> None:
    names = tuple(field.name for field in dataclasses.fields(Stats))
    assert names == (*STATS_COUNTERS, "step_us", "step_fill")


def test_records_have_no_hidden_padding() -> None:
    assert REQUEST.itemsize == sum(np.dtype(kind).itemsize for kind, *_ in (REQUEST.fields or {}).values())
