# SPDX-License-Identifier: Apache-2.0
"""The tokenizer document of an engine is the engine's own tokenizer, and the proof at every build can fail."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from engines import tokenizer, tokenizer_corpus, tokenizer_proof
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from engines.build import Built
    from engines.gguf_model import GgufModel
    from engines.llama_tool import LlamaTool


@pytest.fixture(scope="session")
def document(cpu_engine: Built) -> Tokenizer:
    """The engine's `tokenizer.json`, as a broker reads it."""
    return Tokenizer.from_file(str(cpu_engine.directory / "tokenizer.json"))


@pytest.fixture
def weights(cpu_engine: Built) -> Path:
    return cpu_engine.directory / "model.gguf"


def prove(tokens: Tokenizer, texts: Sequence[str], tool: LlamaTool, weights: Path) -> tokenizer_proof.Proof:
    return tokenizer_proof.prove(tokens, texts, tool, weights, lambda _done, _total: None)


@pytest.mark.timeout(300)
def test_the_document_is_equal_to_the_engine_on_texts_that_the_build_did_not_see(
    document: Tokenizer, model: GgufModel, tool: LlamaTool, weights: Path
) -> None:
    texts = tokenizer_corpus.texts(model.vocabulary.control_texts(), seed=7, mixtures=4000)
    proof = prove(document, texts, tool, weights)
    assert proof.texts == len(texts) > 8_000
    assert proof.tokens > 1_000_000


def test_the_corpus_holds_every_code_point_and_is_the_same_every_time() -> None:
    seen = set("".join(tokenizer_corpus.code_points()))
    assert seen >= {chr(point) for point in range(1, 0x32400) if not 0xD800 <= point < 0xE000}
    assert tokenizer_corpus.texts(["<|x|>"], mixtures=50) == tokenizer_corpus.texts(["<|x|>"], mixtures=50)
    assert tokenizer_corpus.texts(["<|x|>"], seed=1, mixtures=50) != tokenizer_corpus.texts(["<|x|>"], mixtures=50)


def plain_cut(document: Tokenizer) -> Tokenizer:
    """The cut that the model's makers name, without what evens out the differences to the engine."""
    planted = Tokenizer.from_str(document.to_str())
    planted.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return planted


def digits_together(document: Tokenizer) -> Tokenizer:
    planted = Tokenizer.from_str(document.to_str())
    planted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return planted


def space_in_front(document: Tokenizer) -> Tokenizer:
    planted = Tokenizer.from_str(document.to_str())
    cut = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    planted.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=True)])
    return planted


TELLING = ["it's 42 the", " \x04'", "\U00013460's", "a\U0001e5f0b", "x<|endoftext|>y", "  1", "plain text"]
"""Short texts, each of which some planted flaw spoils."""


@pytest.mark.parametrize("plant", [plain_cut, digits_together, space_in_front], ids=lambda plant: plant.__name__)
def test_another_cut_fails_the_proof(
    plant: Callable[[Tokenizer], Tokenizer], document: Tokenizer, tool: LlamaTool, weights: Path
) -> None:
    assert prove(document, TELLING, tool, weights).texts == len(TELLING)
    with pytest.raises(
        FailedPreconditionError, match=r"differ on \d of 7 texts; first: .* engine \[.* tokenizer\.json \["
    ):
        prove(plant(document), TELLING, tool, weights)


def test_a_merge_that_is_missing_fails_the_proof(model: GgufModel, tool: LlamaTool, weights: Path) -> None:
    merges = tuple(merge for merge in model.vocabulary.merges if merge != ("\u0120", "t"))
    assert len(merges) == len(model.vocabulary.merges) - 1
    planted = tokenizer.to_tokenizer(dataclasses.replace(model.vocabulary, merges=merges))
    with pytest.raises(FailedPreconditionError, match="differ on 2 of 7 texts"):
        prove(planted, TELLING, tool, weights)


def test_a_control_token_that_is_none_fails_the_proof(model: GgufModel, tool: LlamaTool, weights: Path) -> None:
    planted = tokenizer.to_tokenizer(dataclasses.replace(model.vocabulary, control=model.vocabulary.control[1:]))
    with pytest.raises(FailedPreconditionError, match="differ on 1 of 7 texts"):
        prove(planted, TELLING, tool, weights)


def test_a_cut_that_is_not_known_is_refused(model: GgufModel) -> None:
    with pytest.raises(FailedPreconditionError, match="cuts text as 'llama-bpe', which has no proven conversion"):
        tokenizer.to_tokenizer(dataclasses.replace(model.vocabulary, pre_tokenizer="llama-bpe"))


def test_text_comes_back_whole_but_for_bytes_that_no_token_stands_for(document: Tokenizer, model: GgufModel) -> None:
    holes = tokenizer.tokenless_bytes(model.vocabulary)
    assert {0x04, 0x06, 0x1D, 0xF1} <= set(holes)
    assert len(holes) == 21
    rng = random.Random(11)
    points = [
        point for plane in (range(0x20, 0x2000), range(0x3000, 0xD800), range(0x1F300, 0x1FB00)) for point in plane
    ]
    for _ in range(500):
        text = "".join(chr(rng.choice(points)) for _ in range(rng.randint(1, 40)))
        assert document.decode(document.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    assert document.decode(document.encode("a\x04b\x1dc", add_special_tokens=False).ids) == "abc"


def test_control_tokens_are_special_and_single(document: Tokenizer, model: GgufModel) -> None:
    vocabulary = model.vocabulary
    assert document.get_vocab_size() == len(vocabulary.tokens) == 49152
    for token in vocabulary.control:
        assert document.encode(vocabulary.tokens[token], add_special_tokens=False).ids == [token]
        assert document.decode([token]) == ""
        assert document.decode([token], skip_special_tokens=False) == vocabulary.tokens[token]
    assert vocabulary.id_of("<|im_end|>") == vocabulary.end_token_id == 2
    with pytest.raises(FailedPreconditionError, match="no control token '<eos>'"):
        vocabulary.id_of("<eos>")


@pytest.mark.slow
def test_no_code_point_of_unicode_differs_in_any_context(document: Tokenizer, tool: LlamaTool, weights: Path) -> None:
    points = [chr(point) for point in range(1, 0x110000) if not 0xD800 <= point < 0xE000]
    for context in ("{}'s", "a{}", " {}", "{} ", "1{}1", "  {}", "{}{}", "\n{}"):
        texts = [context.replace("{}", point) for point in points]
        assert prove(document, texts, tool, weights).texts == len(points)


@pytest.mark.slow
def test_no_text_of_two_hundred_thousand_differs(
    document: Tokenizer, model: GgufModel, tool: LlamaTool, weights: Path
) -> None:
    for seed in (100, 101):
        texts = tokenizer_corpus.texts(model.vocabulary.control_texts(), seed=seed, mixtures=100_000)
        prove(document, texts, tool, weights)
