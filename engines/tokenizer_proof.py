# SPDX-License-Identifier: Apache-2.0
"""Holds a `tokenizer.json` to the engine's own tokenizer, text by text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

    from engines.llama_tool import LlamaTool

_BATCH: Final = 1024


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared."""

    texts: int
    tokens: int


def prove(
    tokenizer: Tokenizer, texts: Sequence[str], tool: LlamaTool, model: Path, progress: Callable[[int, int], None]
) -> Proof:
    """Compares the two, text by text.

    Args:
        tokenizer: The tokenizer on trial.
        texts: What to compare them on; `tokenizer_corpus` makes what a build takes.
        tool: Reaches the engine's tokenizer.
        model: The GGUF file with the engine's vocabulary.
        progress: Told the texts compared and the texts in all.

    Raises:
        FailedPreconditionError: They differ: says on how many texts, and shows the first.
    """
    wrong: list[str] = []
    tokens = 0
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        theirs = tool.tokenize(model, batch)
        ours = tokenizer.encode_batch(batch, add_special_tokens=False)
        for text, engine, own in zip(batch, theirs, ours, strict=True):
            tokens += len(engine)
            if not np.array_equal(engine, own.ids):
                wrong.append(_difference(text, engine.tolist(), own.ids))
        progress(min(start + _BATCH, len(texts)), len(texts))
    if wrong:
        raise FailedPreconditionError(
            f"tokenizer.json and the engine's tokenizer differ on {len(wrong)} of {len(texts)} texts; first: {wrong[0]}"
        )
    return Proof(len(texts), tokens)


def _difference(text: str, engine: list[int], own: list[int]) -> str:
    """Where two rows of ids part, with what comes around it."""
    parted = next((i for i, (a, b) in enumerate(zip(engine, own, strict=False)) if a != b), min(len(engine), len(own)))
    around = slice(max(0, parted - 2), parted + 4)
    return f"{text[:80]!a}: from token {parted} on, engine {engine[around]}, tokenizer.json {own[around]}"
