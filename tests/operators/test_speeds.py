# SPDX-License-Identifier: Apache-2.0
"""Speeds that are learnt from counters are those of the engine that counted."""

from __future__ import annotations

import random

import pytest

from ifabric.engine.v1 import node_pb2
from services.broker.core.speeds import SpeedBook


class Engine:
    """Counts as an engine does whose steps cost 900 us, 11 a prompt token and 140 a generated one."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self.stats = node_pb2.EngineStats()
        self._random = random.Random(seed)
        self._noise = noise

    def work(self) -> node_pb2.EngineStats:
        steps = self._random.randint(5, 40)
        prompt, generated = self._random.randint(0, 200) * steps, self._random.randint(0, 16) * steps
        busy = (900 * steps + 11 * prompt + 140 * generated) * self._random.uniform(1 - self._noise, 1 + self._noise)
        stats = self.stats
        stats.steps += steps
        stats.prompt_tokens_computed += prompt
        stats.generated_tokens += generated
        stats.busy_us += round(busy)
        return stats


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.001), (0.1, 0.1)])
def test_the_three_costs_are_found(noise: float, within: float) -> None:
    book, engine = SpeedBook(), Engine(1, noise)
    assert book.pace("e") is None
    for _ in range(400):
        book.learn("w", "e", engine.work())
    pace = book.pace("e")
    assert pace is not None
    assert (pace.step_us, pace.prompt_token_us, pace.generated_token_us) == pytest.approx((900, 11, 140), rel=within)


def test_an_engine_that_slows_down_is_followed() -> None:
    book, engine = SpeedBook(), Engine(2)
    for _ in range(300):
        book.learn("w", "e", engine.work())
    for _ in range(2000):
        before = engine.stats.busy_us
        engine.work()
        engine.stats.busy_us += engine.stats.busy_us - before
        book.learn("w", "e", engine.stats)
    pace = book.pace("e")
    assert pace is not None
    assert pace.prompt_token_us == pytest.approx(22, rel=0.02)


def test_what_an_engine_only_ever_does_together_is_still_predicted() -> None:
    book, stats = SpeedBook(), node_pb2.EngineStats()
    for _ in range(50):
        stats.steps += 10
        stats.generated_tokens += 160
        stats.busy_us += 10_000
        book.learn("w", "e", stats)
    pace = book.pace("e")
    assert pace is not None
    assert pace.busy_us(10, 0, 160) == pytest.approx(10_000, rel=1e-6)
    assert min(pace.step_us, pace.prompt_token_us, pace.generated_token_us) >= 0


def test_too_little_tells_no_speed_and_a_restarted_worker_is_read_anew() -> None:
    book, stats = SpeedBook(), node_pb2.EngineStats(steps=5, generated_tokens=5, busy_us=5000)
    book.learn("w", "e", stats)
    assert book.pace("e") is None
    book.forget("w")
    book.learn("w#2", "e", node_pb2.EngineStats(steps=30, generated_tokens=30, busy_us=30_000))
    pace = book.pace("e")
    assert pace is not None
    assert pace.busy_us(1, 0, 1) == pytest.approx(1000, rel=1e-6)


def test_the_share_of_output_that_is_used() -> None:
    book = SpeedBook()
    assert book.output_share("e") is None
    for _ in range(10):
        book.ended("e", 100, 25)
    assert book.output_share("e") == pytest.approx(0.25)
