# SPDX-License-Identifier: Apache-2.0
"""Prompts where nobody brings any: words in a random order, under heads that some of them share."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Final

from services.common.errors import InvalidArgumentError, NotFoundError, Violation

if TYPE_CHECKING:
    from pathlib import Path

_TEXT: Final = (
    "the engine reads a list of short notes and writes one clear answer for each of them while many clients wait and "
    "every note says what was seen at the river bridge market harbour station garden school tower road field in the "
    "morning evening summer winter by a farmer teacher sailor driver baker doctor with numbers dates names colours"
)
_FILE_MAX: Final = 64 << 20


def synthetic(count: int, *, words: int = 48, heads: int = 4, head_words: int = 96, seed: int = 1) -> list[str]:
    """Prompts of `head_words + words` words; every one begins with one of `heads` heads."""
    vocabulary = _TEXT.split()
    chance = random.Random(seed)  # noqa: S311 -- a workload, nothing secret
    starts = [" ".join(chance.choices(vocabulary, k=head_words)) for _ in range(heads)] if heads else [""]
    return [
        f"{starts[number % len(starts)]} {' '.join(chance.choices(vocabulary, k=words))}".strip()
        for number in range(count)
    ]


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file of JSON lines, each an object with `prompt`.

    Raises:
        NotFoundError: There is no such file.
        InvalidArgumentError: It holds something else, or nothing.
    """
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}")
    if path.stat().st_size > _FILE_MAX:
        raise InvalidArgumentError.of([Violation("prompts", f"{path} has more than {_FILE_MAX >> 20} MiB")])
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise InvalidArgumentError.of([Violation(f"prompts[{number}]", "is no JSON object with a text `prompt`")])
        prompts.append(row["prompt"])
    if not prompts:
        raise InvalidArgumentError.of([Violation("prompts", f"{path} holds none")])
    return prompts
