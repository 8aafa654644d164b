# SPDX-License-Identifier: Apache-2.0
"""Serves a 7B F16 model (random weights) on a card with the embedded runtime, through the whole suite, and measures it.

    python3 -m benchmarks.gpu.serve_llama STAGE --root ROOT --work FOLDER

ROOT is what `benchmarks/gpu/build_llama.sh` made; IFAB_ENGINE_LIBRARY names a library that is built on it. Client,
broker, provisioner and worker are processes of their own on loopback. Stages, each one JSON line at its end, also kept
in FOLDER/STAGE.json:

    plain   128 + 128 tokens, 256 slots, nothing shared, beside llama-batched-bench in the same run, turn by turn
    heads   64 groups of 16 prompts with heads of 2,048 tokens: with sharing, without, and the bound from measured rates
    sweep   token budget x slots, three by three
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np

from benchmarks.gpu.llama_engine import VOCABULARY, CardEngine, write_directory, write_model
from ifabric.broker.v1 import broker_service_pb2 as pb
from ifabric.broker.v1 import broker_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS_A_MESSAGE = 64
LIMIT_S = 400.0


class Rates(NamedTuple):
    """What llama-batched-bench says of one shape, in tokens a second."""

    prefill: float
    decode: float
    both: float


class Ran(NamedTuple):
    """One job through the suite."""

    seconds: float
    computed: int
    bound: int
    generated: int

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens computed and tokens generated, a second: what the bench calls S."""
        return (self.computed + self.generated) / self.seconds


def batched_bench(root: Path, model: Path, prompt: int, generated: int, sequences: int, ubatch: int) -> Rates:
    """Runs upstream's own benchmark, one stream a sequence, flash attention, everything on the card."""
    cells = sequences * (-(-(prompt + generated) // 256) * 256)
    command = [root / "bin/llama-batched-bench", "-m", model, "-ngl", 99, "-fa", "on", "-c", cells, "-b", 2048]
    command += ["-ub", ubatch, "-npp", prompt, "-ntg", generated, "-npl", sequences, "--output-format", "jsonl"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith('{"n_kv_max"')]
    if not lines:
        raise RuntimeError(f"llama-batched-bench gave no figures: {done.stderr[-2000:]}")
    said = json.loads(lines[-1])
    return Rates(said["speed_pp"], said["speed_tg"], said["speed"])


@contextlib.contextmanager
def suite(directory: Path, logs: Path) -> Iterator[str]:
    """The three services around an engine; gives the broker's address."""
    command = [sys.executable, "-c", "from services.cli.main import main; main()", "up", "--json", "--free-ports"]
    command += ["--engine", str(directory), "--logs", str(logs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["broker"]["address"]
        finally:
            process.send_signal(signal.SIGTERM)


def run(address: str, prompts: list[Any], tokens: int, *, salted: bool = False) -> Ran:
    """Sends prompts, greedy and with a fixed number of tokens; with `salted` none shares anything with another."""
    began = time.perf_counter()
    report = None
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 64 << 20)]) as channel:
        for answer in pb_grpc.BrokerServiceStub(channel).Exchange(_messages(prompts, tokens, salted), timeout=LIMIT_S):
            for outcome in answer.outcomes:
                assert outcome.HasField("finished"), outcome.failed
            report = answer.report if answer.HasField("report") else report
    assert report is not None
    assert report.generated_tokens == len(prompts) * tokens, report
    seconds = time.perf_counter() - began
    return Ran(seconds, report.prompt_tokens_computed, report.prompt_tokens_bound, report.generated_tokens)


def _messages(prompts: list[Any], tokens: int, salted: bool) -> Iterator[pb.ExchangeRequest]:
    for begin in range(0, len(prompts), REQUESTS_A_MESSAGE):
        requests = [
            pb.GenerationRequest(
                request_id=str(index),
                prompt=pb.Prompt(packed_token_ids=prompts[index].tobytes()),
                max_tokens=tokens,
                ignore_end=True,
                cache_salt=str(index) if salted else "",
            )
            for index in range(begin, min(begin + REQUESTS_A_MESSAGE, len(prompts)))
        ]
        opened = pb.ExchangeOpen(lane=pb.LANE_BULK, job_id="card") if begin == 0 else None
        yield pb.ExchangeRequest(open=opened, requests=requests)


def random_prompts(count: int, length: int, seed: int) -> list[Any]:
    """Prompts of seeded random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(300, VOCABULARY, length, dtype=np.int32) for _ in range(count)]


def plain(context: argparse.Namespace) -> dict[str, Any]:
    """Nothing shared: the suite beside upstream's benchmark."""
    engine = CardEngine(256, 0, 128, 128, context.budget)
    directory = prepare(context, engine)
    figures: dict[str, list[float]] = {"bench_512": [], "bench_2048": [], "suite": []}
    for turn in range(context.repeats):
        for ubatch in (512, 2048):
            rates = batched_bench(context.root, context.model, 128, 128, 256, ubatch)
            figures[f"bench_{ubatch}"].append(rates.both)
            print(f"bench, ubatch {ubatch}: {rates}", flush=True)
        with suite(directory, context.work / "logs") as address:
            run(address, random_prompts(64, 128, 99), 16)
            ran = run(address, random_prompts(context.requests, 128, turn), 128)
        figures["suite"].append(ran.tokens_per_s)
        print(f"suite: {ran.tokens_per_s:,.0f} tokens/s, {ran}", flush=True)
    best = max(statistics.median(figures["bench_512"]), statistics.median(figures["bench_2048"]))
    return {**figures, "layout": "streams", "suite_over_bench": statistics.median(figures["suite"]) / best}


def heads(context: argparse.Namespace) -> dict[str, Any]:
    """Shared heads, with and without sharing, and the bound."""
    groups, members, head, tail, out = 64, 16, 2048, 64, 64
    engine = CardEngine(64, 24, head + tail, out, 4096)
    directory = prepare(context, engine)
    rates = batched_bench(context.root, context.model, head + tail, out, 64, 2048)
    print("bench:", rates, flush=True)
    tops = random_prompts(groups, head, 7)
    tails = random_prompts(groups * members, tail, 8)
    prompts = [np.concatenate((tops[i % groups], tails[i])) for i in range(groups * members)]
    with suite(directory, context.work / "logs") as address:
        run(address, random_prompts(64, 128, 99), 16)
        shared = [run(address, [p.copy() for p in prompts], out) for _ in range(1)]
        shared += [run(address, _moved(prompts, turn), out) for turn in range(1, context.repeats)]
        alone = run(address, prompts[: groups * members // 4], out, salted=True)
    bounds = [ran.bound / rates.prefill + ran.generated / rates.decode for ran in shared]
    seconds = statistics.median(ran.seconds for ran in shared)
    return {
        "layout": "streams",
        "shared": shared,
        "alone_quarter": alone,
        "bound_s": statistics.median(bounds),
        "shared_over_alone": 4 * alone.seconds / seconds,
        "bound_over_shared": statistics.median(bounds) / seconds,
    }


def _moved(prompts: list[Any], by: int) -> list[Any]:
    """The same workload with other ids, so that nothing of it is in the cache yet."""
    return [300 + (prompt - 300 + 1000 * by) % (VOCABULARY - 300) for prompt in prompts]


def sweep(context: argparse.Namespace) -> dict[str, Any]:
    """Token budget by slots."""
    table = []
    for slots in (64, 128, 256):
        for budget in (512, 2048, 8192):
            directory = prepare(context, CardEngine(slots, 0, 128, 128, budget))
            with suite(directory, context.work / "logs") as address:
                run(address, random_prompts(64, 128, 99), 16)
                runs = [run(address, random_prompts(384, 128, turn), 128).tokens_per_s for turn in range(2)]
            table.append({"slots": slots, "budget": budget, "tokens_per_s": runs})
            print(table[-1], flush=True)
    return {"layout": "streams", "rows": table}


def prepare(context: argparse.Namespace, engine: CardEngine) -> Path:
    """An engine directory in the work folder."""
    directory: Path = context.work / "engine"
    write_directory(directory, context.model, engine, card="nvidia-h200", capability="9.0")
    return directory


STAGES = {"plain": plain, "heads": heads, "sweep": sweep}


def main() -> None:
    """Runs one stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=4096)
    context = parser.parse_args()
    context.work.mkdir(parents=True, exist_ok=True)
    os.environ["IFAB_LIBLLAMA_VERSION"] = (context.root / "version").read_text().strip()
    context.model = context.work / "dense-7b.gguf"
    if not context.model.exists():
        began = time.perf_counter()
        write_model(context.model)
        print(f"wrote the weights in {time.perf_counter() - began:.0f} s", flush=True)
    figures = {"stage": context.stage, **STAGES[context.stage](context)}
    text = json.dumps(figures)
    (context.work / f"{context.stage}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
