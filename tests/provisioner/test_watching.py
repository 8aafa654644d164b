# SPDX-License-Identifier: Apache-2.0
"""Watchers: a snapshot first, then changes, each with its own bound."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from services.common import reasons
from services.common.errors import ResourceExhaustedError, UnavailableError
from services.provisioner.registry import MAY_LOAD, Node
from services.provisioner.watching import News, Watchers
from tests.provisioner import made

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def node(name: str, version: int = 1) -> Node:
    return Node(made.description(name), MAY_LOAD, (), None, None, 0.0, 1.0, version)


class World:
    """Nodes that exist, and those who watch them."""

    def __init__(self, *, watchers_max: int = 4, backlog_max: int = 3) -> None:
        self.nodes: dict[str, Node] = {}
        self.watchers = Watchers(
            lambda: [self.nodes[name] for name in sorted(self.nodes)],
            watchers_max=watchers_max,
            backlog_max=backlog_max,
        )

    def put(self, name: str, version: int = 1) -> None:
        self.nodes[name] = node(name, version)
        self.watchers.publish(name, self.nodes[name])

    def drop(self, name: str) -> None:
        del self.nodes[name]
        self.watchers.publish(name, None)

    def watch(self) -> AsyncGenerator[News, None]:
        return self.watchers.watch()


async def next_of(stream: AsyncGenerator[News, None]) -> News:
    async with asyncio.timeout(5):
        return await anext(stream)


def names(news: News) -> list[str]:
    return [n.node_id for n in news.nodes]


async def test_a_snapshot_waits_until_what_can_be_known_is_known() -> None:
    world = World()
    stream = world.watch()
    first = asyncio.create_task(next_of(stream))
    world.put("a")
    await asyncio.sleep(0)
    assert not first.done()
    world.put("b")
    world.watchers.open()
    news = await first
    assert (news.snapshot, names(news)) == (True, ["a", "b"])
    world.put("c")
    changed = await next_of(stream)
    assert (changed.snapshot, names(changed), changed.gone) == (False, ["c"], ())
    await stream.aclose()


async def test_what_happened_before_the_snapshot_is_in_it_and_nowhere_else() -> None:
    world = World(backlog_max=3)
    stream = world.watch()
    first = asyncio.create_task(next_of(stream))
    await asyncio.sleep(0)
    for i in range(10):
        world.put(f"n{i}")
    world.watchers.open()
    assert len((await first).nodes) == 10
    world.put("late")
    assert names(await next_of(stream)) == ["late"]
    await stream.aclose()


async def test_an_empty_snapshot_is_sent_too() -> None:
    world = World()
    world.watchers.open()
    stream = world.watch()
    assert await next_of(stream) == News(0, snapshot=True, nodes=())
    await stream.aclose()


async def test_changes_that_wait_are_folded_into_the_newest() -> None:
    world = World()
    world.watchers.open()
    stream = world.watch()
    first = await next_of(stream)
    for version in range(50):
        world.put("a", version)
    world.put("b")
    world.drop("b")
    news = await next_of(stream)
    assert [(n.node_id, n.version) for n in news.nodes] == [("a", 49)]
    assert news.gone == ("b",)
    assert news.revision == first.revision + 52
    await stream.aclose()


async def test_a_slow_watcher_is_ended_and_the_others_never_notice() -> None:
    world = World(backlog_max=3)
    world.watchers.open()
    slow, quick = world.watch(), world.watch()
    await next_of(slow)
    await next_of(quick)
    seen: set[str] = set()
    for i in range(10):
        world.put(f"n{i}")
        seen |= set(names(await next_of(quick)))
    assert len(seen) == 10
    with pytest.raises(ResourceExhaustedError) as caught:
        await next_of(slow)
    assert caught.value.reason == reasons.WATCHER_SLOW
    again = world.watch()
    assert len((await next_of(again)).nodes) == 10
    await quick.aclose()
    await again.aclose()


async def test_watchers_over_the_bound_are_refused_until_one_leaves() -> None:
    world = World(watchers_max=1)
    world.watchers.open()
    first = world.watch()
    await next_of(first)
    second = world.watch()
    with pytest.raises(ResourceExhaustedError) as caught:
        await next_of(second)
    assert caught.value.reason == reasons.WATCHERS_FULL
    await first.aclose()
    third = world.watch()
    assert (await next_of(third)).snapshot
    await third.aclose()


@pytest.mark.parametrize("opened", [True, False])
async def test_closing_ends_every_stream(opened: bool) -> None:
    world = World()
    stream = world.watch()
    if opened:
        world.watchers.open()
        await next_of(stream)
    waiting = asyncio.create_task(next_of(stream))
    await asyncio.sleep(0)
    world.watchers.close()
    with pytest.raises(UnavailableError) as caught:
        await waiting
    assert caught.value.reason == reasons.DRAINING
