# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from ifabric.engine.v1 import contract_pb2
from services.common.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError
from services.worker.files import AT_ONCE_MAX, CHUNK_BYTES, EngineFiles

if TYPE_CHECKING:
    from pathlib import Path

    from ifabric.worker.v1 import worker_service_pb2 as wire


def contract_of(directory: Path, *names: str) -> contract_pb2.EngineContract:
    return contract_pb2.EngineContract(
        files=[
            contract_pb2.EngineFile(path=name, size_bytes=(directory / name).stat().st_size, sha256="0" * 64)
            for name in names
        ]
    )


async def fetch(directory: Path, contract: contract_pb2.EngineContract, path: str) -> list[wire.FetchFileResponse]:
    return [chunk async for chunk in EngineFiles(directory).send(contract, path)]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
async def test_a_file_arrives_whole_in_order(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "tokenizer.json").write_bytes(content)
    chunks = await fetch(tmp_path, contract_of(tmp_path, "tokenizer.json"), "tokenizer.json")
    joined = b"".join(chunk.data for chunk in chunks)
    assert hashlib.sha256(joined).digest() == hashlib.sha256(content).digest()
    assert [chunk.offset for chunk in chunks] == [CHUNK_BYTES * index for index in range(len(chunks))]
    assert {chunk.size_bytes for chunk in chunks} == {size}
    assert max(len(chunk.data) for chunk in chunks) <= CHUNK_BYTES


@pytest.mark.parametrize(
    "path", ["contract.json", "../secret", "/etc/hostname", "", "tokenizer.json/", "./tokenizer.json"]
)
async def test_what_the_contract_does_not_name_does_not_exist(tmp_path: Path, path: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "contract.json").write_text("{}")
    with pytest.raises(NotFoundError):
        await fetch(tmp_path, contract_of(tmp_path, "tokenizer.json"), path)


@pytest.mark.parametrize("path", ["link", "../outside", "folder/inside"])
async def test_nothing_outside_the_directory_is_read_even_if_the_contract_names_it(tmp_path: Path, path: str) -> None:
    inside = tmp_path / "engine"
    inside.mkdir()
    (tmp_path / "outside").write_text("secret")
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "folder").symlink_to(tmp_path)
    (tmp_path / "inside").write_text("secret")
    with pytest.raises(FailedPreconditionError, match="leads out"):
        await fetch(inside, contract_of(inside, path), path)


async def test_a_link_within_the_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("content")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "blob")
    (chunk,) = await fetch(tmp_path, contract_of(tmp_path, "tokenizer.json"), "tokenizer.json")
    assert chunk.data == b"content"


async def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    contract = contract_of(tmp_path, "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{ }")
    with pytest.raises(FailedPreconditionError, match="3 bytes, the contract says 2"):
        await fetch(tmp_path, contract, "tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FailedPreconditionError, match="No such file"):
        await fetch(tmp_path, contract, "tokenizer.json")


async def test_a_pipe_is_no_file_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FailedPreconditionError):
        await fetch(tmp_path, contract_of(tmp_path, "pipe"), "pipe")


async def test_files_at_once_are_bounded_and_room_comes_back(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(2 * CHUNK_BYTES))
    contract = contract_of(tmp_path, "big")
    files = EngineFiles(tmp_path)
    held = [files.send(contract, "big") for _ in range(AT_ONCE_MAX)]
    for one in held:
        await anext(one)
    with pytest.raises(ResourceExhaustedError) as caught:
        await anext(files.send(contract, "big"))
    assert caught.value.retry_after_s
    await held[0].aclose()
    late = files.send(contract, "big")
    assert (await anext(late)).offset == 0
    for one in (*held[1:], late):
        await one.aclose()
