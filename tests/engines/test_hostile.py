# SPDX-License-Identifier: Apache-2.0
"""Documents and files by somebody who means harm, or by a disk that lies: typed errors, no crash, nothing published."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from engines import evidence, gguf_model, inspect, publish
from engines.simulated import write_simulated_engine
from services.common.contract import Contract, all_findings, read
from services.common.errors import FabricError, FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    directory = tmp_path / "engine"
    write_simulated_engine(directory)
    return directory


def text(engine: Path) -> str:
    return (engine / "contract.json").read_text()


def nested(engine: Path) -> str:
    return text(engine).replace('"beams"', '"deep": ' + "[" * 100_000 + "]" * 100_000 + ', "beams"', 1)


def nested_objects(_engine: Path) -> str:
    return '{"a":' * 50_000 + "1" + "}" * 50_000


def huge_number(engine: Path) -> str:
    document = json.loads(text(engine))
    document["limits"]["slots"] = 0
    return json.dumps(document).replace('"slots": 0', '"slots": ' + "9" * 100_000, 1)


def beyond_a_double(engine: Path) -> str:
    return text(engine).replace('"beams": 1', '"beams": 1e999', 1)


def not_a_number(engine: Path) -> str:
    return text(engine).replace('"beams": 1', '"beams": NaN', 1)


def whole_number_with_fraction(engine: Path) -> str:
    return text(engine).replace('"beams": 1', '"beams": 1.0', 1)


def truth_for_a_number(engine: Path) -> str:
    return text(engine).replace('"beams": 1', '"beams": true', 1)


def null_for_an_object(engine: Path) -> str:
    return json.dumps(json.loads(text(engine)) | {"limits": None})


def list_for_an_object(engine: Path) -> str:
    return json.dumps(json.loads(text(engine)) | {"limits": [{}]})


def key_given_twice(engine: Path) -> str:
    return text(engine).replace('"beams": 1', '"beams": 1, "beams": 2', 1)


def no_utf8(engine: Path) -> bytes:
    return text(engine).encode().replace(b"simulated-test", b"simulated-\xff\xfe", 1)


def half_a_character(engine: Path) -> str:
    return text(engine).replace("simulated-test", "simulated-\\ud800", 1)


def too_long(engine: Path) -> str:
    return text(engine) + " " * (1 << 20)


def cut_off(engine: Path) -> str:
    return text(engine)[: len(text(engine)) // 2]


def path_of_a_file(path: str) -> Callable[[Path], str]:
    def spoil(engine: Path) -> str:
        document = json.loads(text(engine))
        document["files"][0]["path"] = path
        return json.dumps(document)

    spoil.__name__ = f"path {path[:20]!r}"
    return spoil


PATHS = [
    "../engine/simulated.json",
    "/etc/passwd",
    "a/../../b",
    "",
    ".",
    "a//b",
    "a\\b",
    ".hidden",
    "-rf",
    "a\x00b",
    "x" * 300,
]
DOCUMENTS: list[Callable[[Path], Any]] = [
    nested, nested_objects, huge_number, beyond_a_double, not_a_number, whole_number_with_fraction, truth_for_a_number,
    null_for_an_object, list_for_an_object, key_given_twice, no_utf8, half_a_character, too_long, cut_off,
    *(path_of_a_file(path) for path in PATHS),
]  # fmt: skip


@pytest.mark.parametrize("spoil", DOCUMENTS, ids=lambda spoil: spoil.__name__)
def test_a_hostile_contract_is_findings_and_never_an_engine(engine: Path, spoil: Callable[[Path], Any]) -> None:
    spoilt = spoil(engine)
    (engine / "contract.json").write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    findings = inspect.verify(engine)
    assert findings
    assert all(len(str(finding)) < 600 for finding in findings), "a finding quotes no document"
    proto, reading = read(engine)
    assert all_findings(proto, reading)
    with pytest.raises(FailedPreconditionError):
        inspect.describe(engine)
    with pytest.raises(FailedPreconditionError):
        evidence.write(engine, kind="audit", outcome="holds", summary="fine", command="true")
    if not reading:
        with pytest.raises(InvalidArgumentError):
            Contract.from_proto(proto)


def linked_out(engine: Path) -> None:
    outside = engine.with_name("outside.json")
    (engine / "simulated.json").rename(outside)
    (engine / "simulated.json").symlink_to(outside)


def contract_linked_out(engine: Path) -> None:
    outside = engine.with_name("outside.json")
    (engine / "contract.json").rename(outside)
    (engine / "contract.json").symlink_to(outside)


def other_content(engine: Path) -> None:
    content = bytearray((engine / "tokenizer.json").read_bytes())
    content[-2] ^= 1
    (engine / "tokenizer.json").write_bytes(content)


def one_file_more(engine: Path) -> None:
    (engine / "plugin.so").write_bytes(b"\x7fELF")


def a_pipe(engine: Path) -> None:
    (engine / "tokenizer.json").unlink()
    os.mkfifo(engine / "tokenizer.json")


@pytest.mark.parametrize("spoil", [linked_out, contract_linked_out, other_content, one_file_more, a_pipe])
def test_a_directory_that_is_not_what_its_contract_says_is_no_engine(
    engine: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(engine)
    with pytest.raises(FabricError):
        inspect.describe(engine)


def test_a_build_that_would_publish_a_refused_contract_publishes_nothing(tmp_path: Path) -> None:
    def fill(part: Path) -> None:
        part.write_bytes(b"w")

    def refuse(_part: Path) -> None:
        raise FailedPreconditionError("contract.json would be refused")

    def build() -> None:
        with publish.workplace(tmp_path / "engine") as place:
            place.begin("inputs", 1)
            place.step("weights", fill)
            place.step("contract.json", refuse)
            place.publish(["weights", "contract.json"])

    with pytest.raises(FailedPreconditionError):
        build()
    assert not (tmp_path / "engine").exists()


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<end>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_tensor("token_embd.weight", np.ones((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_small_gguf_is_read(small_gguf: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(small_gguf)
    model = gguf_model.read(tmp_path / "whole.gguf")
    assert model.kv_width == 32
    assert model.vocabulary.merges == (("a", "b"),)


def test_a_gguf_that_is_cut_off_or_spoilt_anywhere_is_a_typed_error_or_a_model(
    small_gguf: bytes, tmp_path: Path
) -> None:
    rng = random.Random(20261129)
    path = tmp_path / "spoilt.gguf"
    outcomes = {"read": 0, "refused": 0}
    sentences: set[str] = set()
    ends = [0, 3, 4, 8, 23, 24, *(rng.randrange(len(small_gguf)) for _ in range(60))]
    spoilt = [small_gguf[:end] for end in ends]
    for _ in range(400):
        changed = bytearray(small_gguf)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed) - 1024)] = rng.randrange(256)
        spoilt.append(bytes(changed))
    for content in spoilt:
        path.write_bytes(content)
        try:
            gguf_model.read(path)
        except FabricError as error:
            outcomes["refused"] += 1
            sentences.add(error.message)
        else:
            outcomes["read"] += 1
    assert outcomes["refused"] > 150
    assert all(str(path) in sentence and len(sentence) < 500 for sentence in sentences)
    assert len(sentences) > 20
