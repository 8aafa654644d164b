# SPDX-License-Identifier: Apache-2.0
"""`tokenizer.json` from the vocabulary of a GGUF file, equal to the engine's own tokenizer.

What text becomes is settled by how it is cut before merging. llama.cpp names its ways of cutting; the one that is known
here, `smollm`, sets every digit apart and then cuts as GPT-2 does. Both sides read `letter` and `digit` in Unicode's
tables, and merge bytes by the same list; two differences remain and are evened out here, so that the two agree on all
of Unicode:

* The tables are of different versions: characters of Unicode 16 are letters and digits to one side only.
* A byte that no token stands for vanishes on both sides, but with llama.cpp its neighbours do not become neighbours.

`engines.tokenizer_proof` holds the result to the engine, at every build.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from engines.gguf_model import Vocabulary

KNOWN_CUTS: Final = ("smollm",)
"""llama.cpp's names of the ways of cutting text that are known here."""

_UNKNOWN_TO_LLAMA: Final = (
    (0x1C89, 0x1C8A), (0xA7CB, 0xA7CD), (0xA7DA, 0xA7DC), (0x105C0, 0x105F3), (0x10D40, 0x10D65), (0x10D6F, 0x10D85),
    (0x10EC2, 0x10EC4), (0x11380, 0x11389), (0x1138B, 0x1138B), (0x1138E, 0x1138E), (0x11390, 0x113B5),
    (0x113B7, 0x113B7), (0x113D1, 0x113D1), (0x113D3, 0x113D3), (0x116D0, 0x116E3), (0x11BC0, 0x11BE0),
    (0x11BF0, 0x11BF9), (0x11DE0, 0x11DE9), (0x13460, 0x143FA), (0x16100, 0x1611D), (0x16130, 0x16139),
    (0x16D40, 0x16D6C), (0x16D70, 0x16D79), (0x16FF4, 0x16FF6), (0x18CFF, 0x18CFF), (0x1CCF0, 0x1CCF9),
    (0x1E5D0, 0x1E5ED), (0x1E5F0, 0x1E5FA),
)  # fmt: skip
"""Letters and digits of Unicode 16, first and last of each range; llama.cpp's tables are of Unicode 15."""


def to_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a vocabulary; `Tokenizer.save` writes the `tokenizer.json`.

    Control tokens are special: their texts become them, and decoding leaves them out where it is asked to.

    Raises:
        FailedPreconditionError: Text is cut in a way that is not known here.
    """
    if vocabulary.pre_tokenizer not in KNOWN_CUTS:
        raise FailedPreconditionError(
            f"the model cuts text as {vocabulary.pre_tokenizer!r}, which has no proven conversion; "
            f"known are {', '.join(KNOWN_CUTS)}"
        )
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges), ignore_merges=False))
    tokenizer.pre_tokenizer = _smollm_cut(vocabulary)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[token], special=True, normalized=False) for token in vocabulary.control]
    )
    return tokenizer


def to_configuration(vocabulary: Vocabulary, chat_template: str | None) -> bytes:
    """The text of `tokenizer_config.json`: the special tokens by name, and the chat template where there is one."""
    document = dict(vocabulary.special)
    if chat_template is not None:
        document["chat_template"] = chat_template
    return json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"


def tokenless_bytes(vocabulary: Vocabulary) -> list[int]:
    """Bytes that no token stands for: text that holds them does not come back whole."""
    known = set(vocabulary.tokens)
    return [byte for byte, shown in enumerate(_shown_bytes()) if shown not in known]


def _smollm_cut(vocabulary: Vocabulary) -> pre_tokenizers.PreTokenizer:
    foreign = "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in _UNKNOWN_TO_LLAMA)
    letter = f"[\\p{{L}}&&[^{foreign}]]"
    digit = f"[\\p{{N}}&&[^{foreign}]]"
    other = f"[[^\\s\\p{{L}}\\p{{N}}]{foreign}]"
    # A digit stands alone, without the blank before it, so blanks before a digit end their run as those before the
    # end of the text do.
    solid = f"[[^\\s\\p{{N}}]{foreign}]"
    words = f"'s|'t|'re|'ve|'m|'ll|'d| ?{letter}+|{digit}| ?{other}+|\\s+(?!{solid})|\\s+"
    cuts = [
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    shown = _shown_bytes()
    if holes := [f"\\x{{{ord(shown[byte]):x}}}" for byte in tokenless_bytes(vocabulary)]:
        cuts.append(pre_tokenizers.Split(Regex(f"[{''.join(holes)}]"), "removed"))
    return pre_tokenizers.Sequence(cuts)


def _shown_bytes() -> list[str]:
    """The printable character by which byte-level BPE writes each byte, by byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(spare)) for byte in range(0x100)]
