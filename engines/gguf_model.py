# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says of its model, beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import gguf

from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_NORMAL: Final = int(gguf.TokenType.NORMAL)
_CONTROL: Final = int(gguf.TokenType.CONTROL)
_COUNT_MAX: Final = 1 << 24
_SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names of special tokens in a tokenizer's configuration, and what the file calls them."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Byte-level BPE vocabulary of a model."""

    tokens: tuple[str, ...]
    """Text of every token by id, bytes written as the printable characters of byte-level BPE."""
    control: tuple[int, ...]
    """Ids of control tokens, in order."""
    merges: tuple[tuple[str, str], ...]
    """Pairs, most wanted first."""
    pre_tokenizer: str
    """Name by which llama.cpp knows how text is cut before merging."""
    end_token_id: int
    """What the model itself calls its end."""
    special: tuple[tuple[str, str], ...]
    """Names of the tokens that the model sets apart, as templates know them (`bos_token`), and their texts."""

    def control_texts(self) -> list[str]:
        """Texts of the control tokens."""
        return [self.tokens[token] for token in self.control]

    def id_of(self, text: str) -> int:
        """The id of a control token.

        Raises:
            FailedPreconditionError: There is no such control token.
        """
        for token in self.control:
            if self.tokens[token] == text:
                return token
        raise FailedPreconditionError(f"the model has no control token {text!r}")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model as its file describes it."""

    vocabulary: Vocabulary
    kv_width: int
    """Values that one token adds to the keys of one layer, and as many to its values."""
    chat_template: str | None
    """How a chat becomes a prompt, as a Jinja template; None where the model knows no chats."""


def read(path: Path) -> GgufModel:
    """Reads what a GGUF file says; takes seconds, since it holds every token and merge.

    Raises:
        FailedPreconditionError: It is no GGUF file, or its model or vocabulary is of another kind.
    """
    try:
        fields = gguf.GGUFReader(path).fields
    except (ValueError, OSError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise FailedPreconditionError(f"{path} is no GGUF file that can be read: {error}") from error
    said = _Fields(path, fields)
    if (architecture := said.text("general.architecture")) != "llama":
        raise said.error(f"the model's architecture is {architecture!r}, expected 'llama'")
    head_size = said.count("llama.embedding_length") // said.count("llama.attention.head_count")
    return GgufModel(
        _vocabulary(said),
        head_size * said.count("llama.attention.head_count_kv"),
        said.text("tokenizer.chat_template") if said.has("tokenizer.chat_template") else None,
    )


class _Fields:
    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def has(self, name: str) -> bool:
        return name in self._fields

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} is {str(value)[:40]!r}, expected a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(f"{name} is no list of texts")
        return tuple(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self.error(f"{name} is no list of whole numbers")
        return tuple(value)

    def count(self, name: str) -> int:
        value = self._get(name)
        if type(value) is not int or not 1 <= value <= _COUNT_MAX:
            raise self.error(f"{name} is {str(value)[:40]}, expected a whole number from 1 to {_COUNT_MAX}")
        return value

    def token(self, name: str, tokens: Sequence[str]) -> int:
        value = self._get(name)
        if type(value) is not int or not 0 <= value < len(tokens):
            raise self.error(f"{name} is {str(value)[:40]}, and there are {len(tokens)} tokens")
        return value

    def _get(self, name: str) -> Any:
        if name not in self._fields:
            raise self.error(f"the file does not say {name}")
        try:
            return self._fields[name].contents()
        except (ValueError, IndexError, TypeError, OverflowError) as error:  # what it says is no text, or lies outside
            raise self.error(f"{name} cannot be read: {error}") from error

    def error(self, why: str) -> FailedPreconditionError:
        return FailedPreconditionError(f"{self._path}: {why}")


def _vocabulary(said: _Fields) -> Vocabulary:
    if (model := said.text("tokenizer.ggml.model")) != "gpt2":
        raise said.error(f"tokenizer.ggml.model is {model!r}, expected 'gpt2', which is byte-level BPE")
    tokens = said.texts("tokenizer.ggml.tokens")
    kinds = said.numbers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise said.error(f"it has {len(tokens)} tokens, but {len(kinds)} token types")
    if strange := sorted(set(kinds) - {_NORMAL, _CONTROL}):
        raise said.error(f"token types {strange} are not known to the tokenizer conversion")
    pairs = [merge.split(" ") for merge in said.texts("tokenizer.ggml.merges")]
    if any(len(pair) != 2 for pair in pairs):
        raise said.error("tokenizer.ggml.merges holds something else than pairs")
    return Vocabulary(
        tokens=tokens,
        control=tuple(token for token, kind in enumerate(kinds) if kind == _CONTROL),
        merges=tuple((first, second) for first, second in pairs),
        pre_tokenizer=said.text("tokenizer.ggml.pre"),
        end_token_id=said.token("tokenizer.ggml.eos_token_id", tokens),
        special=tuple(_special(said, tokens)),
    )


def _special(said: _Fields, tokens: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, field in _SPECIAL.items():
        if said.has(key := f"tokenizer.ggml.{field}_token_id"):
            yield name, tokens[said.token(key, tokens)]
