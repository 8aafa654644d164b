# SPDX-License-Identifier: Apache-2.0
"""Token ids as the trees keep them: int32 bytes to compare and to send, packed bytes while they wait.

Equality is always decided on ids. The 64-bit chains (xxh3) only find where to look: a collision costs sharing, never
correctness, and the seed differs from process to process so that nobody can prepare one.
"""

from __future__ import annotations

import secrets

import numpy as np
import xxhash

ID_BYTES = 4
"""Bytes of one id in its int32 form."""

_SECRET = secrets.randbits(64)
_LOW_BITS = 16


def first_chain(salt: int) -> int:
    """Returns the chain before the first block; prompts of different salts share no chain."""
    return xxhash.xxh3_64_intdigest(salt.to_bytes(8, "little"), _SECRET)


chain = xxhash.xxh3_64_intdigest
"""`chain(block, before)`: the chain that ends with `block` (int32 bytes) and follows `before`."""


def planes_for(vocab_size: int) -> int:
    """Returns how many bits beyond 16 the ids of a vocabulary need."""
    return max(0, (vocab_size - 1).bit_length() - _LOW_BITS)


def pack(raw: bytes, planes: int) -> bytes:
    """Packs int32 bytes of ids below 2**(16 + planes): two bytes each, and one bit each for every plane.

    A prompt of 4,000 tokens takes 8,000 bytes with a vocabulary up to 65,536, and 8,500 up to 131,072.
    """
    ids = np.frombuffer(raw, "<i4")
    low = ids.astype("<u2").tobytes()
    if not planes:
        return low
    return low + b"".join(np.packbits(ids & (1 << (_LOW_BITS + plane))).tobytes() for plane in range(planes))


def unpack(packed: bytes, count: int, planes: int) -> bytes:
    """Returns the int32 bytes of `count` ids that `pack` packed with the same number of planes."""
    ids = np.frombuffer(packed, "<u2", count).astype("<i4")
    if planes:
        rows = np.frombuffer(packed, np.uint8, offset=2 * count).reshape(planes, -1)
        for plane in range(planes):
            ids |= np.unpackbits(rows[plane], count=count).astype("<i4") << (_LOW_BITS + plane)
    return ids.tobytes()


def common_blocks(left: bytes, right: bytes, block_bytes: int) -> int:
    """Returns how many whole leading blocks two stretches of int32 bytes have in common."""
    size = min(len(left), len(right)) // block_bytes * block_bytes
    if left[:size] == right[:size]:
        return size // block_bytes
    differs = np.frombuffer(left, np.uint8, size) != np.frombuffer(right, np.uint8, size)
    return int(differs.argmax()) // block_bytes
