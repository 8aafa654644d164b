# SPDX-License-Identifier: Apache-2.0
"""A job's order and its groups; see `docs/adr/0002-journal-and-order.md`.

A sort key is a prompt's beginning in a form that compares as bytes: ids as big-endian 32-bit numbers, or UTF-8 text.
Either way about four bytes stand for a token, so one measure in bytes tells whether neighbours share a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from services.broker.journal.values import Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ifabric.broker.v1 import broker_service_pb2

KEY_TOKENS = 1024
"""Where a sort key is cut, in ids."""
KEY_BYTES = 4 * KEY_TOKENS
_IDS, _TEXT = b"\x00", b"\x01"
"""Ids and text never share a head that could be seen before the text is tokenized."""


def sort_key(prompt: broker_service_pb2.Prompt) -> bytes:
    """Returns the sort key of a prompt; that of a malformed one is as good as any."""
    form = prompt.WhichOneof("form")
    if form == "text":
        return _TEXT + prompt.text[:KEY_BYTES].encode()[:KEY_BYTES]
    if form == "packed_token_ids":
        packed = prompt.packed_token_ids[:KEY_BYTES]
        return _IDS + np.frombuffer(packed, "<u4", len(packed) // 4).astype(">u4").tobytes()
    return _IDS + np.array(prompt.tokens.ids[:KEY_TOKENS], "<i4").astype(">u4").tobytes()


class Key(NamedTuple):
    """One row's place in the order to be."""

    row: int
    size: int
    """Bytes of the row."""
    sort_key: bytes


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Where an order is cut into groups."""

    shared_bytes: int = 256
    """Neighbours that share less of their keys share no full block: a group may end there."""
    rows_min: int = 128
    """Rows that a group has before it ends at such a place; what shares nothing is grouped with others like it."""
    rows_max: int = 1024
    bytes_max: int = 4 * 1024 * 1024
    """Bytes of rows in a group, unless its only row is larger."""


def groups(keys: Iterable[Key], rule: GroupRule) -> Iterator[tuple[Group, list[int]]]:
    """Cuts rows, which come in order, into groups.

    A group that grows beyond its bounds is cut at its shallowest node: where neighbours share least, the latest such
    place, so that the head that both sides compute is the shortest there is.

    Yields:
        The group and its rows, in order.
    """
    held: list[Key] = []
    shared: list[int] = []
    size = number = position = common = 0
    previous = b""

    def take(count: int) -> tuple[Group, list[int]]:
        nonlocal size, number, position
        rows = [key.row for key in held[:count]]
        size -= sum(key.size for key in held[:count])
        reach = max(shared[0], shared[count] if count < len(shared) else common)
        del held[:count], shared[:count]
        group = Group(number, position, position + count - 1, reach if reach < KEY_BYTES else None)
        number, position = number + 1, position + count
        return group, rows

    for key in keys:
        common = _common(previous, key.sort_key) if held else 0
        previous = key.sort_key
        if len(held) >= rule.rows_min and common < rule.shared_bytes:
            yield take(len(held))
        elif held and (len(held) >= rule.rows_max or size + key.size > rule.bytes_max):
            shallowest = min(range(1, len(held) + 1), key=lambda at: ((shared[at] if at < len(held) else common), -at))
            yield take(shallowest)
        held.append(key)
        shared.append(common)
        size += key.size
        while size > rule.bytes_max and len(held) > 1:
            yield take(len(held) - 1)
    common = 0
    if held:
        yield take(len(held))


def _common(left: bytes, right: bytes) -> int:
    """Length of the common start, by halving: comparing slices is far quicker than comparing bytes one by one."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
