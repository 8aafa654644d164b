# SPDX-License-Identifier: Apache-2.0
"""Sentences in the form that documents of evidence take."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONGEST: Final = 1000


def plain(text: str, longest: int = _LONGEST) -> str:
    """Text as printable ASCII without spaces around, cut to its longest length, never empty."""
    kept = "".join(letter if " " <= letter <= "~" else "?" for letter in text).strip()
    return kept[: longest - 3].rstrip() + "..." if len(kept) > longest else kept or "-"


def command_line(words: Sequence[object]) -> str:
    """Words as a command line that a shell takes."""
    return plain(shlex.join(str(word) for word in words))
