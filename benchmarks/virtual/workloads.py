# SPDX-License-Identifier: Apache-2.0
"""Bulk jobs as lists of requests whose prompts are lists of block identities."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

VOCABULARY = 1 << 16


@dataclass(frozen=True, slots=True)
class Row:
    """One request. The last block may be cut short by `prompt_tokens`."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One bulk job, in the order in which its rows lie in the file."""

    name: str
    rows: Sequence[Row]
    block_tokens: int

    def bound_tokens(self) -> int:
        """Distinct whole blocks once, what is behind them, and at least one token a request."""
        whole: set[int] = set()
        tails, ends, exact = 0, set(), 0
        for row in self.rows:
            count = row.prompt_tokens // self.block_tokens
            whole.update(row.blocks[:count])
            tail = row.prompt_tokens - count * self.block_tokens
            tails += tail
            if not tail:
                exact += 1
                ends.add(row.blocks[count - 1])
        return len(whole) * self.block_tokens + tails + exact - len(ends)

    def logical_tokens(self) -> int:
        """Prompt tokens of all rows."""
        return sum(row.prompt_tokens for row in self.rows)

    def tokens(self, row: Row) -> npt.NDArray[np.int32]:
        """The prompt of a row as token ids, below VOCABULARY."""
        ids = _mixed(
            np.array(row.blocks, np.uint64)[:, None] * np.uint64(self.block_tokens)
            + np.arange(self.block_tokens, dtype=np.uint64)[None, :]
        )
        return (ids.reshape(-1)[: row.prompt_tokens] % np.uint64(VOCABULARY)).astype(np.int32)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A fixed scrambling of 64-bit numbers (splitmix64's finalizer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mooncake(path: Path, *, block_tokens: int = 512) -> Workload:
    """A published trace: equal `hash_ids` are equal blocks behind equal prefixes."""
    rows = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        rows.append(Row(tuple(entry["hash_ids"]), entry["input_length"], max(1, entry["output_length"])))
    return Workload(path.stem.removesuffix("_trace"), rows, block_tokens)


def shared_heads(
    name: str, *, groups: int, prompts: int, head: int, tail: int, output: int, block_tokens: int, seed: int
) -> Workload:
    """Groups of prompts that share a head and differ behind it, shuffled."""
    heads, tails = head // block_tokens, -(-tail // block_tokens)
    rows = []
    for group in range(groups):
        first = [group * heads + at for at in range(heads)]
        for prompt in range(prompts):
            own = groups * heads + (group * prompts + prompt) * tails
            rows.append(Row((*first, *range(own, own + tails)), heads * block_tokens + tail, output))
    random.Random(seed).shuffle(rows)
    return Workload(name, rows, block_tokens)
