# SPDX-License-Identifier: Apache-2.0
"""Packs prompts into rows of fixed length, first fit by decreasing length, so that little of a launch is padding."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 -- part of a public signature read at run time by callers' tools

import numpy as np
import numpy.typing as npt

PADDING_SEGMENT = -1


def pack(prompts: Sequence[npt.NDArray[np.int32]], row_tokens: int) -> dict[str, npt.NDArray[np.int32]]:
    """Lays prompts out for one launch.

    Args:
        prompts: Token ids, each of 1 to `row_tokens`.
        row_tokens: Extent of a row.

    Returns:
        The network's inputs: `input_ids`, `positions`, `segments` [rows, row_tokens] and `last_rows` [prompts] in the
        order of `prompts`, all int32.

    Raises:
        ValueError: A prompt is empty or longer than a row; names its index, its length and the limit.
    """
    free: list[int] = []
    used: list[int] = []
    place: dict[int, tuple[int, int, int]] = {}
    for index in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        length = len(prompts[index])
        _check(index, length, row_tokens)
        row = next((r for r, room in enumerate(free) if room >= length), len(free))
        if row == len(free):
            free.append(row_tokens)
            used.append(0)
        place[index] = (row, row_tokens - free[row], used[row])
        free[row] -= length
        used[row] += 1
    shape = (len(free), row_tokens)
    ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments = np.full(shape, PADDING_SEGMENT, np.int32)
    last = np.zeros(len(prompts), np.int32)
    for index, prompt in enumerate(prompts):
        row, begin, segment = place[index]
        end = begin + len(prompt)
        ids[row, begin:end], positions[row, begin:end], segments[row, begin:end] = (
            prompt,
            np.arange(len(prompt)),
            segment,
        )
        last[index] = row * row_tokens + end - 1
    return {"input_ids": ids, "positions": positions, "segments": segments, "last_rows": last}


def lay_out(prompts: Sequence[npt.NDArray[np.int32]], row_tokens: int) -> dict[str, npt.NDArray[np.int32]]:
    """Gives each prompt a row of its own, for a network that is not packed.

    Args:
        prompts: Token ids, each of 1 to `row_tokens`.
        row_tokens: Extent of a row.

    Returns:
        The network's inputs: `input_ids` [prompts, row_tokens] and `last_rows` [prompts], int32.

    Raises:
        ValueError: A prompt is empty or longer than a row; names its index, its length and the limit.
    """
    ids = np.zeros((len(prompts), row_tokens), np.int32)
    last = np.arange(len(prompts), dtype=np.int32) * row_tokens - 1
    for index, prompt in enumerate(prompts):
        _check(index, len(prompt), row_tokens)
        ids[index, : len(prompt)] = prompt
        last[index] += len(prompt)
    return {"input_ids": ids, "last_rows": last}


def _check(index: int, length: int, row_tokens: int) -> None:
    if not 1 <= length <= row_tokens:
        raise ValueError(f"prompt {index} has {length} tokens, must have 1 to {row_tokens}")
