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
    news = await next_of(stream)
    assert (news.revision, news.snapshot, news.nodes, news.gone) == (0, True, (), ())
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


async def taken(world: World, token: str = "") -> News:
    stream = world.watchers.watch(token)
    news = await next_of(stream)
    await stream.aclose()
    return news


async def test_a_watcher_that_comes_back_gets_what_has_changed_since() -> None:
    world = World()
    world.watchers.open()
    for name in ("a", "b", "c"):
        world.put(name)
    before = await taken(world)
    assert before.snapshot
    world.put("b", version=2)
    world.drop("c")
    world.put("d")
    since = await taken(world, before.resume_token)
    assert not since.snapshot
    assert (names(since), since.gone) == (["b", "d"], ("c",))
    assert since.revision == 6
    nothing = await taken(world, since.resume_token)
    assert (nothing.snapshot, nothing.nodes, nothing.gone) == (False, (), ())


async def test_a_node_that_went_and_came_back_is_no_longer_gone() -> None:
    world = World()
    world.watchers.open()
    world.put("a")
    before = await taken(world)
    world.drop("a")
    world.put("a", version=2)
    since = await taken(world, before.resume_token)
    assert (names(since), since.gone) == (["a"], ())


async def test_every_message_has_a_token_that_leads_behind_it() -> None:
    world = World()
    world.watchers.open()
    stream = world.watch()
    await next_of(stream)
    world.put("a")
    first = await next_of(stream)
    world.put("b")
    second = await next_of(stream)
    await stream.aclose()
    assert names(await taken(world, first.resume_token)) == ["b"]
    assert names(await taken(world, second.resume_token)) == []


async def test_what_is_not_known_any_more_is_a_snapshot() -> None:
    world = World(backlog_max=3)
    world.watchers.open()
    for number in range(5):
        world.put(f"n{number}")
    before = await taken(world)
    for number in range(3):
        world.drop(f"n{number}")
    assert not (await taken(world, before.resume_token)).snapshot
    world.drop("n3")
    late = await taken(world, before.resume_token)
    assert late.snapshot
    assert names(late) == ["n4"]


@pytest.mark.parametrize(
    "token", ["x", ":", "0123456789abcdef:3", "{process}:-1", "{process}:4", "{process}:1e3", "{process}:"]
)
async def test_a_token_of_another_process_or_of_nobody_is_a_snapshot(token: str) -> None:
    world = World()
    world.watchers.open()
    for name in ("a", "b", "c"):
        world.put(name)
    process = (await taken(world)).resume_token.partition(":")[0]
    news = await taken(world, token.format(process=process))
    assert news.snapshot
    assert names(news) == ["a", "b", "c"]
