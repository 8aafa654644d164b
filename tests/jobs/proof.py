# SPDX-License-Identifier: Apache-2.0
"""Exactly once: what a job brings must not depend on who died meanwhile.

The simulated engine's output is a function of the prompt. `lines` writes a job's results without what may differ
between two runs of the same work (what the cache saved, how fast the engine was set), so that two runs are compared
byte for byte.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import broker_service_pb2 as broker_pb2
from ifabric.broker.v1 import job_service_pb2 as wire
from tests.jobs.client import ENDED, JobClient, row
from tests.jobs.running import ENGINE, Fabric
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.jobs.running import Service

QUICK: dict[str, Any] = {"step_us": 2000, "slots": 8}
"""An engine on which 8 rows take 8 steps of 2 ms."""
MESSAGE_ROWS = 40


def work(count: int) -> list[wire.JobRow]:
    """Rows that share heads, in an order that does not."""
    return [
        row(
            f"row-{number}",
            broker_pb2.GenerationRequest(
                prompt=broker_pb2.Prompt(text=f"Head {number * 7 % 13} of several. " * 6 + f"And row {number}."),
                max_tokens=8,
                return_token_ids=True,
            ),
        )
        for number in range(count)
    ]


def least(prompts: Sequence[Sequence[int]], block_tokens: int) -> int:
    """The fewest tokens that a cache without limit computes, by going through the prompts one after the other."""
    held: set[tuple[int, ...]] = set()
    ends: set[tuple[int, ...]] = set()
    tokens = 0
    for prompt in prompts:
        whole = len(prompt) // block_tokens * block_tokens
        heads = {tuple(prompt[:end]) for end in range(block_tokens, whole + 1, block_tokens)}
        tokens += block_tokens * len(heads - held) + len(prompt) - whole
        if whole == len(prompt):
            tokens += tuple(prompt) in ends
            ends.add(tuple(prompt))
        held |= heads
    return tokens


def lines(results: Sequence[wire.RowResult]) -> bytes:
    """Results as bytes, one line each."""
    told = []
    for result in results:
        kept = wire.RowResult()
        kept.CopyFrom(result)
        if kept.HasField("finished"):
            kept.finished.ClearField("usage")
            kept.finished.ClearField("engine_digest")
        told.append(kept.SerializeToString(deterministic=True).hex())
    return "\n".join(told).encode()


def undisturbed(folder: Path, rows: Sequence[wire.JobRow]) -> bytes:
    """What the rows bring when nobody dies."""
    with Fabric(folder, engine=QUICK) as fabric, JobClient(fabric.start().brokers[0].address) as job:
        job.create()
        job.upload(rows)
        job.seal(len(rows))
        return lines(job.results())


class Client(threading.Thread):
    """Sends a job, seals it and reads its results while they come, whatever happens to the broker meanwhile."""

    def __init__(self, job: JobClient, rows: Sequence[wire.JobRow]) -> None:
        super().__init__(daemon=True)
        self.job = job
        self.rows = rows
        self.results: list[wire.RowResult] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """See the class."""
        try:
            self.job.create()
            self.job.upload(self.rows, message_rows=MESSAGE_ROWS)
            self.job.seal(len(self.rows))
            self.results = self.job.results()
        except BaseException as error:
            self.error = error

    def outcome(self, within_s: float) -> bytes:
        """What it got."""
        self.join(within_s)
        assert not self.is_alive(), "the client waits still"
        if self.error is not None:
            raise self.error
        return lines(self.results)


def kill_at_random(victims: Sequence[Service], watcher: JobClient, rows: int, kills: int, seed: int) -> int:
    """Kills one process after the other, spread over the whole job; returns how many.

    Between two kills some rows must end, so that the last one comes before the job's end and every start is lived
    through.
    """
    chance = random.Random(seed)
    done = 0
    for number in range(kills):
        goal = rows * (number + 1) // (kills + 2)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            job = watcher.get()
            if job.state in ENDED:
                return done
            # While rows are uploaded, or before anything runs, kills come by the clock.
            if job.finished_rows >= goal or job.state == wire.JOB_STATE_UPLOADING:
                break
            time.sleep(0.005)
        time.sleep(chance.random() * 0.1)
        victim = chance.choice(victims)
        victim.kill()
        victim.start()
        done += 1
    return done


def check_whole(job: JobClient, rows: Sequence[wire.JobRow]) -> None:
    """Every row once, in order, none failed."""
    block_until(lambda: job.get().state in ENDED, within_s=60, what="the end of the job")
    results = job.results()
    assert [result.row for result in results] == list(range(len(rows)))
    assert [result.row_id for result in results] == [sent.row_id for sent in rows]
    failed = [result for result in results if result.HasField("failed")]
    assert failed == []
    assert len({result.finished.engine_digest for result in results}) == 1
    end = job.get()
    assert (end.finished_rows, end.failed_rows) == (len(rows), 0)
    prompts = [list(sent.request.prompt.text.encode()) for sent in rows]
    report = end.report
    assert report.prompt_tokens_bound == least(prompts, ENGINE["kv_block_tokens"])
    # What it has cost is known whoever died meanwhile.
    assert report.HasField("running_ms")
    assert report.HasField("prompt_tokens_cut")
    assert report.head_prefills >= report.heads_held
