# SPDX-License-Identifier: Apache-2.0
"""The least that a job's prompts could cost, group by group, so that no process need see the whole job.

`services/broker/core/accounting.py` derives the bound: with D distinct whole blocks of B tokens, T the sum of tails, E
prompts without a tail and F distinct ends of those, it is B * D + T + (E - F). Tails and E are sums over rows. D and F
are counts of distinct things, and the journal's order makes those local, too: rows that share a head are neighbours, so
that all but the blocks of heads which a group shares with the groups beside it belong to that group alone. How far such
heads reach, the journal noted when it cut the groups (`Group.reach`). The few blocks within reach are named one by one,
for the journal to tell which of them an earlier group brought already; all others are counted here.

Exact for token ids. Texts are compared as they were sent: a tokenizer that makes the same ids of different beginnings
(one that ignores case, say) makes the bound larger where such rows are in different groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import xxhash

from services.broker.core.ids import ID_BYTES, common_blocks
from services.broker.journal.values import Bound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.broker.work import TokenArray

_SPECIAL_TOKENS = 8
"""Tokens that may stand before a text without any of its bytes."""
_ALL = 1 << 64


class Prompt(NamedTuple):
    """A row that will be given out."""

    tokens: TokenArray
    """Shape [n], int32."""
    salt: int
    """Prompts of different salts share nothing."""


def group_bound(prompts: Iterable[Prompt], block_tokens: int, reach: int | None, *, text: bool) -> Bound:
    """Returns what a group adds to the bound of its job.

    Args:
        prompts: Its rows, in the journal's order or any other.
        block_tokens: B; 0 where nothing is shared.
        reach: `Group.reach`, in bytes.
        text: Whether the rows are sorted by their text, of which a token is at least a byte; else by ids of four bytes.
            Of no matter without a reach.
    """
    if not block_tokens:
        return Bound(sum(len(prompt.tokens) for prompt in prompts), 0, (), ())
    within = _ALL if reach is None else reach + _SPECIAL_TOKENS if text else (reach - 1) // ID_BYTES
    block_bytes = block_tokens * ID_BYTES
    own: set[int] = set()
    near: set[int] = set()
    own_ends: set[int] = set()
    near_ends: set[int] = set()
    tails = without_tail = 0
    before = b""
    chains: list[int] = []  # of the prompt before; the one that stands before its first block is the salt's
    for tokens, salt in prompts:
        raw = tokens.tobytes()
        first = xxhash.xxh3_64_intdigest(salt.to_bytes(8, "little"))
        if chains[:1] == [first]:
            del chains[common_blocks(before, raw, block_bytes) + 1 :]
        else:
            before, chains = b"", [first]
        for start in range((len(chains) - 1) * block_bytes, len(raw) - block_bytes + 1, block_bytes):
            chains.append(xxhash.xxh3_64_intdigest(raw[start : start + block_bytes], chains[-1]))
            (near if start // ID_BYTES + block_tokens <= within else own).add(chains[-1])
        before = raw
        tail = len(tokens) % block_tokens
        tails += tail
        if not tail:
            without_tail += 1
            (near_ends if len(tokens) <= within else own_ends).add(chains[-1])
    return Bound(
        block_tokens * len(own) + tails + without_tail - len(own_ends),
        block_tokens,
        tuple(map(_signed, sorted(near))),
        tuple(map(_signed, sorted(end ^ (_ALL - 1) for end in near_ends))),
    )


def _signed(chain: int) -> int:
    """The same 64 bits as the database's numbers have them."""
    return chain - _ALL if chain >> 63 else chain
