# SPDX-License-Identifier: Apache-2.0
"""The queue by engine, as Prometheus reads it: what autoscalers of a tier look at."""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING

import pytest

from ifabric.provisioner.v1 import provisioner_service_pb2 as provisioner
from services.broker.core.catalog import EngineCatalog
from services.broker.core.metrics import CoreMetrics, divide
from services.broker.work import Lane
from services.common.telemetry import Telemetry
from tests.broker_core.made import DIGEST, OTHER, Bench, work

if TYPE_CHECKING:
    from collections.abc import Iterator

A, B = "engine-a", "engine-b"
"""Names of the two engines that a bench has."""


class Watched:
    """A bench whose metrics are scraped."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.bench = Bench()
        self.catalog = EngineCatalog(kept_s=5.0, channels=lambda _: [])
        self.metrics = CoreMetrics(telemetry, self.bench.decision, self.catalog)
        self._address = telemetry.serve_metrics("127.0.0.1:0")

    def accept(self, *digests: str, now: float = 0.0) -> None:
        """Says which engines accepted nodes serve."""
        nodes = []
        for at, digest in enumerate(digests):
            node = provisioner.Node()
            node.description.node_id, node.description.engine_digest = f"n{at}", digest
            node.description.contract.engine_id = f"engine-{digest[0]}"
            nodes.append(node)
        self.catalog.update(nodes, now=now)

    def text(self) -> str:
        with urllib.request.urlopen(f"http://{self._address}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    def depth(self) -> dict[tuple[str, str], int]:
        """(engine, lane) to what waits."""
        lines = re.findall(r'(?m)^ifabric_broker_queue_depth\{engine="([^"]+)",lane="(\w+)"\} (\S+)$', self.text())
        return {(engine, lane): int(float(value)) for engine, lane, value in lines}


@pytest.fixture
def watched() -> Iterator[Watched]:
    telemetry = Telemetry("broker")
    yield Watched(telemetry)
    telemetry.close()


def test_each_engine_has_a_queue_of_its_own_which_is_there_while_it_is_empty(watched: Watched) -> None:
    assert watched.depth() == {}, "no engine is known yet"
    watched.accept(DIGEST, OTHER)
    empty = {(engine, lane): 0 for engine in (A, B) for lane in ("bulk", "interactive")}
    assert watched.depth() == empty
    watched.bench.submit(
        *(work([10 + at]) for at in range(5)),
        work([3], digests=frozenset({OTHER}), job="other"),
        work([4], digests=frozenset({OTHER}), lane=Lane.INTERACTIVE, job=""),
    )
    assert watched.depth() == empty | {(A, "bulk"): 5, (B, "bulk"): 1, (B, "interactive"): 1}
    watched.bench.worker("w", sequences=2)
    given = watched.bench.give()
    assert 0 < len(given) < 5
    assert watched.depth()[A, "bulk"] == 5 - len(given), "what is dispatched waits no longer"


def test_what_several_engines_may_run_is_divided_among_their_workers(watched: Watched) -> None:
    watched.accept(DIGEST, OTHER)
    watched.bench.submit(*(work([1, at], digests=frozenset({DIGEST, OTHER})) for at in range(9)))
    assert (watched.depth()[A, "bulk"], watched.depth()[B, "bulk"]) == (5, 4), "nobody serves either"
    idle = [watched.bench.worker(f"a{at}", sequences=0) for at in range(2)]
    watched.bench.worker("b", digest=OTHER, sequences=0)
    assert (watched.depth()[A, "bulk"], watched.depth()[B, "bulk"]) == (6, 3)
    for worker in idle:
        watched.bench.decision.worker_cordoned(worker, True, watched.bench.now)
    assert (watched.depth()[A, "bulk"], watched.depth()[B, "bulk"]) == (0, 9), "a cordoned worker takes nothing"


def test_an_engine_that_left_is_forgotten_unless_work_waits_for_it(watched: Watched) -> None:
    watched.accept(DIGEST, OTHER)
    watched.bench.submit(work([1]))
    watched.accept(now=1.0)
    watched.accept(now=10.0)
    assert watched.depth() == {(A, "bulk"): 1}


def test_the_wait_is_that_of_the_engine_it_went_to(watched: Watched) -> None:
    watched.accept(DIGEST, OTHER)
    watched.bench.submit(work([1], digests=frozenset({DIGEST, OTHER}), lane=Lane.INTERACTIVE, job=""))
    watched.bench.now += 3.0
    watched.bench.worker("b", digest=OTHER)
    [attempt] = watched.bench.give()
    watched.metrics.waited(attempt, watched.bench.now)
    name = "ifabric_broker_queue_wait_duration_seconds"
    assert re.findall(rf"(?m)^{name}_sum(\S+) (\S+)$", watched.text()) == [
        (f'{{engine="{B}",lane="interactive"}}', "3.0")
    ]


@pytest.mark.parametrize(
    ("count", "workers", "parts"),
    [
        (0, {"a": 3}, {"a": 0}),
        (7, {"a": 0, "b": 0}, {"a": 4, "b": 3}),
        (10, {"a": 2, "b": 1, "c": 0}, {"a": 7, "b": 3, "c": 0}),
        (1, {"a": 1, "b": 2}, {"a": 0, "b": 1}),
    ],
)
def test_parts_are_whole_and_none_is_lost(count: int, workers: dict[str, int], parts: dict[str, int]) -> None:
    assert divide(count, workers) == parts
