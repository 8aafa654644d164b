# SPDX-License-Identifier: Apache-2.0
"""A suite on cards, driven as a client drives it: started, loaded with a job, watched.

Client, broker, provisioner and workers are processes of their own on loopback. A worker sees one card.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np

from benchmarks import step_profile
from benchmarks.gpu import cards
from benchmarks.gpu.llama_engine import VOCABULARY
from ifabric.broker.v1 import broker_service_pb2 as pb
from ifabric.broker.v1 import broker_service_pb2_grpc as pb_grpc
from ifabric.provisioner.v1 import provisioner_service_pb2, provisioner_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

REQUESTS_A_MESSAGE = 64
LIMIT_S = 560.0
START_S = 180.0
WATCH_S = 0.25
MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """A suite that serves."""

    broker: str
    broker_pid: int
    workers: tuple[int, ...]
    """Process ids."""
    cards: tuple[int, ...]
    """The machine's number of each worker's card."""


class Ran(NamedTuple):
    """One job through the suite."""

    seconds: float
    computed: int
    bound: int
    generated: int
    idle_fraction: float
    """Part of the time in which no kernel ran, the mean over the cards, as the driver counts it; NaN of a short job."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens computed and tokens generated, a second: what llama-batched-bench calls S."""
        return (self.computed + self.generated) / self.seconds


@contextlib.contextmanager
def suite(directory: Path, logs: Path, count: int = 1, profile: Path | None = None) -> Iterator[Served]:
    """The services around an engine, a worker on each of the first `count` cards, until the block is left.

    `profile` is the file to which engines of the embedded runtime append what they called, None for none.
    """
    seen = cards.cards()[:count]
    command = [sys.executable, "-c", "from services.cli.main import main; main()", "up", "--json", "--free-ports"]
    command += ["--engine", str(directory), "--logs", str(logs), "--start-limit", str(START_S)]
    with contextlib.ExitStack() as stack:
        environment = _seeing(seen[0]) | ({step_profile.VARIABLE: str(profile)} if profile else {})
        process = stack.enter_context(_ended(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)))
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert "broker" in said, said
        provisioner = said["provisioner"]["address"]
        workers = [int(said["workers"][0]["pid"])]
        for card in seen[1:]:
            more = [sys.executable, "-m", "services.worker", "--listen", "127.0.0.1:0", "--provisioner", provisioner]
            more += ["--engine-dir", str(directory), "--node-id", f"card-{card}"]
            errors = stack.enter_context((logs / f"card-{card}.log").open("wb"))
            worker = subprocess.Popen(more, stdout=subprocess.PIPE, stderr=errors, env=_seeing(card))
            stack.enter_context(_ended(worker))
            workers.append(worker.pid)
        _wait_for(provisioner, len(seen))
        yield Served(said["broker"]["address"], int(said["broker"]["pid"]), tuple(workers), tuple(seen))


def run(
    served: Served,
    prompts: Sequence[Any],
    tokens: int,
    *,
    salted: bool = False,
    window: int = 0,
    payloads: bool | None = None,
) -> Ran:
    """Sends prompts, greedy and with a fixed number of tokens; fails where one fails.

    Args:
        served: The suite.
        prompts: Token ids, int32, one array each.
        tokens: Tokens that each generates; 0 on an engine that generates nothing.
        salted: Whether each prompt gets a salt of its own, so that none shares anything with another.
        window: Most prompts sent and not yet answered, each in a message of its own, so that the broker knows no more
            of the job than a client in a loop tells it. 0: all at once.
        payloads: Whether payloads are wanted and are checked to be there; None where the engine makes none.
    """
    room = threading.Semaphore(window) if window else None
    report = None
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
    with grpc.insecure_channel(served.broker, options=options) as channel, idleness(served.cards) as idle:
        began = time.perf_counter()
        call = pb_grpc.BrokerServiceStub(channel).Exchange(
            _messages(prompts, tokens, salted, room, omit=payloads is False), timeout=LIMIT_S
        )
        for answer in call:
            for outcome in answer.outcomes:
                assert outcome.HasField("finished"), outcome.failed
                if payloads is not None:
                    assert bool(outcome.finished.payload.data) == payloads, outcome.finished.payload.failure
                if room is not None:
                    room.release()
            report = answer.report if answer.HasField("report") else report
        seconds = time.perf_counter() - began
    assert report is not None
    assert report.generated_tokens == len(prompts) * tokens, report
    idle_part = statistics.fmean(idle.seen) if idle.seen else float("nan")
    return Ran(seconds, report.prompt_tokens_computed, report.prompt_tokens_bound, report.generated_tokens, idle_part)


def random_prompts(count: int, length: int, seed: int) -> list[Any]:
    """Prompts of seeded random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(300, VOCABULARY, length, dtype=np.int32) for _ in range(count)]


def shared_prompts(groups: int, members: int, head: int, tail: int, seed: int) -> list[Any]:
    """`groups * members` prompts, members of a group far apart: heads of `head` tokens, and each `tail` of its own."""
    heads = random_prompts(groups, head, seed)
    tails = random_prompts(groups * members, tail, seed + 1)
    return [np.concatenate((heads[i % groups], tails[i])) for i in range(groups * members)]


def moved(prompts: Sequence[Any], by: int) -> list[Any]:
    """The same workload with other ids, so that nothing of it is in a cache yet."""
    return [300 + (prompt - 300 + 1000 * by) % (VOCABULARY - 300) for prompt in prompts]


def worker_mib(served: Served) -> float | None:
    """Memory of the first worker's process on its card, in MiB; None where the driver does not tell."""
    with cards.driver() as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(served.cards[0])
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == served.workers[0] and process.usedGpuMemory is not None:
                return float(process.usedGpuMemory / 2**20)
    return None


def idleness(watched: Sequence[int]) -> cards.Watch[float]:
    """Looks at the part of the time in which no kernel ran on each card."""
    return cards.Watch(watched, lambda nvml, card: 1 - nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100, WATCH_S)


def _messages(
    prompts: Sequence[Any], tokens: int, salted: bool, room: threading.Semaphore | None, *, omit: bool
) -> Iterator[pb.ExchangeRequest]:
    each = REQUESTS_A_MESSAGE if room is None else 1
    for begin in range(0, len(prompts), each):
        requests = [
            pb.GenerationRequest(
                request_id=str(index),
                prompt=pb.Prompt(packed_token_ids=prompts[index].tobytes()),
                max_tokens=tokens,
                ignore_end=tokens > 0,
                cache_salt=str(index) if salted else "",
                omit_payload=omit,
            )
            for index in range(begin, min(begin + each, len(prompts)))
        ]
        if room is not None:
            room.acquire()
        opened = pb.ExchangeOpen(lane=pb.LANE_BULK, job_id="card") if begin == 0 else None
        yield pb.ExchangeRequest(open=opened, requests=requests)


def _seeing(card: int) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": str(card)}


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Ends a process with its block."""
    with process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def _wait_for(provisioner: str, nodes: int) -> None:
    """Returns once so many nodes are accepted."""
    give_up = time.monotonic() + START_S
    with grpc.insecure_channel(provisioner) as channel:
        stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(channel)
        wanted = provisioner_service_pb2.ListNodesRequest(states=[provisioner_service_pb2.NODE_STATE_ACCEPTED])
        while len(stub.ListNodes(wanted, timeout=10).nodes) < nodes:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{nodes} nodes did not serve within {START_S:g} s")
            time.sleep(0.2)
