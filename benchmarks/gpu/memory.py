# SPDX-License-Identifier: Apache-2.0
"""Predicts what an engine takes of a card's memory, part by part, to be put beside what the card shows.

    python3 -m benchmarks.gpu.memory llama --slots 256 --resident-heads 0 --input 128 --output 128 --budget 4096
    python3 -m benchmarks.gpu.memory mining --format fp8 --rows 64 --layers 4

The first is the engine of `benchmarks.gpu.llama_engine`, the second that of `benchmarks.gpu.mining_engine` as
`benchmarks.gpu.serve_mining` serves it. Needs no card. With `--seen-mib N`, the memory of the worker's process alone
(`nvidia-smi --query-compute-apps=pid,used_memory --format=csv`), it says how far off the prediction is. Sums are in
MiB; the last line is JSON in bytes.

What each part rests on:

    weights      counted: every tensor that lies on the card, in its format
    cache        counted: cells x layers x keys and values
    activations  embedded runtime: the scheduler's buffer, which is the same for every device; the formula gives to the
                 byte what libllama 0.3.36 allocates on a processor for this model (docs/engines.md). TensorRT: what the
                 planner sets aside (`engines.planner.activation_token_bytes`)
    buffers      the embedded runtime's conversions of a product's input and output to 16 bits, and the 32 MiB that
                 cuBLAS is given; the launcher's own two buffers of every input and output
    context      assumed, `--context-mib`: the driver's context and the kernels' code of one process
    runtime, engine, launch
                 TensorRT, `--runtime-mib`, `--engine-mib`, `--launch-mib`, 0 unless they are given: what creating the
                 runtime, reading the plan beyond its weights, and the first launch take, as
                 `benchmarks.gpu.plan_memory` measures them; `--context-mib` is then its `driver_context_bytes`, and
                 `--activations-mib` its `context_bytes` instead of the planner's
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from benchmarks.gpu.llama_engine import GRANULE, HIDDEN, INTERMEDIATE, VOCABULARY, CardEngine, cache_bytes
from benchmarks.gpu.mining_model import ROW_TOKENS, dense_7b
from engines.card_tier import CardSet
from engines.model_config import ModelConfig, ModelShape
from engines.planner import MIB, activation_token_bytes, weights_bytes

CONTEXT_MIB: Final = 560
MEASURED: Final = ("runtime", "engine", "launch")
"""Parts of a TensorRT process that nothing predicts, but a card shows once for all engines of one release."""
CUBLAS_WORKSPACE: Final = 32 * MIB
LAUNCHER_BUFFERS: Final = 2
_CARDS: Final = CardSet("nvidia-h200", "9.0", 143771, 0, 1, 1, 1)


def llama_parts(engine: CardEngine) -> dict[str, int]:
    """Memory of the embedded runtime with every layer on the card, in bytes; the embedding stays with the processor."""
    matrices = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    sequences = engine.slots + engine.resident_heads
    cells_seen = engine.pool_tokens or -(-engine.sequence_tokens // GRANULE) * GRANULE
    cells = cells_seen if engine.pool_tokens else cells_seen * sequences
    tokens = -(-min(engine.step_token_budget, cells) // sequences) * sequences
    # Residual stream, its norm and two more beside the gated unit's three, in float32; ids; the mask in 16 bits.
    token = (4 * HIDDEN + 3 * INTERMEDIATE) * 4 + 24 + 2 * cells_seen
    conversions = -(-tokens * (HIDDEN + INTERMEDIATE) * 2 // (2 * MIB)) * 2 * MIB
    return {
        "weights": 2 * (VOCABULARY * HIDDEN + engine.layers * matrices) + 4 * HIDDEN * (2 * engine.layers + 1),
        "cache": cache_bytes(engine),
        "activations": tokens * token,
        "buffers": conversions + CUBLAS_WORKSPACE,
    }


def mining_parts(
    shape: ModelShape, *, rows: int, prompts: int, weights: str, packed: bool, own_kernels: bool
) -> dict[str, int]:
    """Memory of a mining engine behind the raw TensorRT launcher, in bytes, with launches of at most `rows` rows."""
    model = ModelConfig(shape, tied_embeddings=False, trained_tokens=ROW_TOKENS, end_token_ids=())
    tokens = rows * ROW_TOKENS
    inputs = (3 if packed else 1) * tokens * 4 + prompts * 4
    return {
        "weights": weights_bytes(model, weights, _CARDS, head=False),
        "cache": 0,
        "activations": tokens
        * activation_token_bytes(shape, weights, _CARDS, row_tokens=ROW_TOKENS, own_kernels=own_kernels),
        "buffers": LAUNCHER_BUFFERS * (inputs + prompts * shape.hidden_size * 2),
    }


def report(parts: dict[str, int], context_mib: int, seen_mib: int | None, more: dict[str, Any]) -> None:
    """Prints the parts, their sum, and how far it is from what was seen."""
    parts = {**parts, "context": context_mib * MIB}
    total = sum(parts.values())
    for name, size in (*parts.items(), ("total", total)):
        print(f"{name:12} {size / MIB:12,.1f} MiB")
    figures: dict[str, Any] = {**more, **parts, "total": total}
    if seen_mib is not None:
        figures |= {"seen": seen_mib * MIB, "predicted_over_seen": total / (seen_mib * MIB)}
        print(f"{'seen':12} {seen_mib:12,.1f} MiB, predicted over seen {figures['predicted_over_seen']:.3f}")
    print(json.dumps(figures))


def main() -> None:
    """Predicts what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    engines = parser.add_subparsers(dest="engine", required=True)
    llama = engines.add_parser("llama", help="the 7B F16 engine of benchmarks.gpu.llama_engine")
    for name in ("slots", "resident-heads", "input", "output", "budget"):
        llama.add_argument(f"--{name}", type=int, required=True)
    llama.add_argument("--pool-tokens", type=int, default=0, help="the layout is unified, with a pool of so many")
    llama.add_argument("--layers", type=int, default=32)
    mining = engines.add_parser("mining", help="the 7B-wide mining engine of benchmarks.gpu.mining_engine")
    mining.add_argument("--layers", type=int, default=4)
    mining.add_argument("--rows", type=int, required=True)
    mining.add_argument("--prompts", type=int, help="most prompts of a launch; four times the rows, as it is built")
    mining.add_argument("--format", choices=("bfloat16", "fp8"), required=True)
    mining.add_argument("--own-kernels", action="store_true", help="attention, norms and gated units are ours")
    mining.add_argument("--activations-mib", type=int, help="measured, instead of the planner's")
    for name in MEASURED:
        mining.add_argument(f"--{name}-mib", type=int, default=0, help="measured on a card")
    mining.add_argument("--layout", choices=("packed", "own-rows"), default="packed")
    for each in (llama, mining):
        each.add_argument("--context-mib", type=int, default=CONTEXT_MIB, help=f"assumed; {CONTEXT_MIB} by default")
        each.add_argument("--seen-mib", type=int, help="what nvidia-smi shows of the worker's process")
    said = parser.parse_args()
    if said.engine == "llama":
        engine = CardEngine(
            slots=said.slots,
            resident_heads=said.resident_heads,
            max_input_tokens=said.input,
            max_output_tokens=said.output,
            step_token_budget=said.budget,
            layout="unified" if said.pool_tokens else "streams",
            pool_tokens=said.pool_tokens,
            layers=said.layers,
        )
        report(llama_parts(engine), said.context_mib, said.seen_mib, {"engine": "llama"})
        return
    shape = dense_7b(said.layers)
    prompts = said.prompts or 4 * said.rows
    packed = said.layout == "packed"
    parts = mining_parts(
        shape, rows=said.rows, prompts=prompts, weights=said.format, packed=packed, own_kernels=said.own_kernels
    )
    if said.activations_mib is not None:
        parts["activations"] = said.activations_mib * MIB
    parts |= {name: getattr(said, f"{name}_mib") * MIB for name in MEASURED}
    report(parts, said.context_mib, said.seen_mib, {"engine": "mining"})


if __name__ == "__main__":
    main()
