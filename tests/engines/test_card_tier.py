# SPDX-License-Identifier: Apache-2.0
"""Tiers for cards: read strictly, all from one checkpoint, and the table of tiers says what their files say."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from engines import card_tier
from services.common.errors import FailedPreconditionError, NotFoundError

TEXT = (files("engines.tiers") / "hopper-141gb.toml").read_text()


def test_there_is_a_tier_for_every_card_and_kind_of_work() -> None:
    assert card_tier.card_sets() == (
        "ada-24gb",
        "blackwell-16gb",
        "blackwell-16gb-half",
        "blackwell-32gb",
        "blackwell-32gb-pair",
        "hopper-141gb",
        "hopper-80gb",
    )
    assert len(card_tier.names()) == 21


@pytest.mark.parametrize("card", card_tier.card_sets())
def test_every_card_has_its_three_tiers(card: str) -> None:
    generate, long, mining = (card_tier.load(f"{card}-{work}") for work in card_tier.WORKLOADS)
    assert (generate.generation.max_input_tokens, generate.generation.max_output_tokens) == (1024, 128)
    assert long.generation.max_input_tokens == 3840
    assert long.generation.kv_block_tokens > generate.generation.kv_block_tokens
    assert mining.mining.row_tokens == 128
    for tier in (generate, long):
        assert (tier.generation.weights, tier.generation.cache) == ("fp8", "fp8"), "one checkpoint for all"
    with pytest.raises(FailedPreconditionError, match="is no mining tier"):
        _ = long.mining
    with pytest.raises(FailedPreconditionError, match="generates nothing"):
        _ = mining.generation


def test_the_halved_variant_halves_the_budget_and_leaves_the_rest_free() -> None:
    for work in ("generate", "long"):
        whole, half = (card_tier.load(f"{card}-{work}") for card in ("blackwell-16gb", "blackwell-16gb-half"))
        assert half.generation.step_token_budget * 2 == whole.generation.step_token_budget
        assert half.card.reserved_mib > whole.card.reserved_mib
        assert half.card.memory_mib == whole.card.memory_mib


def test_the_table_of_tiers_says_what_the_files_say() -> None:
    text = (files("engines.tiers") / "README.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \| (.+?) \| (\d+) x (\S+) MiB \| (\S+) \| (\S+) \| (\S+) \|", text, re.MULTILINE)
    assert [row[0] for row in rows] == list(card_tier.card_sets())
    for name, title, count, memory, generate, long, mining in rows:
        tiers = card_tier.parse(name, (files("engines.tiers") / f"{name}.toml").read_text())
        assert title == tiers.title
        assert [int(count), number(memory)] == [tiers.card.count, tiers.card.memory_mib]
        budgets = [each.step_token_budget for each in (tiers.generate, tiers.long, tiers.mining)]
        assert [number(generate), number(long), number(mining)] == budgets


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory_mib         = 0", "card.memory_mib is 0, expected 1 or more"),
        ("reserved_mib       = 143771", "card.reserved_mib is 143771, expected less than memory_mib, 143771"),
        ("count              = 2", "card.count is 2, expected tensor_parallel times pipeline_parallel"),
        ("count              = true", "card.count is True, expected int"),
        ("kv_block_tokens    = 48", "generate.kv_block_tokens is 48, expected a power of two"),
        ('cache              = "float16"', "generate.cache is 'float16', expected one of fp8"),
        ("resident_heads     = -1", "generate.resident_heads is -1, expected 0 or more"),
        ("slots              = 7", "card.slots is unknown"),
    ],
)
def test_what_a_tier_cannot_be_is_named(line: str, says: str) -> None:
    key = line.split("=")[0].strip()
    pattern = re.compile(rf"^{key} +=.*$", re.MULTILINE)
    text = (
        pattern.sub(line, TEXT, count=1) if pattern.search(TEXT) else TEXT.replace("[generate]", f"{line}\n[generate]")
    )
    with pytest.raises(FailedPreconditionError, match=re.escape(says)):
        card_tier.parse("planted", text)


def test_all_that_is_wrong_is_said_at_once() -> None:
    text = TEXT.replace("[long]", "[lang]").replace("row_tokens         = 128", "row_tokens = 100")
    with pytest.raises(FailedPreconditionError, match="lang is unknown; long is missing"):
        card_tier.parse("planted", text)
    with pytest.raises(
        FailedPreconditionError, match=r"mining.step_token_budget is 8192, expected a multiple of .* 100"
    ):
        card_tier.parse("planted", TEXT.replace("row_tokens         = 128", "row_tokens = 100"))


def test_a_tier_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(NotFoundError, match="tier cpu-generate is no card's: `ifab engine build` makes it"):
        card_tier.load("cpu-generate")
    with pytest.raises(NotFoundError, match="there is no tier b200-generate; there are ada-24gb-generate, "):
        card_tier.load("b200-generate")
