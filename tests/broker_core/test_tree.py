# SPDX-License-Identifier: Apache-2.0
"""The waiting tree against a dictionary of lists, and the packing of ids."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.broker.core import ids
from services.broker.core.entry import Entry
from services.broker.core.flow import Flow, FlowKey
from services.broker.core.ownership import FlowRules
from services.broker.core.tree import Node, WaitingTree
from services.broker.work import Lane
from tests.broker_core.checks import check_tree
from tests.broker_core.made import BLOCK, DIGEST, work

_RULES = FlowRules(ageing_s=60.0, overdue_s=600.0, decode_weight=2.0, join_factor=4.0)


def _flow(*, block_tokens: int = BLOCK, planes: int = 0) -> Flow:
    key = FlowKey(Lane.BULK, "t", "j", 0, 0, frozenset({DIGEST}))
    return Flow(
        key,
        block_tokens=block_tokens,
        planes=planes,
        rules=_RULES,
        find=lambda raw: [],
        held=lambda worker, raw: None,
        led=lambda attempt: None,
    )


def _entry(flow: Flow, prompt: list[int], name: str) -> tuple[Entry, bytes]:
    made = work(prompt, request_id=name)
    return Entry(made, flow, len(prompt), decode=4, arrived=0.0), np.array(prompt, "<i4").tobytes()


@given(st.lists(st.integers(0, 2**18 - 1), max_size=70), st.integers(2, 6))
def test_packing_gives_back_what_it_was_given(tokens: list[int], planes: int) -> None:
    raw = np.array(tokens, "<i4").tobytes()
    assert ids.unpack(ids.pack(raw, planes), len(tokens), planes) == raw


@pytest.mark.parametrize(("vocabulary", "planes"), [(49_152, 0), (65_536, 0), (65_537, 1), (128_256, 1), (262_144, 2)])
def test_planes_follow_the_vocabulary(vocabulary: int, planes: int) -> None:
    assert ids.planes_for(vocabulary) == planes
    raw = np.array([0, vocabulary - 1, 1], "<i4").tobytes()
    assert ids.unpack(ids.pack(raw, planes), 3, planes) == raw


_prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, BLOCK)).map(
        lambda drawn: [bit * 100 + at for bit in drawn[0] for at in range(BLOCK)] + [7] * drawn[1] or [1]
    ),
    min_size=1,
    max_size=20,
)


@given(_prompts, st.data())
def test_it_agrees_with_a_dictionary_of_lists(prompts: list[list[int]], data: st.DataObject) -> None:
    flow = _flow()
    model: dict[str, list[int]] = {}
    entries: dict[str, Entry] = {}
    for at, prompt in enumerate(prompts):
        name = f"r{at}"
        entry, raw = _entry(flow, prompt, name)
        placed = flow.add(entry, raw, now=0.0, chains=True)
        # What is new of it is what no other prompt of the model begins with.
        blocks = len(prompt) // BLOCK
        shared = max((_common(prompt, other) for other in model.values()), default=0)
        assert len(placed.new_chains) == blocks - shared
        assert (placed.end_chain is not None) == (len(prompt) % BLOCK == 0)
        model[name], entries[name] = prompt, entry
        if data.draw(st.booleans(), label="one ends"):
            gone = data.draw(st.sampled_from(sorted(model)), label="which")
            flow.end(entries.pop(gone))
            del model[gone]
        raws = {key: np.array(value, "<i4").tobytes() for key, value in model.items()}
        check_tree(flow.tree, list(entries.values()), raws)
        # A prompt hangs exactly as deep as its longest shared beginning, or deeper where one that ended cut it there.
        for key, entry in entries.items():
            longest = max((_common(model[key], value) for other, value in model.items() if other != key), default=0)
            assert entry.node is not None
            assert entry.node.depth >= longest * BLOCK
    for entry in entries.values():
        flow.end(entry)
    assert not flow.tree.root.children
    assert flow.tree.bytes == 0


def test_prompts_that_share_nothing_make_no_nodes() -> None:
    flow = _flow()
    for at in range(50):
        entry, raw = _entry(flow, [at + 1] * 20, f"r{at}")
        flow.add(entry, raw, now=0.0, chains=False)
        assert entry.node is flow.tree.root


def test_without_blocks_nothing_is_shared() -> None:
    flow = _flow(block_tokens=0)
    for at in range(3):
        entry, raw = _entry(flow, [5] * 20, f"r{at}")
        placed = flow.add(entry, raw, now=0.0, chains=True)
        assert entry.node is flow.tree.root
        assert placed.new_chains == []
    assert flow.waiting == 3


class _Deaf:
    """Nobody who cares about shapes."""

    def node_cut(self, upper: Node, lower: Node) -> None:
        pass

    def entry_branched(self, node: Node, entry: Entry) -> None:
        pass


def test_a_collision_of_chains_costs_sharing_and_nothing_else() -> None:
    flow = _flow()
    tree = WaitingTree(_Deaf(), block_tokens=BLOCK, planes=0, salt=0, chain=lambda block, before: 1)
    raws, entries = {}, []
    for at, first in enumerate([1, 2, 1, 2, 3]):
        entry, raw = _entry(flow, [first] * 9 + [at], f"r{at}")
        tree.insert(entry, raw, now=0.0, chains=False)
        raws[f"r{at}"] = raw
        entries.append(entry)
    for entry in entries:
        assert tree.prompt(entry) == raws[entry.work.key[1]]
    assert tree.root.waiting == 5
    for entry in entries:
        tree.count(entry, -1)
        tree.remove(entry)
    assert tree.bytes == 0
    assert not tree.root.children


def test_salts_share_no_chain() -> None:
    assert ids.first_chain(0) != ids.first_chain(1)


def _common(left: list[int], right: list[int]) -> int:
    """Whole blocks that two prompts have in common at their start."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    return same // BLOCK
