# SPDX-License-Identifier: Apache-2.0
"""The soak of one suite: many requests, while clients cancel, leave, send rubbish and read slowly, and workers die.

Every request is accounted for: exactly one outcome, and, where it finished, the very tokens that the simulated engine
gives for its prompt; only what a client left behind has none. `tests.chaos.soak` runs many of these side by side:

    python -m tests.chaos.soaking --requests 20000 --seconds 60

writes its figures as a line of JSON every ten seconds and a last one, which has `ended`. SIGTERM stops the sending.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import broker_service_pb2
from services.common.errors import FabricError
from services.common.rpc import translated
from tests.chaos.client import client_of, request
from tests.chaos.metrics import scraped
from tests.chaos.sizes import Sizes
from tests.chaos.tally import Tally, faults
from tests.jobs.running import Fabric
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tests.chaos.client import Client, Request

WORKERS = 3
"""The first lives through the whole, so that its memory can be told; the others die."""
STREAMS = 4
STREAM_REQUESTS = 2_000
"""Requests of one stream; each stream is a client that comes and goes."""
MESSAGE_REQUESTS = 250
WARM_UP_SHARE = 0.25
EVERY_S = 10.0
"""Between two lines of figures, and two measurements of the processes."""
DRAIN_S = 90.0
"""What streams may take to end once nothing is sent any more; a worker that starts takes seconds of it."""
REST_S = 60.0
"""What the suite may take to have all workers and no work again."""


@dataclass(frozen=True, slots=True)
class Visit:
    """How one client behaves."""

    made: Sequence[Request]
    cancelled: frozenset[str]
    slow: bool
    leaves_after: int
    """Outcomes after which it goes away; more than it has requests where it stays."""


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
        self._began = time.monotonic()
        self._took_s: float | None = None
        self._at_rest = True
        self._stop = asyncio.Event()
        lasting = {"broker": fabric.brokers[0], "provisioner": fabric.provisioner, "worker": fabric.workers[0]}
        self._sizes = Sizes({name: service.process.pid for name, service in lasting.items() if service.process})
        self._warm_at = 0
        """Requests that had ended when the warm-up had."""
        self.tally = Tally()

    def stop(self) -> None:
        """Ends the sending; what was sent is waited for."""
        self._stop.set()

    async def run(self, client: Client, report: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
        """Runs it and returns the figures; `report` gets those so far, every ten seconds."""
        calm = asyncio.Event()
        chaos = asyncio.create_task(self._chaos(calm))
        streams = [asyncio.create_task(self._clients(client, number)) for number in range(STREAMS)]
        try:
            await self._watch(streams, report)
            self._took_s = time.monotonic() - self._began
            calm.set()
            await chaos
            await self._rest(client)
        finally:
            chaos.cancel()
            await asyncio.gather(chaos, *streams, return_exceptions=True)
        self._sizes.take()
        return self.figures() | {"ended": True}

    async def _watch(self, streams: list[asyncio.Task[None]], report: Callable[[dict[str, Any]], None]) -> None:
        """Measures and reports until all streams have ended, or have had their time to."""
        due_s, over_s = time.monotonic() + EVERY_S, float("inf")
        while not all(stream.done() for stream in streams) and time.monotonic() < over_s:
            await asyncio.wait(streams, timeout=0.5)
            if not self._sizes.warm and not self._stop.is_set() and self._warm():
                self._sizes.warmed_up()
                self._warm_at = self.tally.ended
            if self._progress() >= 1.0 and over_s == float("inf"):
                over_s = time.monotonic() + DRAIN_S
            if time.monotonic() >= due_s:
                due_s += EVERY_S
                self._sizes.take()
                report(self.figures() | {"ended": False})
        for stream in streams:
            if stream.done():
                stream.result()
            else:
                stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _clients(self, client: Client, number: int) -> None:
        """One client after another, until enough was sent or the suite failed one."""
        while self._progress() < 1.0:
            first = self.tally.sent
            count = min(STREAM_REQUESTS, self._requests - first)
            self.tally.sent += count
            rng = random.Random(self._rng.random())
            made = [self._request(rng, first + place) for place in range(count)]
            visit = Visit(
                made,
                cancelled=frozenset(each.request_id for each in made if rng.random() < 0.03),
                slow=rng.random() < 0.1,
                leaves_after=rng.randrange(count) if rng.random() < 0.03 else count + 1,
            )
            try:
                with translated():
                    await self._visit(client, visit, rng, job_id=f"soak-{number}")
            except FabricError as error:
                self.tally.complain(f"stream: {error.reason}: {error.message}")
                return

    async def _visit(self, client: Client, visit: Visit, rng: random.Random, *, job_id: str) -> None:
        open_ = {each.request_id: each for each in visit.made}
        call = client.stub.Exchange(self._messages(visit, rng, job_id), timeout=600)
        taken = 0
        try:
            async for message in call:
                for outcome in message.outcomes:
                    self.tally.take(open_.pop(outcome.request_id, None), outcome, visit.cancelled)
                taken += len(message.outcomes)
                if taken >= visit.leaves_after:
                    self.tally.left += len(open_)
                    open_.clear()
                    break
                if visit.slow:
                    await asyncio.sleep(0.02)  # a client that takes its time: the suite must wait for it, and not grow
        finally:
            call.cancel()
            self.tally.lost += len(open_)

    async def _messages(
        self, visit: Visit, rng: random.Random, job_id: str
    ) -> AsyncIterator[broker_service_pb2.ExchangeRequest]:
        """Requests, and cancels of some: half of these at once, half when the next ones have gone out."""
        yield broker_service_pb2.ExchangeRequest(open=broker_service_pb2.ExchangeOpen(job_id=job_id))
        later: list[str] = []
        for start in range(0, len(visit.made), MESSAGE_REQUESTS):
            part = visit.made[start : start + MESSAGE_REQUESTS]
            yield broker_service_pb2.ExchangeRequest(requests=part)
            await asyncio.sleep(rng.uniform(0, 0.02))  # some of these run by now
            due, later = later, []
            for each in part:
                if each.request_id in visit.cancelled:
                    (due if rng.random() < 0.5 else later).append(each.request_id)
            if due:
                yield broker_service_pb2.ExchangeRequest(cancel_request_ids=due)
        if later:
            yield broker_service_pb2.ExchangeRequest(cancel_request_ids=later)

    def _request(self, rng: random.Random, number: int) -> Request:
        head = [number // 500 % 250, 1, 2, 3] * 8
        ids = [*head, *(rng.randrange(256) for _ in range(rng.randrange(1, 24)))]
        wrong = rng.random() < 0.01
        return request(f"r{number}", ids, 0 if wrong else rng.randrange(1, 12), return_token_ids=True)

    async def _chaos(self, calm: asyncio.Event) -> None:
        """Lets one worker die at a time, and come back; ends with all of them alive."""
        while True:
            try:
                await asyncio.wait_for(calm.wait(), self._rng.uniform(4, 8))
                return
            except TimeoutError:
                victim = self._rng.choice(self._fabric.workers[1:])
            victim.kill()
            self.tally.deaths += 1
            await asyncio.sleep(self._rng.uniform(0.5, 2))
            await asyncio.to_thread(victim.start)

    async def _rest(self, client: Client) -> None:
        broker = self._fabric.brokers[0]

        async def idle() -> bool:
            with translated():
                served = await client.engines()
            work = ("ifabric_broker_in_flight", "ifabric_broker_queue_depth")
            return served == WORKERS and not any([await asyncio.to_thread(scraped, broker, name) for name in work])

        try:
            await wait_until(idle, within_s=REST_S, what="all workers are there and nothing is under way")
        except (AssertionError, FabricError) as error:
            self._at_rest = False
            self.tally.complain(str(error))

    def _progress(self) -> float:
        if self._stop.is_set():
            return 1.0
        return max(self.tally.sent / self._requests, (time.monotonic() - self._began) / self._limit_s)

    def _warm(self) -> bool:
        """Whether a quarter of the requests was answered, or a quarter of the time is over."""
        spent = (time.monotonic() - self._began) / self._limit_s
        return max(self.tally.ended / self._requests, spent) >= WARM_UP_SHARE

    def figures(self) -> dict[str, Any]:
        """What there is to say so far."""
        took_s = self._took_s if self._took_s is not None else time.monotonic() - self._began
        return self.tally.figures(took_s) | {
            "at_rest": self._at_rest,
            "since_warm_up": self.tally.ended - self._warm_at,
            "processes": self._sizes.figures(),
        }


async def soak(
    folder: Path,
    *,
    requests: int,
    limit_s: float,
    seed: int = 1,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Starts a suite, runs the soak against it, and returns the figures; SIGTERM stops the sending once it is up.

    Args:
        folder: For engine and journal.
        requests: How many to send.
        limit_s: When to stop sending all the same, in seconds.
        seed: Of everything that is random.
        report: Gets the figures so far, every ten seconds.
    """
    loop = asyncio.get_running_loop()
    with Fabric(folder, workers=WORKERS) as fabric:
        fabric.start()
        async with client_of(fabric, nodes=WORKERS) as client:
            run = Soak(fabric, requests=requests, limit_s=limit_s, seed=seed)
            loop.add_signal_handler(signal.SIGTERM, run.stop)
            return await run.run(client, report)


def main() -> int:
    """Entry point of one suite's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, nargs="+", help="run on these only, services included")
    said = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped before the suite was up"))
    if said.cores:
        os.sched_setaffinity(0, said.cores)

    def report(figures: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(
            soak(Path(folder), requests=said.requests, limit_s=said.seconds, seed=said.seed, report=report)
        )
    problems = faults(figures)
    report({**figures, "faults": problems})
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
