# SPDX-License-Identifier: Apache-2.0
"""Serves the mining network on a card through the whole suite, checks every kind of answer, and measures it.

    python3 -m benchmarks.gpu.serve_mining --format bfloat16 --rows 16 --prompts 20000 --work FOLDER
    python3 -m benchmarks.gpu.serve_mining --format fp8 --layers 32 --rows 64 --prompts 8000 --fused LIB --work FOLDER

Client, broker, provisioner and worker are processes of their own on loopback; IFAB_ENGINE_LIBRARY names a library that
is built with the raw TensorRT backend. Beside it, in the same run: the bare loop (the same plan, launched back to back
in this process before the suite starts). Checked: hidden states against PyTorch on the same weights, bad rows beside
good ones, rows returned against rows not wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from benchmarks.gpu import mining_plan
from benchmarks.gpu.cards import card_mb
from benchmarks.gpu.driving import run, suite, worker_mib
from benchmarks.gpu.mining_model import (
    ROW_TOKENS,
    RandomWeights,
    dense_7b,
    expected_and_scales,
    make_feeds,
    torch_reference,
)
from benchmarks.gpu.plan_runner import Runner
from benchmarks.gpu.roofline import timed
from engines.graph import plugins
from engines.mining.directory import MiningEngine, write_directory
from engines.mining.packing import pack
from engines.simulated import write_simulated_engine
from ifabric.broker.v1 import broker_service_pb2 as pb
from ifabric.broker.v1 import broker_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.gpu.driving import Served
    from engines.model_config import ModelShape

ROWS_A_MESSAGE = 64


def build(arguments: argparse.Namespace) -> tuple[Path, ModelShape, RandomWeights, float]:
    """Builds the plan and its engine directory; returns them with the bare loop's tokens a second."""
    import tensorrt_bindings as trt
    import torch

    shape = dense_7b(arguments.layers)
    weights = RandomWeights(shape, 7)
    _, found = expected_and_scales(shape, weights, make_feeds(shape, 8, 3))
    scales = found if arguments.format == "fp8" else None
    rows, fused = arguments.rows, mining_plan.fusion_of(arguments)
    if arguments.fused is not None:
        plugins.load(trt, arguments.fused)
        # For a native library that looks for plugins by name alone, and not in the engine's directory first.
        paths = [str(arguments.fused.resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
    logger = trt.Logger(trt.Logger.WARNING)
    packed = arguments.layout == "packed"
    made = mining_plan.make_plan(trt, logger, shape, weights, rows=rows, scales=scales, packed=packed, fused=fused)
    plan = made.plan
    print(f"recorded in {made.recorded_s:.0f} s, built in {made.built_s:.0f} s, {len(plan) / 1e9:.2f} GB", flush=True)
    runner = Runner(trt, logger, plan)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        runner.bind(make_feeds(shape, rows, 5), shape.hidden_size)
        bare = rows * ROW_TOKENS / statistics.median(timed(runner.launch, 30 if shape.layers > 8 else 100)) * 1e3
    del runner
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    engine = MiningEngine(
        engine_id=f"dense-7b-{shape.layers}-layers-{arguments.format}-mining".replace("_", "-"),
        shape=shape,
        row_tokens=ROW_TOKENS,
        rows=rows,
        slots=rows * 8,
        weights_dtype="fp8_e4m3" if scales else "bfloat16",
        activations_dtype="bfloat16",
        layers=(-1,),
        card_family=name,
        compute_capability=f"{major}.{minor}",
        card_memory_bytes=len(plan) + (4 << 30),
        longest_step_ms=5000,
        runtime_version=trt.__version__,
        flags=(f"rows={rows}", f"layout={arguments.layout}", "weights=random", f"kernels={mining_plan.label(fused)}"),
        calibration="8 random rows" if scales else None,
        plugins=() if arguments.fused is None else (arguments.fused,),
    )
    scratch = arguments.work / "tokenizer"
    write_simulated_engine(scratch)
    directory = arguments.work / "engine"
    write_directory(directory, engine, plan, (scratch / "tokenizer.json").read_bytes())
    return directory, shape, weights, bare


def prompts_of(count: int, vocab_size: int, shortest: int) -> list[Any]:
    """Seeded prompts of `shortest` to 128 tokens."""
    rng = np.random.default_rng(11)
    lengths = rng.integers(shortest, ROW_TOKENS + 1, count)
    return [rng.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]


def messages(prompts: list[Any], bad: set[int]) -> Iterator[Any]:
    """The stream to the broker: packed ids, many rows a message; rows in `bad` have an id out of range."""
    for begin in range(0, len(prompts), ROWS_A_MESSAGE):
        requests = []
        for index in range(begin, min(begin + ROWS_A_MESSAGE, len(prompts))):
            ids = prompts[index] if index not in bad else np.array([1, 2**31 - 1], np.int32)
            requests.append(
                pb.GenerationRequest(request_id=str(index), prompt=pb.Prompt(packed_token_ids=ids.tobytes()))
            )
        first = pb.ExchangeOpen(lane=pb.LANE_BULK, job_id="mining") if begin == 0 else None
        yield pb.ExchangeRequest(open=first, requests=requests)


def run_rows(address: str, prompts: list[Any], bad: set[int]) -> tuple[dict[int, Any], int]:
    """Sends all rows; returns the vectors of those that are not bad, as uint16 words, and how many rows failed."""
    options = [("grpc.max_receive_message_length", 64 << 20)]
    kept: dict[int, Any] = {}
    failed = 0
    with grpc.insecure_channel(address, options=options) as channel:
        for answer in pb_grpc.BrokerServiceStub(channel).Exchange(messages(prompts, bad), timeout=500):
            for outcome in answer.outcomes:
                index = int(outcome.request_id)
                if outcome.HasField("failed"):
                    failed += 1
                    assert index in bad, outcome.failed
                    continue
                payload = outcome.finished.payload
                assert len(payload.data) == 8192, payload.failure
                assert zlib.crc32(payload.data) == payload.crc32
                kept[index] = np.frombuffer(payload.data, np.uint16).copy()
        return kept, failed


def memory_mb(served: Served) -> dict[str, float | None]:
    """Resident memory of broker and worker, and what the card has in use, all and by the worker; MB and MiB."""

    def resident(pid: int) -> float:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6

    broker, worker = resident(served.broker_pid), resident(served.workers[0])
    return {
        "broker": round(broker),
        "worker": round(worker),
        "card": card_mb(),
        "worker_on_card_mib": worker_mib(served),
    }


def cosines(shape: ModelShape, weights: RandomWeights, prompts: list[Any], kept: dict[int, Any]) -> list[float]:
    """Cosine of each kept vector with PyTorch's on the same prompt."""
    import torch

    found: list[float] = []
    order = sorted(kept)
    for begin in range(0, len(order), 64):
        part = order[begin : begin + 64]
        feeds = {k: torch.from_numpy(v).cuda() for k, v in pack([prompts[i] for i in part], ROW_TOKENS).items()}
        expected = torch_reference(shape, weights, feeds).float()
        words = np.stack([kept[i] for i in part]).astype(np.int16)
        got = torch.from_numpy(words).cuda().view(torch.bfloat16).float()
        found += torch.nn.functional.cosine_similarity(got, expected).tolist()
    return found


def main() -> None:
    """Builds, serves, checks and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=["bfloat16", "fp8"], default="bfloat16")
    parser.add_argument("--layout", choices=["packed", "own-rows"], default="packed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, required=True)
    mining_plan.add_options(parser)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    directory, shape, weights, bare = build(arguments)
    print(f"bare loop {bare:,.0f} tokens/s", flush=True)
    rates: dict[str, list[float]] = {"returned": [], "omitted": []}
    with suite(directory, arguments.work / "logs") as served:
        mixed = prompts_of(2000, shape.vocab_size, 1)
        bad = set(range(0, 2000, 100))
        kept, failed = run_rows(served.broker, mixed, bad)
        similar = cosines(shape, weights, mixed, kept)
        print(f"{len(kept)} rows of mixed length, cosine min {min(similar):.5f}; {failed} bad rows", flush=True)
        full = prompts_of(arguments.prompts, shape.vocab_size, ROW_TOKENS)
        memory = [memory_mb(served)]
        for _ in range(arguments.repeats):
            for name in rates:
                ran = run(served, full, 0, payloads=name == "returned")
                rates[name].append(ran.computed / ran.seconds)
                print(f"{len(full)} rows, {name}, in {ran.seconds:.2f} s, {rates[name][-1]:,.0f} tokens/s", flush=True)
            memory.append(memory_mb(served))
            print(memory[-1], flush=True)
    figures = {
        "format": arguments.format,
        "layout": arguments.layout,
        "rows": arguments.rows,
        "layers": arguments.layers,
        "kernels": mining_plan.label(mining_plan.fusion_of(arguments)),
        "bare_tokens_per_s": bare,
        "suite_tokens_per_s": rates,
        "returned_over_omitted": statistics.median(rates["returned"]) / statistics.median(rates["omitted"]),
        "memory_mb_before_and_after_each": memory,
        "suite_over_bare": statistics.median(rates["returned"]) / bare,
        "cosine_min": min(similar),
        "cosine_median": statistics.median(similar),
        "rows_checked": len(similar),
        "bad_rows": failed,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
