# SPDX-License-Identifier: Apache-2.0
"""Tiers are read strictly, and every one of them gives documents that the rules accept."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from engines import cpu, tier
from engines.llama_tool import ModelReport
from services.common import contract
from services.common.errors import FailedPreconditionError, NotFoundError

GENERATE = (files("engines.tiers") / "cpu-generate.toml").read_text()
MODEL = ModelReport(
    architecture="llama",
    layers=30,
    hidden_size=576,
    vocab_size=49152,
    weights_dtype="q8_0",
    weights_bytes=143_025_408,
    trained_context_tokens=8192,
    runtime_name="llama.cpp",
    runtime_version="0.3.36",
)
FILES = {name: cpu.FileFacts(1, "0" * 64) for name in cpu.FILES}


@pytest.mark.parametrize("name", tier.names())
def test_every_tier_gives_documents_without_findings(name: str) -> None:
    made = tier.load(name)
    configuration = json.loads(cpu.configuration(made))
    ends = [2] if made.weights.end_tokens else []
    text = cpu.contract(made, MODEL, FILES, end_token_ids=ends, kv_width=192, flags=["tier=x"])
    said = json.loads(text)
    assert said["engine_id"] == made.engine_id
    assert said["limits"]["slots"] == configuration["slots"]
    assert said["limits"]["step_token_budget"] == configuration["step_token_budget"]
    assert said["limits"]["max_sequence_tokens"] == configuration["sequence_tokens"]
    assert (said["limits"]["max_output_tokens"] == 0) == (said["capabilities"]["payload"] != "not_applicable")
    assert contract.from_document(said).engine_id == made.engine_id


def test_the_engine_of_hidden_states_takes_128_tokens_and_gives_one_state() -> None:
    made = tier.load("cpu-hidden")
    said = json.loads(cpu.contract(made, MODEL, FILES, end_token_ids=[], kv_width=192, flags=[]))
    assert said["limits"]["max_input_tokens"] == said["limits"]["max_sequence_tokens"] == 128
    assert said["capabilities"]["payload"] == {"shape": [576], "dtype": "float32", "layers": [-1]}
    assert json.loads(cpu.configuration(made))["payload"] == {"layers": [-1], "dtype": "float32"}


def test_the_table_of_tiers_says_what_the_files_say() -> None:
    rows = re.findall(r"^\| `(.*?)` \| \S+ \| (\S+) \| (\d+) \| (\d+) \| (\d+) \|", tier_readme(), re.MULTILINE)
    assert [row[0] for row in rows] == list(tier.names())
    for name, *said in rows:
        limits = tier.load(name).limits
        stated = [limits.max_input_tokens, limits.max_output_tokens, limits.slots, limits.step_token_budget]
        assert [int(number.replace(",", "")) for number in said] == stated


def test_all_that_is_wrong_with_a_tier_is_said_at_once() -> None:
    text = GENERATE.replace("slots              = 16 ", 'slots = "16"')
    text = text.replace("scoring            = true", "scorning = true")
    text = text.replace("end_tokens         = [", "end_tokens = [7, ")
    with pytest.raises(FailedPreconditionError) as raised:
        tier.parse("planted", text)
    assert raised.value.message == (
        "tier planted: limits.slots is '16', expected int; weights.end_tokens[0] is 7, expected str; "
        "capabilities.scorning is unknown; capabilities.scoring is missing"
    )


@pytest.mark.parametrize("text", ["a = ", "", "card = 1", "[limits]\nslots = true\n"])
def test_a_tier_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(FailedPreconditionError, match="tier planted: "):
        tier.parse("planted", text)


def test_a_tier_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(NotFoundError, match="there is no tier b200; there are cpu-generate, cpu-hidden"):
        tier.load("b200")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("step_token_budget  = 64", "step_token_budget: 64, expected integer from 65"),
        ("slots              = 500", "slots: 500, expected integer from 1 to 256"),
        ("resident_heads     = 250", "slots and resident_heads together at most 256"),
        ('layout             = "unified"', "kv_layout"),
        ('dtype              = "float8"', 'kv_type: "float8", expected one of'),
    ],
)
def test_what_the_runtime_cannot_be_is_refused_with_its_reason(line: str, says: str) -> None:
    key = line.split("=")[0]
    text = re.sub(rf"^{re.escape(key)}=.*$", line, GENERATE, count=1, flags=re.MULTILINE)
    with pytest.raises(FailedPreconditionError, match=re.escape(says)):
        cpu.configuration(tier.parse("planted", text))


def test_a_contract_that_would_be_refused_is_not_written() -> None:
    with pytest.raises(FailedPreconditionError, match=r"tokenizer\.end_token_ids\[0\]: 49152, expected below"):
        cpu.contract(tier.load("cpu-generate"), MODEL, FILES, end_token_ids=[49152], kv_width=192, flags=[])


def test_memory_grows_with_what_takes_it() -> None:
    def memory(text: str) -> int:
        return cpu.memory_bytes(tier.parse("planted", text), MODEL, 192)

    cache_of_one = 1280 * 2 * 30 * 192 * 2
    assert memory(GENERATE.replace("slots              = 16", "slots = 17")) - memory(GENERATE) == cache_of_one
    assert memory(GENERATE) > MODEL.weights_bytes + 24 * cache_of_one
    more = memory(GENERATE.replace("step_token_budget  = 512", "step_token_budget = 1024")) - memory(GENERATE)
    assert more >= 512 * 4 * MODEL.vocab_size


def tier_readme() -> str:
    return (files("engines.tiers") / "README.md").read_text()
