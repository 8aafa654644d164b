# SPDX-License-Identifier: Apache-2.0
"""A soak: many requests in scaled time, while clients cancel, send rubbish and read slowly, and workers die and join.

    make soak                       # as many as fit into three minutes
    make soak REQUESTS=10000000     # the whole

Every request is accounted for: exactly one outcome, and, where it finished, the very tokens that the simulated engine
gives for its prompt. At the end memory and descriptors of each process are compared with what they were after the
warm-up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from engines.simulated import SimulatedEngine, Simulation
from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import generation_pb2
from services.common.errors import FabricError, UnavailableError
from tests.chaos.client import client_of, request, result_of
from tests.jobs.running import ENGINE, Fabric
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.chaos.client import Client, Request

WORKERS = 3
STREAMS = 4
STREAM_REQUESTS = 2_000
"""Requests of one stream; each stream is a client that comes and goes."""
CHECK_ONE_IN = 16
"""How many finished requests are compared token by token: the comparison costs more than the request."""
WARM_UP_SHARE = 0.25
GROWTH_MB = 40.0
"""What a process may have grown by, over its size after the warm-up: pools of the allocator, not of ours."""
DESCRIPTORS = 24
"""What its count of descriptors may differ by: connections that are being made or closed."""


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    doubled: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    deaths: int = 0
    checked: int = 0

    @property
    def ended(self) -> int:
        """Requests with an outcome."""
        return sum(self.outcomes.values())


class Soak:
    """One run.

    Args:
        fabric: The suite.
        requests: How many to send.
        limit_s: When to stop sending all the same.
        seed: Of everything that is random.
    """

    def __init__(self, fabric: Fabric, *, requests: int, limit_s: float, seed: int) -> None:
        self._fabric = fabric
        self._requests = requests
        self._limit_s = limit_s
        self._rng = random.Random(seed)
        self._simulation = Simulation(SimulatedEngine(**ENGINE))
        self._sent = 0
        self._began = time.monotonic()
        self.tally = Tally()

    async def run(self, client: Client) -> dict[str, Any]:
        """Runs it and returns the figures."""
        chaos = asyncio.create_task(self._chaos())
        streams = [asyncio.create_task(self._clients(client, number)) for number in range(STREAMS)]
        warm: dict[str, tuple[float, int]] = {}
        try:
            while not all(stream.done() for stream in streams):
                await asyncio.wait(streams, timeout=1.0)
                if not warm and self._progress() >= WARM_UP_SHARE:
                    warm = self._sizes()
            for stream in streams:
                stream.result()
        finally:
            chaos.cancel()
            await asyncio.gather(chaos, *streams, return_exceptions=True)
        took_s = time.monotonic() - self._began
        await wait_until(lambda: self._idle(client), within_s=60, what="everything has come back to rest")
        return self._figures(took_s, warm)

    async def _clients(self, client: Client, number: int) -> None:
        """One client after another, until enough was sent."""
        while self._progress() < 1.0:
            count = min(STREAM_REQUESTS, self._requests - self._sent)
            first, self._sent = self._sent, self._sent + count
            rng = random.Random(self._rng.random())
            made = [self._request(rng, first + place) for place in range(count)]
            cancelled = {each.request_id for each in made if rng.random() < 0.03}
            try:
                await self._stream(client, made, cancelled, slow=rng.random() < 0.1, number=number)
            except FabricError as error:
                self.tally.wrong.append(f"stream: {error.reason}: {error.message}")
                return

    async def _stream(
        self, client: Client, made: Sequence[Request], cancelled: set[str], *, slow: bool, number: int
    ) -> None:
        open_ = {each.request_id: each for each in made}

        async def messages() -> AsyncIterator[broker_service_pb2.ExchangeRequest]:
            yield broker_service_pb2.ExchangeRequest(open=broker_service_pb2.ExchangeOpen(job_id=f"soak-{number}"))
            for start in range(0, len(made), 250):
                part = made[start : start + 250]
                ended = [each.request_id for each in part if each.request_id in cancelled]
                yield broker_service_pb2.ExchangeRequest(requests=part)
                yield broker_service_pb2.ExchangeRequest(cancel_request_ids=ended)

        call = client.stub.Exchange(messages(), timeout=600)
        try:
            async for message in call:
                for outcome in message.outcomes:
                    self._take(open_.pop(outcome.request_id, None), outcome, cancelled)
                if slow:
                    await asyncio.sleep(0.02)  # a client that takes its time: the suite must wait for it, and not grow
        finally:
            call.cancel()
        self.tally.lost += len(open_)

    def _take(self, made: Request | None, outcome: broker_service_pb2.RequestOutcome, cancelled: set[str]) -> None:
        tally = self.tally
        if made is None:
            tally.doubled += 1
            return
        result = result_of(outcome)
        if isinstance(result, FabricError):
            tally.outcomes[result.reason] += 1
            good = made.max_tokens > 0
            if good and not isinstance(result, UnavailableError):
                tally.wrong.append(f"{outcome.request_id}: {result.reason}: {result.message}")
            return
        (sample,) = result.samples
        if sample.finish_reason == generation_pb2.FINISH_REASON_CANCELLED:
            tally.outcomes["cancelled"] += 1
            if outcome.request_id not in cancelled:
                tally.wrong.append(f"{outcome.request_id}: cancelled by nobody")
            return
        tally.outcomes["finished"] += 1
        if tally.outcomes["finished"] % CHECK_ONE_IN == 0:
            tally.checked += 1
            expected = self._simulation.tokens(list(made.prompt.tokens.ids), made.max_tokens)
            if list(sample.token_ids) != expected:
                tally.wrong.append(f"{outcome.request_id}: other tokens than its prompt gives")

    def _request(self, rng: random.Random, number: int) -> Request:
        head = [number // 500 % 250, 1, 2, 3] * 8
        ids = [*head, *(rng.randrange(256) for _ in range(rng.randrange(1, 24)))]
        wrong = rng.random() < 0.01
        return request(f"r{number}", ids, 0 if wrong else rng.randrange(1, 12), return_token_ids=True)

    async def _chaos(self) -> None:
        """Lets one worker die at a time, and come back."""
        while True:
            await asyncio.sleep(self._rng.uniform(4, 8))
            victim = self._rng.choice(self._fabric.workers)
            victim.kill()
            self.tally.deaths += 1
            await asyncio.sleep(self._rng.uniform(0.5, 2))
            await asyncio.to_thread(victim.start)

    async def _idle(self, client: Client) -> bool:
        return await client.engines() == WORKERS

    def _progress(self) -> float:
        return max(self._sent / self._requests, (time.monotonic() - self._began) / self._limit_s)

    def _sizes(self) -> dict[str, tuple[float, int]]:
        """Resident memory in MB and open descriptors of what lives through the whole run."""
        found = {}
        for name, service in (("broker", self._fabric.brokers[0]), ("provisioner", self._fabric.provisioner)):
            assert service.process is not None
            process = psutil.Process(service.process.pid)
            found[name] = process.memory_info().rss / 1e6, process.num_fds()
        return found

    def _figures(self, took_s: float, warm: dict[str, tuple[float, int]]) -> dict[str, Any]:
        tally, after = self.tally, self._sizes()
        figures: dict[str, Any] = {
            "requests": self._sent,
            "seconds": round(took_s, 1),
            "requests_a_second": round(tally.ended / took_s),
            "outcomes": dict(tally.outcomes),
            "lost": tally.lost,
            "doubled": tally.doubled,
            "wrong": len(tally.wrong),
            "checked_token_by_token": tally.checked,
            "worker_deaths": tally.deaths,
        }
        for name, (megabytes, descriptors) in warm.items():
            figures[f"{name}_growth_mb"] = round(after[name][0] - megabytes, 1)
            figures[f"{name}_descriptors_more"] = after[name][1] - descriptors
        return figures


def faults(figures: dict[str, Any]) -> list[str]:
    """What a run's figures must not say, in sentences; empty where it went well."""
    found = [f"{figures[what]} requests were {what}" for what in ("lost", "doubled", "wrong") if figures[what]]
    for name in ("broker", "provisioner"):
        growth, more = figures.get(f"{name}_growth_mb", 0.0), figures.get(f"{name}_descriptors_more", 0)
        if growth > GROWTH_MB:
            found.append(f"the {name} grew by {growth} MB after the warm-up; at most {GROWTH_MB:g}")
        if more > DESCRIPTORS:
            found.append(f"the {name} has {more} descriptors more than after the warm-up; at most {DESCRIPTORS}")
    return found


async def soak(folder: Path, *, requests: int, limit_s: float, seed: int = 1) -> dict[str, Any]:
    """Starts a suite, runs the soak against it, and returns the figures.

    Args:
        folder: For engine and journal.
        requests: How many to send.
        limit_s: When to stop sending all the same, in seconds.
        seed: Of everything that is random.
    """
    with Fabric(folder, workers=WORKERS) as fabric:
        fabric.start()
        async with client_of(fabric, nodes=WORKERS) as client:
            run = Soak(fabric, requests=requests, limit_s=limit_s, seed=seed)
            figures = await run.run(client)
            for sentence in run.tally.wrong[:10]:
                sys.stderr.write(sentence + "\n")
            return figures


def main() -> int:
    """Entry point of `make soak`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(soak(Path(folder), requests=said.requests, limit_s=said.seconds, seed=said.seed))
    problems = faults(figures)
    for problem in problems:
        sys.stderr.write(problem + "\n")
    sys.stdout.write(json.dumps({**figures, "faults": problems}) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
