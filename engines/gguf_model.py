# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file says of its model, beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import gguf

from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_NORMAL: Final = int(gguf.TokenType.NORMAL)
_CONTROL: Final = int(gguf.TokenType.CONTROL)
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
    if (architecture := said.get("general.architecture")) != "llama":
        raise said.error(f"the model's architecture is {architecture!r}, expected 'llama'")
    head_size = int(said.get("llama.embedding_length")) // int(said.get("llama.attention.head_count"))
    return GgufModel(
        _vocabulary(said),
        head_size * int(said.get("llama.attention.head_count_kv")),
        said.get("tokenizer.chat_template") if said.has("tokenizer.chat_template") else None,
    )


class _Fields:
    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def has(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str) -> Any:
        if name not in self._fields:
            raise self.error(f"the file does not say {name}")
        return self._fields[name].contents()

    def error(self, why: str) -> FailedPreconditionError:
        return FailedPreconditionError(f"{self._path}: {why}")


def _vocabulary(said: _Fields) -> Vocabulary:
    if (model := said.get("tokenizer.ggml.model")) != "gpt2":
        raise said.error(f"tokenizer.ggml.model is {model!r}, expected 'gpt2', which is byte-level BPE")
    tokens = tuple(said.get("tokenizer.ggml.tokens"))
    kinds = said.get("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise said.error(f"it has {len(tokens)} tokens, but {len(kinds)} token types")
    if strange := sorted(set(kinds) - {_NORMAL, _CONTROL}):
        raise said.error(f"token types {strange} are not known to the tokenizer conversion")
    merges = tuple(tuple(merge.split(" ")) for merge in said.get("tokenizer.ggml.merges"))
    if any(len(merge) != 2 for merge in merges):
        raise said.error("tokenizer.ggml.merges holds something else than pairs")
    return Vocabulary(
        tokens=tokens,
        control=tuple(token for token, kind in enumerate(kinds) if kind == _CONTROL),
        merges=merges,
        pre_tokenizer=said.get("tokenizer.ggml.pre"),
        end_token_id=int(said.get("tokenizer.ggml.eos_token_id")),
        special=tuple(_special(said, tokens)),
    )


def _special(said: _Fields, tokens: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, field in _SPECIAL.items():
        if said.has(key := f"tokenizer.ggml.{field}_token_id"):
            token = int(said.get(key))
            if not 0 <= token < len(tokens):
                raise said.error(f"{key} is {token}, and there are {len(tokens)} tokens")
            yield name, tokens[token]
