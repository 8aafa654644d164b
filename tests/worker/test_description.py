# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engines.simulated import ABSENT, write_simulated_engine
from services.common import contract
from services.common.contract import Contract
from services.worker.card import Accelerator, accelerator_facts, card_facts, memory_bytes
from services.worker.credit import Amount
from services.worker.description import DirectoryReader, capacity, node_description, report_message, stats_message
from services.worker.native import Engine
from tests.worker.running import GENERATING, MINING

if TYPE_CHECKING:
    from pathlib import Path


def test_a_good_directory_has_no_findings_and_its_contracts_digest(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    reading = DirectoryReader(tmp_path).read()
    assert reading.findings == ()
    assert reading.engine_digest == contract.engine_digest(tmp_path)
    node = node_description(reading, node_id="n", incarnation="i", address="host:1")
    assert node.contract.limits.step_token_budget == 256
    assert (node.node_id, node.incarnation, node.address) == ("n", "i", "host:1")
    assert node.protocol_revision == 1
    assert node.suite_version


def test_what_the_contract_leaves_out_is_absent_and_never_zero(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING, contract_changes={"limits.step_token_budget": ABSENT})
    reading = DirectoryReader(tmp_path).read()
    assert not reading.contract.limits.HasField("step_token_budget")


def test_findings_of_the_library_and_of_the_digests_come_together(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING, contract_changes={"extra": 1})
    configuration = json.loads((tmp_path / "simulated.json").read_text())
    configuration["slots"] += 1
    text = json.dumps(configuration)
    (tmp_path / "simulated.json").write_text(text)
    reading = DirectoryReader(tmp_path).read()
    paths = {finding.path for finding in reading.findings}
    assert "extra" in paths
    assert {"files[0].size_bytes", "files[0].sha256"} & paths


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_a_contract_that_cannot_be_read_is_a_finding_and_no_error(tmp_path: Path, content: str | None) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    (tmp_path / "contract.json").unlink()
    if content is not None:
        (tmp_path / "contract.json").write_text(content)
    reading = DirectoryReader(tmp_path).read()
    assert reading.findings
    assert reading.contract == type(reading.contract)()


def test_a_directory_is_read_again_only_once_something_in_it_has_changed(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    reader = DirectoryReader(tmp_path)
    first = reader.read()
    assert reader.read() is first
    stamp = (tmp_path / "tokenizer.json").stat()
    os.utime(tmp_path / "tokenizer.json", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    again = reader.read()
    assert again is not first
    assert again == first
    (tmp_path / "more").write_text("x")
    assert any("more" in finding.found for finding in reader.read().findings)
    (tmp_path / "more").unlink()
    assert reader.read().findings == ()


def test_what_the_loaded_engine_says_agrees_with_its_contract(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    reading = DirectoryReader(tmp_path).read()
    with Engine.create(tmp_path) as engine:
        report = report_message(engine.describe())
        stats = stats_message(engine.stats())
    assert report.engine_digest == reading.engine_digest
    assert report.limits == reading.contract.limits
    assert report.capabilities == reading.contract.capabilities
    assert stats.kv_blocks_total == 128


def test_real_numbers_and_what_does_not_apply_survive_the_way_to_the_wire(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING)
    with Engine.create(tmp_path) as engine:
        described = engine.describe()
    limits = {**described.limits, "kv_cache_memory_fraction": 0.875, "kv_block_tokens": "not_applicable"}
    report = report_message(replace(described, limits=limits))
    assert report.limits.kv_cache_memory_fraction.value == 0.875
    assert report.limits.kv_block_tokens.not_applicable


def test_capacity_is_the_engines_own(tmp_path: Path) -> None:
    for name, kind in (("generating", GENERATING), ("mining", MINING)):
        write_simulated_engine(tmp_path / name, **kind)
        agreed = Contract.from_proto(DirectoryReader(tmp_path / name).read().contract)
        with Engine.create(tmp_path / name) as engine:
            made = capacity(agreed, engine.describe())
        assert made.slots == 8
        assert made.pool_tokens == (128 * 16 if name == "generating" else None)
        assert made.largest_item == (Amount(192 + 4 * 64, 4, 0) if name == "generating" else Amount(128, 1, 256))


def test_a_machine_without_accelerator_is_one_cpu_card(tmp_path: Path) -> None:
    card = card_facts("cpu")
    assert (card.family, card.count) == ("cpu", 1)
    assert card.compute_capability.not_applicable
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < card.memory_bytes <= machine


def test_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    limit, unlimited = tmp_path / "limit", tmp_path / "unlimited"
    limit.write_text("12345678\n")
    unlimited.write_text("max\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes((limit, tmp_path / "missing")) == 12345678
    assert memory_bytes((unlimited, tmp_path / "missing")) == machine


def test_accelerators_are_named_as_contracts_name_them() -> None:
    h200 = Accelerator("NVIDIA H200", "9.0", 150_000_000_000)
    smaller = Accelerator("NVIDIA H200", "9.0", 149_000_000_000)
    other = Accelerator("NVIDIA GeForce RTX 5090", "12.0", 32_000_000_000)
    facts = accelerator_facts([h200, smaller])
    assert (facts.family, facts.compute_capability.value) == ("nvidia-h200", "9.0")
    assert (facts.count, facts.memory_bytes) == (2, 149_000_000_000)
    assert accelerator_facts([other]).family == "nvidia-geforce-rtx-5090"
    assert accelerator_facts([h200, other]).count == 1
