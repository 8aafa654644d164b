# SPDX-License-Identifier: Apache-2.0
"""What the shared heads of a job's prompts are worth, from their token ids and before anything runs.

Every whole block of a prompt gets a chain, a 64-bit hash of it and all before it, so that two prompts share a head
exactly as far as their chains agree (two different ones are taken for one with a probability below 10**-5 for 12
million blocks). Chains of all rows are kept, 8 bytes each; the rest is sorting:

* The bound is the one that `services.broker.core.accounting` derives: whole blocks once, tails, a token a request.
* Along one prompt, the number of rows that share a block never grows. A run of blocks with the same number, two or
  more, is a head that the same rows share; computing it once saves its tokens for all of them but one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from services.broker.work import TokenArray

BLOCKS_MAX = 32_000_000
"""Blocks of all rows that one analysis keeps: about 1.5 GB while they are sorted."""
HEADS_TOLD = 20
_ID_BYTES = 4

Chains = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


class Head(NamedTuple):
    """A head that rows share."""

    tokens: int
    """Its length, from the start of the prompts."""
    rows: int
    saved_tokens: int
    """By computing once what it has beyond the head within it."""
    row_id: str
    """One of the rows."""


class Group(NamedTuple):
    """Rows that share their first block, or one row that shares nothing: what one worker owns."""

    computed_tokens: int
    generated_tokens: int
    head_tokens: int
    """The head that all of them share; a second worker has to compute it again."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What was found."""

    rows: int
    logical_tokens: int
    bound_tokens: int
    generated_tokens_max: int
    heads: tuple[Head, ...]
    """The HEADS_TOLD with the largest savings, largest first."""
    groups: tuple[Group, ...]


@dataclass(slots=True)
class Analysis:
    """Takes rows in, and looks at them together at the end."""

    block_tokens: int
    """Tokens of a block on the engines that may serve the rows; 0 where nothing is shared."""
    blocks_max: int = BLOCKS_MAX
    """Blocks of all rows that are kept."""
    _chains: list[Chains] = field(default_factory=list)
    _row_ids: list[str] = field(default_factory=list)
    _prompt_tokens: list[int] = field(default_factory=list)
    _allowed: list[int] = field(default_factory=list)
    _blocks: int = 0

    def add(self, row_id: str, tokens: TokenArray, salt: int, allowed_tokens: int) -> None:
        """Takes a row in.

        Args:
            row_id: Its id.
            tokens: Its prompt, shape [n], int32.
            salt: Prompts of different salts share nothing.
            allowed_tokens: What it may generate, over all samples.

        Raises:
            ResourceExhaustedError: all rows together have more than `blocks_max` blocks.
        """
        chains = _chains_of(tokens.tobytes(), self.block_tokens * _ID_BYTES, salt) if self.block_tokens else []
        self._blocks += len(chains)
        if self._blocks > self.blocks_max:
            raise ResourceExhaustedError(
                f"the rows have more than {self.blocks_max:,} blocks of {self.block_tokens} tokens, the most that an "
                "analysis keeps: analyze a part of them"
            )
        self._chains.append(np.array(chains, np.uint64))
        self._row_ids.append(row_id)
        self._prompt_tokens.append(len(tokens))
        self._allowed.append(allowed_tokens)

    def worth(self) -> Worth:
        """Looks at all rows; takes about a second for a million blocks, and belongs on a thread of its own."""
        prompts = np.array(self._prompt_tokens, np.int64)
        allowed = np.array(self._allowed, np.int64)
        lengths = np.array([len(chains) for chains in self._chains], np.int64)
        chains = np.concatenate([*self._chains, np.empty(0, np.uint64)])
        distinct, first, inverse, counts = np.unique(chains, return_index=True, return_inverse=True, return_counts=True)
        starts = np.cumsum(lengths) - lengths
        block = self.block_tokens
        tails = prompts - lengths * block
        whole = (tails == 0) & (lengths > 0)
        ends = chains[(starts + lengths - 1)[whole]]
        bound = block * len(distinct) + int(tails.sum()) + len(ends) - len(np.unique(ends))
        shared = counts[inverse]
        is_first = np.zeros(len(chains), bool)
        is_first[first] = True
        return Worth(
            rows=len(prompts),
            logical_tokens=int(prompts.sum()),
            bound_tokens=bound,
            generated_tokens_max=int(allowed.sum()),
            heads=self._heads(starts, lengths, shared, is_first),
            groups=self._groups(starts, lengths, inverse, shared, is_first, tails, allowed),
        )

    def _heads(
        self, starts: Counts, lengths: Counts, shared: Counts, is_first: npt.NDArray[np.bool_]
    ) -> tuple[Head, ...]:
        row, place, run = _runs(starts, lengths, shared)
        told = is_first[place] & (shared[place] > 1)
        row, place, run = row[told], place[told], run[told]
        saved = (shared[place] - 1) * run * self.block_tokens
        best = np.argsort(-saved, kind="stable")[:HEADS_TOLD]
        return tuple(
            Head(
                int(place[at] - starts[row[at]] + 1) * self.block_tokens,
                int(shared[place[at]]),
                int(saved[at]),
                self._row_ids[row[at]],
            )
            for at in best.tolist()
        )

    def _groups(
        self,
        starts: Counts,
        lengths: Counts,
        inverse: Counts,
        shared: Counts,
        is_first: npt.NDArray[np.bool_],
        tails: Counts,
        allowed: Counts,
    ) -> tuple[Group, ...]:
        rows = len(starts)
        # A row without a whole block is a group of its own: its key lies behind those of all blocks.
        has = lengths > 0
        keys = np.arange(rows, dtype=np.int64) + len(inverse)
        keys[has] = inverse[starts[has]]
        _, leader, group = np.unique(keys, return_index=True, return_inverse=True)
        new_blocks = np.add.reduceat(np.append(is_first, False).astype(np.int64), starts) * has if rows else starts
        computed = np.bincount(group, new_blocks * self.block_tokens + tails)
        generated = np.bincount(group, allowed)
        row, place, run = _runs(starts, lengths, shared)
        heads = np.zeros(rows, np.int64)
        at_start = place - starts[row] + 1 == run
        with_others = at_start & (shared[place] > 1)
        heads[row[with_others]] = run[with_others] * self.block_tokens
        return tuple(
            Group(int(tokens), int(output), int(head))
            for tokens, output, head in zip(computed, generated, heads[leader], strict=True)
        )


def _runs(starts: Counts, lengths: Counts, shared: Counts) -> tuple[Counts, Counts, Counts]:
    """Runs of equal sharing along each row: row, place of the last block, length in blocks; of all rows in order."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    last = np.ones(len(shared), bool)
    last[:-1] = (row[1:] != row[:-1]) | (shared[1:] != shared[:-1])
    place = np.flatnonzero(last)
    return row[place], place, np.diff(place, prepend=-1)


def _chains_of(raw: bytes, block_bytes: int, salt: int) -> list[int]:
    chain = xxhash.xxh3_64_intdigest(salt.to_bytes(8, "little"))
    chains = []
    for start in range(0, len(raw) - block_bytes + 1, block_bytes):
        chain = xxhash.xxh3_64_intdigest(raw[start : start + block_bytes], chain)
        chains.append(chain)
    return chains
