# SPDX-License-Identifier: Apache-2.0
"""The bytes behind each token of a byte-level tokenizer.

Byte-level BPE writes every byte as one printable character, so a token's text is a spelling of its bytes. Joining
bytes is exact where joining texts is not: a character may begin in one token and end in another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LOST = b""
"""Bytes of an id that the tokenizer does not know: model vocabularies are padded beyond the tokenizer's."""


def byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of the byte-level alphabet stands for.

    Bytes that print in Latin-1 stand for themselves; the others take the code points from U+0100 on, in order.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(printing)]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


_ALPHABET = byte_alphabet()


def spelled_bytes(token: str) -> bytes:
    """Returns the bytes that a token's text spells; a text outside the alphabet stands for itself in UTF-8."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


class ByteVocabulary:
    """Bytes of every token.

    Args:
        tokens: Text of each token id, added tokens included.
        special: Ids that are control tokens: present in prompts, absent from output text.
    """

    def __init__(self, tokens: Mapping[int, str], special: Iterable[int]) -> None:
        size = max(tokens, default=-1) + 1
        self._prompt: list[bytes] = [LOST] * size
        for token_id, text in tokens.items():
            self._prompt[token_id] = spelled_bytes(text)
        self._output = list(self._prompt)
        for token_id in special:
            self._output[token_id] = LOST
        self.longest = max(map(len, self._prompt), default=1) or 1
        """Size of the longest token, in bytes; at least 1. Asked for with every text, so it is counted once."""

    def output(self, ids: list[int]) -> bytes:
        """Returns the bytes of generated tokens, control tokens left out."""
        return _joined(self._output, ids)

    def prompt(self, ids: list[int]) -> bytes:
        """Returns the bytes of a prompt, control tokens as they are written."""
        return _joined(self._prompt, ids)


def _joined(table: list[bytes], ids: list[int]) -> bytes:
    try:
        return b"".join(map(table.__getitem__, ids))
    except IndexError:
        size = len(table)
        return b"".join([table[token_id] for token_id in ids if token_id < size])
