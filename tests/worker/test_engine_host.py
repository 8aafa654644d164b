# SPDX-License-Identifier: Apache-2.0
"""The engine's thread and the event loop: load, hand-over, failure, end."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from engines.simulated import ABSENT, Simulation, write_simulated_engine
from services.common import reasons
from services.common.errors import FabricError, FailedPreconditionError, UnavailableError
from services.worker.engine_host import THREAD_NAME, EngineHost
from services.worker.items import Item, item_from_wire
from services.worker.native import PollBuffers
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker.made import Heard, unpacked, work
from tests.worker.running import GENERATING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def item(host: EngineHost, handle: int, ids: Iterable[int], heard: Heard, max_tokens: int = 4) -> Item:
    return item_from_wire(work(handle, ids, max_tokens=max_tokens), host.next_id(), heard, 0)


def engine_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count(THREAD_NAME)


async def test_a_load_that_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    host = EngineHost(pytest.fail)
    write_simulated_engine(tmp_path, **GENERATING, contract_changes={"limits.slots": ABSENT})
    with pytest.raises(FailedPreconditionError, match=r"limits\.slots"):
        await host.load(tmp_path)
    assert not host.loaded
    write_simulated_engine(tmp_path, **GENERATING)
    description = await host.load(tmp_path)
    assert description.limits["slots"] == 8
    await host.close()
    await host.close()
    await wait_until(lambda: engine_threads() == 0)


async def test_a_load_that_nobody_waits_for_any_more_ends_with_the_engine_closed(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **GENERATING, load_ms=800)
    host = EngineHost(pytest.fail)
    loading = asyncio.get_running_loop().create_task(host.load(tmp_path))
    await wait_until(lambda: engine_threads() == 1)
    loading.cancel()
    await asyncio.wait({loading})
    await wait_until(lambda: engine_threads() == 0)
    assert not host.loaded


async def test_nothing_can_be_asked_of_an_engine_that_is_not_loaded() -> None:
    host = EngineHost(pytest.fail)
    for call in (host.stats, lambda: host.description, lambda: host.submit([item(host, 1, [1], Heard())])):
        with pytest.raises(FailedPreconditionError) as caught:
            call()
        assert caught.value.reason == reasons.ENGINE_NOT_LOADED


async def test_a_loop_that_does_not_run_holds_the_engine_back_and_loses_nothing(tmp_path: Path) -> None:
    made = write_simulated_engine(
        tmp_path,
        **{**GENERATING, "time_mode": "virtual", "slots": 64, "step_token_budget": 4096, "kv_pool_blocks": 4096},
    )
    host, heard = EngineHost(pytest.fail), Heard()
    await host.load(tmp_path)
    prompts = {handle: [handle % 1000, handle // 1000] for handle in range(3000)}
    items = [item(host, handle, ids, heard, max_tokens=64) for handle, ids in prompts.items()]
    assert host.submit(items) == [None] * len(items)
    time.sleep(0.7)  # the loop stands still: this is what is tested
    stats = host.stats()
    assert stats.held_back or stats.events_pending
    assert stats.requests_finished < len(items)
    await wait_until(lambda: len(heard.calls) == len(items))
    simulation = Simulation(made)
    for each in items[::97]:
        assert unpacked(bytes(each.samples[0].token_ids)) == simulation.tokens(prompts[each.handle], 64)
    await host.close()


async def test_a_thread_that_dies_fails_everything_and_says_so_once(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **{**GENERATING, "step_us": 20_000})
    failures: list[str] = []
    host, heard = EngineHost(failures.append), Heard()
    await host.load(tmp_path)
    assert host.submit([item(host, handle, [handle], heard, max_tokens=64) for handle in range(3)]) == [None] * 3
    engine = host._engine
    assert engine is not None
    buffers = PollBuffers(events=64, tokens=4096, payload_bytes=0, text_bytes=4096)

    def steal() -> None:
        """Polls in the thread's place until its own poll finds the engine taken."""
        while not failures:
            try:
                engine.wake()
                engine.poll(buffers, 20)
            except FabricError:
                continue

    thief = threading.Thread(target=steal)
    thief.start()
    await wait_until(lambda: failures)
    await asyncio.to_thread(thief.join)
    assert len(failures) == 1
    errors = [call[2] for call in heard.calls if call[0] == "failed"]
    assert errors
    assert all(isinstance(error, UnavailableError) and error.reason == reasons.ENGINE_FAILED for error in errors)
    (refusal,) = host.submit([item(host, 9, [9], heard)])
    assert isinstance(refusal, UnavailableError)
    await host.close()
    await wait_until(lambda: engine_threads() == 0)


async def test_an_engine_may_be_closed_with_work_in_flight(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path, **{**GENERATING, "step_us": 50_000})
    host, heard = EngineHost(pytest.fail), Heard()
    await host.load(tmp_path)
    host.submit([item(host, handle, [handle], heard, max_tokens=64) for handle in range(20)])
    await asyncio.wait_for(host.close(), PATIENCE_S)
    assert host.stats().requests_submitted == 20
    assert heard.calls == [], "it did not wait for the work"


async def test_an_engine_that_was_closed_can_be_loaded_again(tmp_path: Path) -> None:
    made = write_simulated_engine(tmp_path, **GENERATING)
    host, heard = EngineHost(pytest.fail), Heard()
    await host.load(tmp_path)
    await host.close()
    await host.load(tmp_path)
    one = item(host, 1, [1, 2], heard)
    assert host.submit([one]) == [None]
    await wait_until(lambda: heard.calls)
    assert unpacked(bytes(one.samples[0].token_ids)) == Simulation(made).tokens([1, 2], 4)
    await host.close()
