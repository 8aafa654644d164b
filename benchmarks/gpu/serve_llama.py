# SPDX-License-Identifier: Apache-2.0
"""Serves a 7B F16 model (random weights) on a card with the embedded runtime, through the whole suite, and measures it.

    python3 -m benchmarks.gpu.serve_llama STAGE --root ROOT --native BUILD --work FOLDER

ROOT is what `benchmarks/gpu/build_llama.sh` made, BUILD the build folder of the native library on it;
IFAB_ENGINE_LIBRARY names that library. Client, broker, provisioner and workers are processes of their own on loopback.
Stages (`benchmarks/gpu/stages`) each print one JSON line at their end, also kept in FOLDER/STAGE.json:

    plain   128 + 128 tokens, 256 slots, nothing shared, beside llama-batched-bench in the same run, turn by turn
    heads   64 groups of 16 prompts with heads of 2,048 tokens: the bound from measured rates, with sharing, without
            (--only bound shared alone); --profile says what the engine called the runtime with, and how long it took
    sweep   token budget x slots, three by three
    ladder  1 to 2,000 clients, alone and with another engine resident on the card, at work with --resident-clients
    stall   a pool far too small, admission on and off
    layers  one layer at a time, up to the second card
    states  hidden states of the last token against PyTorch; what returning them costs
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path

from benchmarks.gpu.llama_engine import write_model
from benchmarks.gpu.stages.context import Context

STAGES = ("plain", "heads", "sweep", "ladder", "stall", "layers", "states")


def main() -> None:
    """Runs one stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--native", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="where the weights are kept (in FOLDER)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--layout", choices=["streams", "unified"], default="streams", help="of heads and states")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="of layers and heads; all where absent")
    parser.add_argument("--profile", action="store_true", help="of heads: a table of the calls into the runtime")
    parser.add_argument("--kv-type", choices=["f16", "q8_0"], default="f16", help="of heads: the cache's type")
    parser.add_argument("--rungs", default="1,16,256,2000", metavar="N,N,...", help="of the ladder: clients")
    parser.add_argument(
        "--resident-clients", type=int, default=0, metavar="N", help="of the ladder: that keep the other engine busy"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of the long run of layers; 0: none")
    words = parser.parse_args()
    words.work.mkdir(parents=True, exist_ok=True)
    os.environ["IFAB_LIBLLAMA_VERSION"] = (words.root / "version").read_text().strip()
    model = words.model or words.work / "dense-7b.gguf"
    if not model.exists():
        began = time.perf_counter()
        write_model(model)
        print(f"wrote the weights in {time.perf_counter() - began:.0f} s", flush=True)
    context = Context(
        root=words.root,
        native=words.native,
        work=words.work,
        model=model,
        repeats=words.repeats,
        requests=words.requests,
        budget=words.budget,
        layout=words.layout,
        minutes=words.minutes,
        only=tuple(words.only),
        profiled=words.profile,
        rungs=words.rungs,
        resident_clients=words.resident_clients,
        kv_type=words.kv_type,
    )
    stage = importlib.import_module(f"benchmarks.gpu.stages.{words.stage}")
    figures = {"stage": words.stage, **stage.measure(context)}
    text = json.dumps(figures)
    (words.work / f"{words.stage}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
