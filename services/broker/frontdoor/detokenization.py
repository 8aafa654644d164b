# SPDX-License-Identifier: Apache-2.0
"""Token ids back to text, as they come, and stop strings in that text.

Whatever the cut between calls, the pieces joined are the text of all ids at once: a character split over tokens waits
for its last byte, and one that never completes is written as U+FFFD once, at the end.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from services.broker.frontdoor.vocabulary import ByteVocabulary

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextDecoder(Protocol):
    """Text of one growing sequence of ids."""

    def push(self, ids: list[int]) -> str:
        """Takes more ids and returns the text that is now certain."""

    def finish(self) -> str:
        """Returns what is left once no more ids come. Called once."""

    def copy(self) -> TextDecoder:
        """Returns an independent decoder in the same state."""


class ByteLevelDecoder:
    """Decoder for byte-level tokenizers: linear, one table look-up a token."""

    __slots__ = ("_utf8", "_vocabulary")

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        """See `TextDecoder`."""
        return self._utf8.decode(self._vocabulary.output(ids))

    def finish(self) -> str:
        """See `TextDecoder`."""
        return self._utf8.decode(b"", final=True)

    def copy(self) -> ByteLevelDecoder:
        """See `TextDecoder`."""
        twin = ByteLevelDecoder(self._vocabulary)
        twin._utf8.setstate(self._utf8.getstate())
        return twin


class WholeTextDecoder:
    """Decoder for any other tokenizer: decodes everything so far at each call.

    Exact for decoders whose text only ever grows at its end, as SentencePiece-like ones do once no token of single
    bytes is last: a run of those is text or replacement characters as a whole, so it waits for its end. Quadratic in
    the length of the output, which an engine's contract bounds.

    Args:
        tokenizer: The tokenizer.
        unsettled: Ids that leave the text before them open: tokens of single bytes, and control tokens, which do not
            end a run of them.
    """

    __slots__ = ("_given", "_ids", "_tokenizer", "_unsettled")

    def __init__(self, tokenizer: Tokenizer, unsettled: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._unsettled = unsettled
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: list[int]) -> str:
        """See `TextDecoder`."""
        self._ids += ids
        settled = len(self._ids)
        while settled and self._ids[settled - 1] in self._unsettled:
            settled -= 1
        return self._new(self._text(self._ids[:settled]).rstrip(_REPLACEMENT))

    def finish(self) -> str:
        """See `TextDecoder`."""
        return self._new(self._text(self._ids))

    def copy(self) -> WholeTextDecoder:
        """See `TextDecoder`."""
        twin = WholeTextDecoder(self._tokenizer, self._unsettled)
        twin._ids, twin._given = list(self._ids), self._given
        return twin

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _new(self, certain: str) -> str:
        piece = certain[self._given :]
        self._given += len(piece)
        return piece


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, and holds back what may still become one.

    The stop that *completes* first wins, of several completing together the longest: the only rule whose answer does
    not depend on how the text was cut. What is held back is never longer than the longest stop minus one character.
    """

    __slots__ = ("_held", "_stops", "matched", "matched_after")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = ""
        """The stop that was found; empty before."""
        self.matched_after = 0
        """How many characters of the piece in which it was found complete it."""

    def push(self, piece: str) -> str:
        """Takes more text; returns what is certain to come before any stop. Not called after a match."""
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self.matched_after = end - len(self._held)
            self._held = ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        certain = text[: len(text) - keep]
        self._held = text[len(text) - keep :]
        return certain

    def finish(self) -> str:
        """Returns what was held back, once no more text comes and nothing matched."""
        held, self._held = self._held, ""
        return held


class SampleText:
    """Text of one sample: decoding and stop strings together."""

    __slots__ = ("_decoder", "_matcher")

    def __init__(self, decoder: TextDecoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops) if stops else None

    @property
    def stop(self) -> str:
        """The stop string that ended the sample; empty where none did."""
        return self._matcher.matched if self._matcher else ""

    def push(self, ids: list[int]) -> tuple[str, int]:
        """Takes more ids.

        Returns:
            Text that is final, and how many of the ids belong to the sample: all of them, unless a stop string was
            completed by an earlier one. Nothing may be pushed after that.
        """
        if self._matcher is None:
            return self._decoder.push(ids), len(ids)
        before = self._decoder.copy()
        text = self._matcher.push(self._decoder.push(ids))
        if not self._matcher.matched:
            return text, len(ids)
        return text, _ids_until(before, ids, self._matcher.matched_after)

    def finish(self) -> str:
        """Returns the rest, once no more ids come. Not called after a stop string was found."""
        tail = self._decoder.finish()
        if self._matcher is None:
            return tail
        certain = self._matcher.push(tail)
        return certain if self._matcher.matched else certain + self._matcher.finish()


def _ids_until(decoder: TextDecoder, ids: list[int], characters: int) -> int:
    """How many ids it takes until `characters` more characters are certain."""
    for count, token_id in enumerate(ids, start=1):
        characters -= len(decoder.push([token_id]))
        if characters <= 0:
            return count
    return len(ids)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`; `stop` itself is not in `text`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
