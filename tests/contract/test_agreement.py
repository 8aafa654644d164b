# SPDX-License-Identifier: Apache-2.0
"""The library and the services read documents with the same rules, to the last finding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from services.common import contract, schema
from services.common.schema import nodes
from tests.contract import documents, mutations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from services.common.schema import Finding

    NativeCheck = Callable[[Iterable[tuple[str, bytes]]], list[Any]]

SEED = 20261129


def comparable(findings: list[Finding]) -> list[tuple[str, ...]]:
    """Findings as both sides must give them.

    Where a document cannot be read at all, the parsers need not stop at the same byte: only the path counts.
    """
    return [(f.path, f.found, f.expected) if f.path else ("",) for f in findings]


def assert_agreement(native_check: NativeCheck, name: str, texts: dict[str, bytes]) -> dict[str, list[Finding]]:
    ours = {label: schema.check_text(name, text)[1] for label, text in texts.items()}
    for label, theirs in zip(texts, native_check((name, text) for text in texts.values()), strict=True):
        assert comparable(ours[label]) == comparable(theirs), (label, texts[label][:2000])
    return ours


def test_mutated_contracts_get_the_same_findings(native_check: NativeCheck) -> None:
    texts = dict(mutations.mutated(documents.all_good(), SEED, each=60))
    assert len(texts) >= 500
    findings = assert_agreement(native_check, "contract", texts)
    refused = {label.split()[0] for label, found in findings.items() if found}
    assert refused == {kind.__name__ for kind in mutations.KINDS}, "a kind of mutation breaks nothing"
    assert sum(bool(found) for found in findings.values()) > len(texts) * 0.8
    paths = {finding.path for found in findings.values() for finding in found}
    assert {"", "limits.step_token_budget", "card.count", "files[0].path", "capabilities.payload"} <= paths


@pytest.mark.parametrize("name", schema.names())
def test_mutated_documents_of_every_schema_get_the_same_findings(native_check: NativeCheck, name: str) -> None:
    sample = example(schema.named(name).root)
    assert_agreement(native_check, name, dict(mutations.mutated([sample], SEED + 1, each=10)))


def test_good_contracts_have_no_findings(native_check: NativeCheck) -> None:
    texts = {good["engine_id"] + str(i): json.dumps(good).encode() for i, good in enumerate(documents.all_good())}
    assert assert_agreement(native_check, "contract", texts) == {label: [] for label in texts}


def test_directories_get_the_same_findings(native_check: NativeCheck, tmp_path: Path) -> None:
    directories = []
    for number, spoil in enumerate(SPOILS):
        directories.append(documents.write_engine_directory(tmp_path / str(number)))
        spoil(directories[-1])
    theirs = native_check(("directory", str(directory).encode()) for directory in directories)
    for spoil, directory, found in zip(SPOILS, directories, theirs, strict=True):
        ours = contract.all_findings(*contract.read(directory))
        # In Python what the wire form can carry comes last, since it is found there.
        assert sorted(map(str, ours)) == sorted(map(str, found)), spoil
        assert bool(found) == (spoil is not nothing), spoil


def nothing(_directory: Path) -> None:
    pass


def missing(directory: Path) -> None:
    (directory / "engine.json").unlink()


def longer(directory: Path) -> None:
    (directory / "engine.json").write_bytes(b"longer than the contract says")


def unlisted(directory: Path) -> None:
    (directory / "weights" / "part-2.bin").write_bytes(b"x")
    (directory / ".hidden").write_bytes(b"x")


def linked_out(directory: Path) -> None:
    outside = directory.parent / f"{directory.name}-outside"
    outside.write_bytes(documents.FILES["engine.json"])
    (directory / "engine.json").unlink()
    (directory / "engine.json").symlink_to(outside)


def linked_nowhere(directory: Path) -> None:
    (directory / "stray").symlink_to("nowhere")


def linked_folder(directory: Path) -> None:
    (directory / "again").symlink_to("weights")


def linked_out_by_two_steps(directory: Path) -> None:
    (directory / "up").symlink_to("..")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to("up/tokenizer-elsewhere.json")
    (directory.parent / "tokenizer-elsewhere.json").write_bytes(documents.FILES["tokenizer.json"])


def folder_for_file(directory: Path) -> None:
    (directory / "engine.json").unlink()
    (directory / "engine.json").mkdir()


def broken_and_incomplete(directory: Path) -> None:
    broken = documents.changed(documents.generation(), "limits.slots", 0)
    del broken["limits"]["step_token_budget"]
    broken["files"][0] = {"path": "../engine.json", "size_bytes": 3, "sha256": "0" * 64}
    (directory / "contract.json").write_text(json.dumps(broken))


SPOILS = [
    nothing, missing, longer, unlisted, linked_out, linked_nowhere, linked_folder, linked_out_by_two_steps,
    folder_for_file, broken_and_incomplete,
]  # fmt: skip


def test_a_link_inside_of_the_directory_is_a_file_like_any_other(native_check: NativeCheck, tmp_path: Path) -> None:
    directory = documents.write_engine_directory(tmp_path / "engine")
    data = documents.FILES["tokenizer.json"]
    (directory / "tokenizer.json").rename(directory / "data")
    (directory / "tokenizer.json").symlink_to("data")
    listing = documents.generation()
    listing["files"].append({"path": "data", "size_bytes": len(data), "sha256": listing["files"][2]["sha256"]})
    (directory / "contract.json").write_text(json.dumps(listing))
    assert native_check([("directory", str(directory).encode())]) == [[]]
    assert contract.read(directory)[1] == []


TEXTS = ["a", "9.0", "0" * 64, "a=b", "2026-11-29", "model.gguf", "lib.so", "1", "2026-11-29T12:00:00Z"]


def example(node: nodes.Node) -> Any:
    """A document in which every field fits by itself, whatever the rules between fields say."""
    match node:
        case nodes.ObjectNode():
            return {key: example(inner) for key, inner in node.properties.items()}
        case nodes.ListNode():
            return [example(node.items)] * max(1, node.min_items)
        case nodes.TextNode():
            return node.words[0] if node.words else next(text for text in TEXTS if node.fits(text))
        case nodes.IntegerNode():
            return node.minimum
        case nodes.RealNode():
            return node.maximum
        case _:
            return True
