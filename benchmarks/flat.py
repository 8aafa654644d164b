# SPDX-License-Identifier: Apache-2.0
"""Memory over very many rows of hidden states, through the whole suite: `make bench-flat`.

One job of `--rows` rows (1,000,000) of 32 tokens on a simulated engine whose time is virtual. Every row brings back 8
KB with a checksum; the client compares it and drops them. Broker, worker, provisioner and client are looked at after
every tenth of the rows; `growth_mib_*` is what each has more at the end than after the first tenth.
"""

from __future__ import annotations

import argparse
import time
import zlib
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc
import numpy as np
import psutil

from benchmarks.frame import Report
from benchmarks.throughput import Suite
from ifabric.broker.v1 import broker_service_pb2 as wire
from ifabric.broker.v1 import broker_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, PROMPT_TOKENS, PROMPTS, BATCH = 4096, 32, 4096, 64
PARTS = 10
READY_S = 60.0


def messages(rows: int) -> Iterator[wire.ExchangeRequest]:
    """The job; prompts come again, ids do not."""
    rng = np.random.default_rng(5)
    prompts = [row.tobytes() for row in rng.integers(300, 1024, (PROMPTS, PROMPT_TOKENS), dtype=np.int32)]
    yield wire.ExchangeRequest(open=wire.ExchangeOpen(job_id="flat", lane=wire.LANE_BULK))
    for first in range(0, rows, BATCH):
        requests = [
            wire.GenerationRequest(
                request_id=str(row), prompt=wire.Prompt(packed_token_ids=prompts[row * 7919 % PROMPTS])
            )
            for row in range(first, min(first + BATCH, rows))
        ]
        yield wire.ExchangeRequest(requests=requests)


def look(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Resident memory of each, in MiB."""
    return {name: process.memory_info().rss / 2**20 for name, process in processes.items()}


def main() -> None:
    """Runs the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    report = Report("flat")
    with ExitStack() as stack:
        suite = Suite(
            stack, max_output_tokens=0, max_input_tokens=128, payload_dtype="float16", hidden_size=HIDDEN,
            vocab_size=1024, kv_block_tokens=None, kv_pool_blocks=None, time_mode="virtual",
        )  # fmt: skip
        services = {"broker": suite.broker, "worker": suite.worker, "provisioner": suite.provisioner}
        processes = {name: psutil.Process(service.pid) for name, service in services.items()}
        processes["client"] = psutil.Process()
        channel = stack.enter_context(
            grpc.insecure_channel(suite.broker.address, options=[("grpc.max_receive_message_length", 64 << 20)])
        )
        stub = broker_service_pb2_grpc.BrokerServiceStub(channel)
        give_up = time.monotonic() + READY_S
        while not stub.ListEngines(wire.ListEnginesRequest(), timeout=5).engines:
            assert time.monotonic() < give_up, "no engine serves"
            time.sleep(0.1)
        looks: list[dict[str, float]] = []
        ended, began = 0, time.perf_counter()
        for answer in stub.Exchange(messages(rows)):
            for outcome in answer.outcomes:
                payload = outcome.finished.payload
                assert len(payload.data) == 2 * HIDDEN, outcome
                assert zlib.crc32(payload.data) == payload.crc32, outcome.request_id
                ended += 1
                if ended % (rows // PARTS) == 0:
                    looks.append(look(processes))
                    words = ", ".join(f"{name} {mib:,.0f} MiB" for name, mib in looks[-1].items())
                    print(f"{ended:,} rows, {ended / (time.perf_counter() - began):,.0f} a second: {words}", flush=True)
        seconds = time.perf_counter() - began
    assert ended == rows, ended
    report.figure("rows_per_s", [rows / seconds], unit="1/s")
    for name in looks[0]:
        report.figure(f"growth_mib_{name}", [looks[-1][name] - looks[0][name]], unit="MiB", goal="none")
        report.fact(f"mib_{name}", [round(each[name], 1) for each in looks])
    report.fact("rows", rows)
    report.print()


if __name__ == "__main__":
    main()
