# SPDX-License-Identifier: Apache-2.0
"""Text from tokens, whatever the cut: exact, whole characters, stop strings across token borders."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.broker.frontdoor.detokenization import SampleText, StopMatcher
from services.broker.frontdoor.tokenization import TextCodec
from services.broker.frontdoor.vocabulary import byte_alphabet
from tests.broker_front.made import END, built_tokenizers, byte_fallback, byte_level, ids_of, tokenizer_of, vocab_size

DOCUMENTS: dict[str, Callable[[], bytes]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
}
DOCUMENTS |= {path.parent.name: functools.cache(path.read_bytes) for path in built_tokenizers()}
if TYPE_CHECKING:
    from collections.abc import Callable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def codec(name: str) -> TextCodec:
    return TextCodec(DOCUMENTS[name]())


@st.composite
def cut_ids(draw: st.DrawFn, name: str) -> list[list[int]]:
    """Ids of a text or random ones, cut into random pieces."""
    size = vocab_size(DOCUMENTS[name]())
    ids = draw(
        st.one_of(
            st.lists(st.integers(0, size - 1), max_size=40),
            st.text(max_size=30).map(lambda text: ids_of(DOCUMENTS[name](), text)),
        )
    )
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=8)))
    return [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def streamed(sample: SampleText, pieces: list[list[int]]) -> list[str]:
    """Everything that a sample gives out; its end last."""
    out = []
    for piece in pieces:
        out.append(sample.push(piece)[0])
        if sample.stop:
            return [*out, ""]
    return [*out, sample.finish()]


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_text_of_all_ids(name: str, data: st.DataObject) -> None:
    pieces = data.draw(cut_ids(name))
    ids = [token for piece in pieces for token in piece]
    whole = tokenizer_of(DOCUMENTS[name]()).decode(ids, skip_special_tokens=True)
    assert "".join(streamed(SampleText(codec(name).decoder(), ()), pieces)) == whole
    assert codec(name).decode(np.array(ids, np.int32)) == whole


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_half_character_before_the_end(name: str, data: st.DataObject) -> None:
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=20))
    ids = ids_of(DOCUMENTS[name](), text)
    if codec(name).encode([text])[0] is None:
        return  # the vocabulary does not have it: the front door refuses it
    for piece in streamed(SampleText(codec(name).decoder(), ()), [[token] for token in ids]):
        assert REPLACEMENT not in piece


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stop_strings_do_not_depend_on_the_cut(name: str, data: st.DataObject) -> None:
    pieces = data.draw(cut_ids(name))
    ids = [token for piece in pieces for token in piece]
    text: str = tokenizer_of(DOCUMENTS[name]()).decode(ids, skip_special_tokens=True)
    part = st.builds(lambda at, size: text[at : at + size], st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    stops = data.draw(st.lists(st.one_of(part, st.text(min_size=1, max_size=4)).filter(bool), min_size=1, max_size=4))
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    sample = SampleText(codec(name).decoder(), stops)
    got = "".join(streamed(sample, pieces))
    if ends:
        _, start, stop = min(ends)
        assert (got, sample.stop) == (text[:start], stop)
    else:
        assert (got, sample.stop) == (text, "")


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_what_is_held_back_is_shorter_than_the_longest_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, given_out, taken = StopMatcher(stops), "", 0
    while taken < len(text):
        size = data.draw(st.integers(1, 4))
        given_out += matcher.push(text[taken : taken + size])
        taken = min(len(text), taken + size)
        if matcher.matched:
            return
        assert taken - len(given_out) < max(map(len, stops))
    assert given_out + matcher.finish() == text


def test_ids_after_the_stop_are_not_the_samples() -> None:
    document = byte_level()
    ids = [ids_of(document, character)[0] for character in "abcdef"]
    sample = SampleText(codec("byte_level").decoder(), ["cd"])
    assert sample.push(ids) == ("ab", 4)
    assert sample.stop == "cd"


def test_a_character_of_two_tokens_waits_for_its_second() -> None:
    ids = ids_of(byte_level(), "\u806a")
    assert len(ids) >= 2
    sample = SampleText(codec("byte_level").decoder(), ())
    assert [sample.push([token])[0] for token in ids] == [""] * (len(ids) - 1) + ["\u806a"]
    assert sample.finish() == ""


def test_a_tail_that_never_completes_comes_once_at_the_end() -> None:
    ids = ids_of(byte_level(size=300), "ok\U0001f98a")[:-1]
    sample = SampleText(TextCodec(byte_level(size=300)).decoder(), ())
    assert "".join(sample.push([token])[0] for token in ids) == "ok"
    assert sample.finish() == REPLACEMENT


def test_stop_in_the_middle_of_a_split_character() -> None:
    ids = ids_of(byte_level(), "a\u806ab")
    sample = SampleText(codec("byte_level").decoder(), ["\u806a"])
    assert "".join(streamed(sample, [[token] for token in ids])) == "a"
    assert sample.stop == "\u806a"


def test_control_tokens_are_not_text() -> None:
    document = byte_level()
    ids = [*ids_of(document, "ab"), *ids_of(document, END), *ids_of(document, "c")]
    assert codec("byte_level").decode(np.array(ids, np.int32)) == "abc"


def test_ids_beyond_the_tokenizer_are_not_text() -> None:
    ids = [*ids_of(byte_level(), "ab"), 100_000]
    assert codec("byte_level").decode(np.array(ids, np.int32)) == "ab"


def test_the_alphabet_spells_every_byte_once() -> None:
    from tokenizers import pre_tokenizers

    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
