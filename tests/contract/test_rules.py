# SPDX-License-Identifier: Apache-2.0
"""What the rules of contracts refuse, one planted flaw at a time, and how they say it."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from services.common import schema
from tests.contract import documents
from tests.contract.documents import changed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BASES: dict[str, Callable[[], documents.Plain]] = {
    "generation": documents.generation,
    "hidden": documents.hidden_states,
    "set": documents.card_set,
    "fraction": documents.with_cache_fraction,
}
NA = "not_applicable"

# (contract to start from, field, value) -> (path of the finding, what it says)
FLAWS: list[tuple[str, str, Any, str, str]] = [
    ("generation", "contract_version", 2, "contract_version", "2, expected integer 1"),
    ("generation", "engine_id", "Upper", "engine_id", '"Upper", expected name of 1 to 128 lower-case letters'),
    ("generation", "files", [], "files", "list of 0 items, expected list of 1 to 1024 items"),
    (
        "generation",
        "tokenizer.file",
        "other.json",
        "tokenizer.file",
        '"other.json", expected one of the paths in files',
    ),
    ("generation", "tokenizer.end_token_ids", [49152], "tokenizer.end_token_ids[0]", "below model.vocab_size, 49152"),
    ("generation", "tokenizer.end_token_ids", [2, 3, 2], "tokenizer.end_token_ids[2]", "2, expected no item twice"),
    ("generation", "tokenizer.end_token_ids", [], "tokenizer.end_token_ids", "at least one id, since"),
    ("hidden", "tokenizer.end_token_ids", [2], "tokenizer.end_token_ids", "list of 1 item, expected no id, since"),
    ("generation", "card.count", 2, "card.count", "2, expected card.tensor_parallel times card.pipeline_parallel, 1"),
    ("set", "card.pipeline_parallel", 33, "card.pipeline_parallel", "33, expected at most model.layers, 32"),
    ("generation", "card.compute_capability", "9.0", "card.compute_capability", 'since card.family is "cpu"'),
    ("set", "card.compute_capability", NA, "card.compute_capability", 'since card.family is not "cpu"'),
    ("generation", "limits.max_input_tokens", 1281, "limits.max_input_tokens", "limits.max_sequence_tokens, 1280"),
    ("generation", "limits.max_output_tokens", 1281, "limits.max_output_tokens", "limits.max_sequence_tokens, 1280"),
    ("generation", "limits.step_token_budget", 0, "limits.step_token_budget", "0, expected integer from 1 to 16777216"),
    ("generation", "limits.step_token_budget", 513, "limits.step_token_budget", "limits.built_step_token_budget, 512"),
    ("generation", "limits.slots", 513, "limits.slots", "513, expected at most limits.step_token_budget, 512"),
    ("generation", "limits.kv_block_tokens", NA, "limits.kv_block_tokens", "says that there is a cache"),
    ("set", "limits.kv_block_tokens", 64, "limits.kv_block_tokens", "says that there is no cache"),
    ("set", "limits.kv_cache_memory_fraction", 0.9, "limits.kv_cache_memory_fraction", "says that there is no cache"),
    ("set", "limits.host_cache_bytes", 1, "limits.host_cache_bytes", "1, expected 0, since"),
    (
        "fraction",
        "limits.kv_cache_memory_fraction",
        0,
        "limits.kv_cache_memory_fraction",
        "number above 0 and at most 1",
    ),
    ("fraction", "limits.kv_cache_memory_fraction", 1.01, "limits.kv_cache_memory_fraction", "1.01, expected"),
    ("generation", "limits.longest_step_ms", True, "limits.longest_step_ms", "true, expected integer from 1"),
    (
        "generation",
        "capabilities.guided_decoding",
        ["sql"],
        "capabilities.guided_decoding[0]",
        '"sql", expected one of',
    ),
    ("hidden", "capabilities.guided_decoding", ["regex"], "capabilities.guided_decoding", "expected none, since"),
    ("hidden", "capabilities.payload", NA, "capabilities.payload", "nothing else would come back"),
    (
        "hidden",
        "capabilities.payload.layers",
        [30],
        "capabilities.payload.layers[0]",
        "30, expected below model.layers",
    ),
    ("hidden", "capabilities.payload.shape", [575], "capabilities.payload.shape[0]", "575, expected model.hidden_size"),
    ("hidden", "capabilities.payload.shape", [1, 576], "capabilities.payload.shape", "expected one extent, since"),
    ("set", "capabilities.payload.shape", [4096], "capabilities.payload.shape", "expected two extents, since"),
    ("set", "capabilities.payload.shape", [3, 4096], "capabilities.payload.shape[0]", "3, expected number of"),
    ("generation", "build.date", "2026-02-29", "build.date", '"2026-02-29", expected date as YYYY-MM-DD'),
    ("generation", "build.flags", ["fp8"], "build.flags[0]", '"fp8", expected setting as name=value'),
    ("generation", "build.calibration", "", "build.calibration", '"", expected "not_applicable" or text of 1 to 128'),
    ("generation", "runtime.version", " 1", "runtime.version", "printable ASCII characters without spaces around"),
    ("generation", "model.weights_dtype", "Q8_0", "model.weights_dtype", '"Q8_0", expected word of 1 to 64'),
]


@pytest.mark.parametrize(("base", "field", "value", "path", "says"), FLAWS, ids=lambda part: str(part)[:40])
def test_a_flaw_is_one_finding_that_says_it(base: str, field: str, value: Any, path: str, says: str) -> None:
    found = findings(changed(BASES[base](), field, value))
    assert any(finding.path == path and says in str(finding) for finding in found), found


def test_every_rule_between_fields_is_shown_to_refuse() -> None:
    refused = {str(finding) for base, field, value, _, _ in FLAWS
               for finding in findings(changed(BASES[base](), field, value))}  # fmt: skip
    refused |= {str(finding) for finding in findings(file_listed_twice()) + findings(contract_listed())}
    for rule in schema.named("contract").rules:
        assert any(rule.expected.split("{right}")[0] in text for text in refused), rule.expected


def test_files_are_listed_once_and_without_the_contract() -> None:
    assert any(f.path == "files[3].path" and f.expected == "no path twice" for f in findings(file_listed_twice()))
    assert any(f.path == "files[3].path" and "cannot hold its own" in f.expected for f in findings(contract_listed()))


def test_every_field_is_required_and_named() -> None:
    whole = {finding.path for finding in findings({})}
    for base in BASES.values():
        good = base()
        for path in field_paths(good):
            broken = copy.deepcopy(good)
            *parents, last = path.split(".")
            target = broken
            for parent in parents:
                target = target[parent]
            del target[last]
            absent = {f.path for f in findings(broken) if f.found == "absent"}
            assert absent == {name for name in whole if name == path or name.startswith(f"{path}.")} or absent == {path}
            assert absent, path


def test_a_missing_group_names_each_of_its_fields() -> None:
    contract = documents.generation()
    del contract["limits"]
    names = [f.path for f in findings(contract) if f.found == "absent"]
    assert names == [f"limits.{name}" for name in documents.generation()["limits"]]


def test_findings_of_one_document_are_bounded() -> None:
    contract = documents.generation() | {f"extra_{number}": number for number in range(1000)}
    found = findings(contract)
    assert len(found) == schema.document.MAX_FINDINGS + 1
    assert str(found[-1]) == "more findings than 200, expected none"


@pytest.mark.parametrize(
    ("path", "fine"),
    [("a", True), ("a/b-1/c.d_e", True), ("A.B", True), ("../a", False), ("a/../b", False), ("/a", False),
     ("a//b", False), ("a/", False), (".a", False), ("a/.b", False), ("a\\b", False), ("a b", False), ("", False),
     ("a\n", False), ("-a", False), ("é", False), ("a" * 255, True), ("a" * 256, False)],
)  # fmt: skip
def test_paths_stay_inside_of_the_directory(path: str, fine: bool) -> None:
    contract = documents.generation()
    contract["files"][0]["path"] = path
    assert ("files[0].path" not in {finding.path for finding in findings(contract)}) == fine


def test_values_are_shown_short_and_in_ascii() -> None:
    contract = changed(documents.generation(), "engine_id", "é😀" + "x" * 1000)
    contract["card"]["count"] = 10**60
    shown = {finding.path: finding.found for finding in findings(contract)}
    assert shown["engine_id"] == '"\\u00e9\\ud83d\\ude00' + "x" * 38 + '..."'
    assert shown["card.count"] == "1" + "0" * 39 + "..."


def findings(contract: documents.Plain) -> list[schema.Finding]:
    return schema.check_text("contract", json.dumps(contract).encode())[1]


def file_listed_twice() -> documents.Plain:
    contract = documents.generation()
    contract["files"].append(contract["files"][0])
    return contract


def contract_listed() -> documents.Plain:
    contract = documents.generation()
    contract["files"].append(contract["files"][0] | {"path": "contract.json"})
    return contract


def field_paths(document: Any, at: str = "") -> Iterator[str]:
    for key, value in document.items():
        yield f"{at}{key}"
        if isinstance(value, dict):
            yield from field_paths(value, f"{at}{key}.")
